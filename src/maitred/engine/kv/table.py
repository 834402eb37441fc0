"""One sequence's blocks, in order: token position ``p`` lives in ``blocks[p // block_tokens]``.

Full blocks are immutable and may be shared; a sequence writes only behind its shared prefix, in blocks that it alone
holds. So sharing needs neither copies nor copy-on-write: a sibling of an ``n > 1`` request reuses all full blocks of
the prompt and recomputes at most one block's worth of tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence

from maitred.core.prefix import block_key, root_key
from maitred.engine.kv.blocks import BlockPool


class BlockTable:
    """Holds blocks of a pool on behalf of one sequence.

    Args:
        pool: Where the blocks come from and go back to.
        block_tokens: Tokens per block.
        scope: Prefixes are shared only inside a scope.
    """

    __slots__ = ("_keys", "_pool", "_published", "_root", "_wanted", "block_tokens", "blocks", "capacity_tokens")

    def __init__(self, pool: BlockPool, block_tokens: int, scope: str) -> None:
        self.block_tokens = block_tokens
        self.blocks: list[int] = []
        self.capacity_tokens = 0
        """Tokens that fit in the blocks held."""
        self._pool = pool
        self._root = root_key(scope)
        self._keys: list[bytes] = []
        """Keys of the full blocks of the sequence's tokens, computed once; they outlive a release."""
        self._published = 0
        """Leading blocks that are already findable."""
        self._wanted = 0
        """Leading blocks that the sequence waits to get back; see `SwapSpace`."""

    @property
    def shared_blocks(self) -> int:
        """Blocks that others hold too, and so would not be free after a release; at least nearly exact.

        Sharing goes by prefix: the leading blocks are the shared ones.
        """
        reference_count = self._pool.reference_count
        return bisect_left(self.blocks, True, key=lambda block: reference_count(block) == 1)

    def cached_tokens(self, tokens: Sequence[int]) -> int:
        """How many leading tokens `open` would find in the cache now."""
        return len(self._cached_prefix(tokens)) * self.block_tokens

    def open(self, tokens: Sequence[int], *, capacity_tokens: int = 0, reserved: int = 0) -> int | None:
        """Takes blocks for all of `tokens`, reusing the longest cached prefix.

        At least one token is left to compute, since its logits are wanted.

        Args:
            tokens: All that the sequence knows so far.
            capacity_tokens: Take blocks for so many, if that is more.
            reserved: Blocks that must stay idle for others.

        Returns:
            How many leading tokens need not be computed; None, holding nothing, when the pool has too few blocks.
        """
        assert not self.blocks
        found = self._cached_prefix(tokens)
        reusable = [block for block in found if block is not None]
        self._pool.share(reusable)
        missing = self.blocks_for(max(len(tokens), capacity_tokens)) - len(reusable)
        fresh = self._pool.allocate(missing) if missing + reserved <= self._pool.idle else None
        if fresh is None:
            self._pool.free(reusable)
            return None
        self.blocks = reusable + fresh if len(reusable) == len(found) else self._restore(found, fresh)
        self.capacity_tokens = len(self.blocks) * self.block_tokens
        self._published = len(found)
        return len(found) * self.block_tokens

    def grow(self, tokens: int) -> bool:
        """Makes room for `tokens` in all; False, changing nothing, when the pool has too few blocks."""
        missing = self.blocks_for(tokens) - len(self.blocks)
        if missing <= 0:
            return True
        fresh = self._pool.allocate(missing)
        if fresh is None:
            return False
        self.blocks += fresh
        self.capacity_tokens = len(self.blocks) * self.block_tokens
        return True

    def publish(self, tokens: Sequence[int], written: int) -> None:
        """Makes the blocks findable that the first `written` tokens fill."""
        full = written // self.block_tokens
        if full > self._published:
            self._extend_keys(tokens, full)
            for position in range(self._published, full):
                self._pool.publish(self.blocks[position], self._keys[position])
            self._published = full

    def keys(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The keys of the first `count` blocks, which `tokens` fill."""
        self._extend_keys(tokens, count)
        return self._keys[:count]

    def await_return(self) -> None:
        """Before a release: what is findable now is wanted again, so it is kept in the host's memory if need be."""
        if self._pool.swap is not None:
            self._wanted = self._published
            self._pool.swap.want(self._keys[: self._wanted])

    def await_no_more(self) -> None:
        """Stops waiting for swapped blocks: the sequence has them again, or needs them no more."""
        if self._pool.swap is not None and self._wanted:
            self._pool.swap.release(self._keys[: self._wanted])
            self._wanted = 0

    def find_blocks(self, tokens: Sequence[int], count: int) -> list[int]:
        """The blocks that whoever comes with the first `count` blocks of these tokens would find, up to the first gap.

        They need not be those of this sequence: the first block with a key keeps it.
        """
        found: list[int] = []
        for key in self.keys(tokens, count):
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def release(self) -> None:
        """Gives every block back. The content stays findable until it is evicted."""
        self._pool.free(self.blocks)
        self.blocks = []
        self.capacity_tokens = 0
        self._published = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-tokens // self.block_tokens)

    def _extend_keys(self, tokens: Sequence[int], count: int) -> None:
        for position in range(len(self._keys), count):
            parent = self._keys[position - 1] if position else self._root
            start = position * self.block_tokens
            self._keys.append(block_key(parent, tokens[start : start + self.block_tokens]))

    def _restore(self, found: list[int | None], fresh: list[int]) -> list[int]:
        """The sequence's blocks, where some of what was found has to be copied into fresh ones."""
        assert self._pool.swap is not None
        left = iter(fresh)
        blocks = []
        for key, block in zip(self._keys, found, strict=False):
            if block is None:
                block = next(left)
                self._pool.swap.restore(key, block)
                self._pool.publish(block, key)
            blocks.append(block)
        return [*blocks, *left]

    def _cached_prefix(self, tokens: Sequence[int]) -> list[int | None]:
        """The blocks of the longest prefix that need not be computed; None for those in the host's memory."""
        count = (len(tokens) - 1) // self.block_tokens
        self._extend_keys(tokens, count)
        found: list[int | None] = []
        swap = self._pool.swap
        for key in self._keys[:count]:
            block = self._pool.find(key)
            if block is None and (swap is None or key not in swap):
                break
            found.append(block)
        return found
