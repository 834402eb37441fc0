"""Block table of a sequence: token position ``p`` is in ``blocks[p // block_tokens]``.

Full blocks are immutable and may be shared. A sequence writes only behind its shared prefix, in blocks that no other
sequence holds. So sharing works without copies and without copy-on-write. Each further choice of an ``n > 1`` request
reuses all full blocks of the prompt and recomputes at most one block of tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence

from maitred.core.prefix import block_key, root_key
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.swap import SwapSpace
from maitred.engine.kv.window import WindowTable


class BlockTable:
    """Block table that holds blocks of a pool for one sequence.

    Args:
        pool: Pool of the blocks.
        block_tokens: Tokens per block.
        scope: Scope inside which prefixes are shared.
    """

    __slots__ = (
        "_keys", "_pool", "_published", "_root", "_wanted", "block_tokens", "blocks", "capacity_tokens", "window"
    )  # fmt: skip

    def __init__(self, pool: BlockPool, block_tokens: int, scope: str) -> None:
        self.block_tokens = block_tokens
        self.blocks: list[int] = []
        self.capacity_tokens = 0
        """Number of tokens that fit into the held blocks."""
        self._pool = pool
        self._root = root_key(scope)
        self._keys: list[bytes] = []
        """Keys of the sequence's full blocks, which are computed once and kept after a release."""
        self._published = 0
        """Number of leading blocks that are already published."""
        self._wanted = 0
        """Number of leading blocks for which the sequence waits in the `SwapSpace`."""
        self.window = None if pool.window is None else WindowTable(pool.window, block_tokens)
        """Blocks of the layers with a window; None: there are no such layers, or they use the same blocks."""

    @property
    def writable_tokens(self) -> int:
        """Number of tokens for which all layers have blocks."""
        if self.window is None:
            return self.capacity_tokens
        return min(self.capacity_tokens, len(self.window.blocks) * self.block_tokens)

    @property
    def shared_blocks(self) -> int:
        """Approximate number of blocks that other sequences also hold, so that a release would not free them.

        Only prefixes are shared, so the shared blocks are the leading ones.
        """
        reference_count = self._pool.reference_count
        return bisect_left(self.blocks, True, key=lambda block: reference_count(block) == 1)

    def cached_tokens(self, tokens: Sequence[int], reusable: int | None = None) -> int:
        """Returns how many leading tokens `open` would find in the prefix cache now."""
        return len(self._cached_prefix(tokens, reusable)) * self.block_tokens

    def open(
        self,
        tokens: Sequence[int],
        reusable: int | None = None,
        *,
        capacity_tokens: int = 0,
        reserved: int = 0,
    ) -> int | None:
        """Takes blocks for all of `tokens`, reusing the longest cached prefix.

        Args:
            tokens: All known tokens of the sequence.
            reusable: Leading tokens that may be found in the cache (`Sequence.reusable_tokens`); None: all but the
                last one.
            capacity_tokens: Tokens to take blocks for, if this is more than `tokens`.
            reserved: Blocks that must stay idle for others.

        Returns:
            Number of leading tokens with cached KV; None, without any blocks held, if the pool has too few blocks.
        """
        assert not self.blocks
        found = self._cached_prefix(tokens, reusable)
        present = [block for block in found if block is not None]
        self._pool.share(present)
        missing = self.blocks_for(max(len(tokens), capacity_tokens)) - len(present)
        fresh = self._pool.allocate(missing) if missing + reserved <= self._pool.idle else None
        if fresh is None:
            self._pool.free(present)
            return None
        self.blocks = present + fresh if len(present) == len(found) else self._restore(found, fresh)
        self.capacity_tokens = len(self.blocks) * self.block_tokens
        self._published = len(found)
        if self.window is not None:
            keys = self._keys[: len(found)]
            self.window.open(keys, self.window.find(keys)[1])
        return len(found) * self.block_tokens

    def grow(self, tokens: int) -> bool:
        """Extends the table to `tokens` in total; returns False without changes if blocks are missing."""
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
        """Publishes the blocks that the first `written` tokens fill."""
        full = written // self.block_tokens
        if full > self._published:
            self._extend_keys(tokens, full)
            for position in range(self._published, full):
                fresh = self._pool.publish(self.blocks[position], self._keys[position])
                if self.window is not None:
                    # Both parts of a position are found together, so that no sequence holds more of one than of the
                    # other.
                    self.window.publish(position, self._keys[position], replace=fresh)
            self._published = full

    def keys(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Returns the keys of the first `count` blocks, which `tokens` fill."""
        self._extend_keys(tokens, count)
        return self._keys[:count]

    def await_return(self) -> None:
        """Marks the published blocks as wanted before a release, so that they are swapped if necessary."""
        if self._pool.swap is not None:
            self._wanted = self._published
            self._pool.swap.want(self._keys[: self._wanted])
            if self._window_swap is not None:
                self._window_swap.want(self._keys[: self._wanted])

    def await_no_more(self) -> None:
        """Stops waiting for swapped blocks: the sequence has them again, or no longer needs them."""
        if self._pool.swap is not None and self._wanted:
            self._pool.swap.release(self._keys[: self._wanted])
            if self._window_swap is not None:
                self._window_swap.release(self._keys[: self._wanted])
            self._wanted = 0

    def find_blocks(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns the cached blocks of the first `count` blocks of these tokens, up to the first miss.

        They may belong to other sequences, because the first block with a key keeps it.
        """
        found: list[int] = []
        for key in self.keys(tokens, count):
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def find_window_blocks(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns the blocks with a window at the end of the first `count` blocks; empty: some are not in the pool."""
        if self.window is None:
            return []
        length, found = self.window.find(self.keys(tokens, count))
        present = [block for block in found if block is not None]
        return present if length == count and len(present) == len(found) else []

    def release(self) -> None:
        """Frees all blocks of the table. The content stays findable until it is evicted."""
        self._pool.free(self.blocks)
        self.blocks = []
        self.capacity_tokens = 0
        self._published = 0
        if self.window is not None:
            self.window.release()

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of blocks that this number of tokens needs."""
        return -(-tokens // self.block_tokens)

    @property
    def _window_swap(self) -> SwapSpace | None:
        window = self._pool.window
        return None if window is None else window.pool.swap

    def _extend_keys(self, tokens: Sequence[int], count: int) -> None:
        for position in range(len(self._keys), count):
            parent = self._keys[position - 1] if position else self._root
            start = position * self.block_tokens
            self._keys.append(block_key(parent, tokens[start : start + self.block_tokens]))

    def _restore(self, found: list[int | None], fresh: list[int]) -> list[int]:
        """Returns the sequence's blocks, and copies swapped content into new ones."""
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

    def _cached_prefix(self, tokens: Sequence[int], reusable: int | None) -> list[int | None]:
        """Returns the blocks of the longest cached prefix, with None for blocks in the swap space."""
        count = (len(tokens) - 1 if reusable is None else reusable) // self.block_tokens
        self._extend_keys(tokens, count)
        found: list[int | None] = []
        swap = self._pool.swap
        for key in self._keys[:count]:
            block = self._pool.find(key)
            if block is None and (swap is None or key not in swap):
                break
            found.append(block)
        if self.window is not None:
            del found[self.window.find(self._keys[: len(found)])[0] :]
        return found
