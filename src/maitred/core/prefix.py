"""Names for the content of KV blocks, the same in the engine that holds them and in the gateway that looks for them.

The KV of a token depends on every token before it, so a block's content is named by a chain: the key of a block is the
digest of its parent's key and its own tokens. Two sequences share a key exactly when they share the whole prefix up to
and including the block. The chain starts at a digest of the cache scope, so equal prompts in different scopes have
nothing in common and one tenant cannot probe for another's prompts by timing.

A cryptographic digest (BLAKE2b, 128 bits) is used because a collision would show one user another user's context; at
about a microsecond per block it is not worth saving. The idea of block-level hash chains is vLLM's automatic prefix
caching (Kwon et al., SOSP'23, and its design notes).
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec

KEY_BYTES = 16


class BlockUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Update of an engine's prefix cache since the last one: which blocks can be found, and which no more.

    Only how it ended counts: what was stored and removed in between is said to be removed, so the order within does
    not matter.
    """

    sequence: int
    """Counts up by one from one to the next while the engine lives; after a gap the whole must be asked for."""
    block_tokens: int
    total_blocks: int
    stored: bytes = b""
    """Keys, one after the other."""
    removed: bytes = b""
    whole: bool = False
    """`stored` is all that there is, as of this number."""


def split_keys(joined: bytes) -> list[bytes]:
    """The keys that were written one after the other."""
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]


def shared_scope(cache_scope: str) -> str:
    """The scope of blocks that all requests of a cache scope share, and not only the choices of one."""
    return f"shared:{cache_scope}"


@lru_cache(maxsize=4096)
def root_key(scope: str) -> bytes:
    """Returns the parent key of a scope's first blocks."""
    return blake2b(scope.encode(), digest_size=KEY_BYTES, person=b"maitred-scope").digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that holds `tokens` after the prefix that `parent` names."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def chain(scope: str, tokens: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """The keys of the whole blocks that `tokens` fill, from the first; each is computed when it is asked for."""
    data = array("I", tokens)
    step = block_tokens * data.itemsize
    content = memoryview(data).cast("B")
    key = root_key(scope)
    for start in range(0, len(content) - step + 1, step):
        key = blake2b(key + content[start : start + step], digest_size=KEY_BYTES).digest()
        yield key
