"""Keys of KV block contents, shared by the engine and the gateway.

The KV of a token depends on every token before it, so block keys form a hash chain: the key of a block is the digest of
its parent's key and its own tokens. Two sequences share a key exactly when they share the whole prefix up to and
including the block. The chain starts at a digest of the cache scope, so equal prompts in different scopes have nothing
in common and one tenant cannot probe for another's prompts by timing.

A cryptographic digest (BLAKE2b, 128 bits) is used because a collision would show one user another user's context; it
costs only about a microsecond per block. The idea of block-level hash chains is vLLM's automatic prefix caching (Kwon
et al., SOSP'23, and its design notes).
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec

KEY_BYTES = 16


class BlockUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Update of an engine's prefix cache since the last one: added and removed blocks.

    An update describes the final state: a block that was stored and removed since the last update is listed as removed,
    so the order inside an update does not matter.
    """

    sequence: int
    """Sequence number that grows by 1 per update; after a gap, request a full update."""
    block_tokens: int
    total_blocks: int
    stored: bytes = b""
    """Concatenated keys of the stored blocks."""
    removed: bytes = b""
    whole: bool = False
    """Whether `stored` is the complete content at this sequence number."""


def split_keys(joined: bytes) -> list[bytes]:
    """Splits concatenated block keys into a list."""
    return [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]


def shared_scope(cache_scope: str) -> str:
    """Returns the scope of blocks that all requests of a cache scope share."""
    return f"shared:{cache_scope}"


@lru_cache(maxsize=4096)
def root_key(scope: str) -> bytes:
    """Returns the parent key of a scope's first blocks."""
    return blake2b(scope.encode(), digest_size=KEY_BYTES, person=b"maitred-scope").digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the key of the block with `tokens` after the prefix with the key `parent`."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def chain(scope: str, tokens: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """Yields the keys of the full blocks of `tokens` in order, each computed on demand."""
    data = array("I", tokens)
    step = block_tokens * data.itemsize
    content = memoryview(data).cast("B")
    key = root_key(scope)
    for start in range(0, len(content) - step + 1, step):
        key = blake2b(key + content[start : start + step], digest_size=KEY_BYTES).digest()
        yield key
