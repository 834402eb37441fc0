"""Blocks of the layers with a sliding window, of which a sequence holds only what its next tokens can see.

Such layers have blocks of their own, in a pool of their own. Position ``p`` of a sequence is in the block with the same
index as in the other layers' table. Blocks that no later token sees are returned while the sequence runs. So a long
sequence takes a constant number of them, however long it is::

    tokens    0 ............................ computed .... end
    blocks    [returned] [returned] [ window  ][  step  ]

A prefix from the cache can be reused where its last blocks are here, as many as the window covers.
"""

from collections.abc import Sequence

from maitred.engine.kv.blocks import WindowPool


def window_blocks_needed(window: int, block_tokens: int, *, sequences: int, step_tokens: int) -> int:
    """Returns how many blocks running sequences hold at most, so that a pool of this size is never exhausted.

    A sequence holds its window, what it computed since blocks were last returned (a block), and the parts of a block on
    both sides. The tokens of a step, however they are shared out, come on top.
    """
    return sequences * ((window + 2 * block_tokens - 1) // block_tokens + 3) + step_tokens // block_tokens + 1


class WindowTable:
    """Block table of a sequence for the layers with a window.

    Args:
        window: Pool of their blocks.
        block_tokens: Tokens per block.
    """

    __slots__ = ("_block_tokens", "_window", "blocks", "first")

    def __init__(self, window: WindowPool, block_tokens: int) -> None:
        self._window = window
        self._block_tokens = block_tokens
        self.blocks: list[int] = []
        """Blocks by position; those before `first` are not held, and may be any."""
        self.first = 0
        """Index of the first held block."""

    @property
    def held(self) -> list[int]:
        """Blocks that the sequence holds."""
        return self.blocks[self.first :]

    def find(self, keys: Sequence[bytes]) -> tuple[int, list[int | None]]:
        """Finds the longest reusable prefix among full blocks with these keys.

        Returns:
            Its number of blocks, and those of them that the token behind it sees: None for blocks in the swap space.
        """
        pool = self._window.pool
        count = len(keys)
        found: list[int | None] = []
        position = count
        while position > self._seen_from(count * self._block_tokens):
            position -= 1
            block = pool.find(keys[position])
            if block is None and (pool.swap is None or keys[position] not in pool.swap):
                count, found = position, []  # every longer prefix has this block in its window
            else:
                found.append(block)
        return count, found[::-1]

    def open(self, keys: Sequence[bytes], found: Sequence[int | None]) -> None:
        """Takes the blocks that `find` has found at the end of a prefix with these keys."""
        pool = self._window.pool
        self.first = len(keys) - len(found)
        pool.share([block for block in found if block is not None])
        self.blocks = [0] * self.first
        for key, block in zip(keys[self.first :], found, strict=True):
            if block is None:
                block = self._take(1)[0]
                assert pool.swap is not None
                pool.swap.restore(key, block)
                pool.publish(block, key)
            self.blocks.append(block)

    def cover(self, computed: int, end: int) -> None:
        """Returns the blocks that no token from `computed` on sees, and takes those for tokens up to `end`."""
        first = min(self._seen_from(computed), len(self.blocks))
        if first > self.first:
            self._window.pool.free(self.blocks[self.first : first])
            self.first = first
        missing = -(-end // self._block_tokens) - len(self.blocks)
        if missing > 0:
            self.blocks += self._take(missing)

    def publish(self, position: int, key: bytes, *, replace: bool) -> None:
        """Makes a completely written block findable; see `BlockPool.publish`."""
        if position >= self.first:
            self._window.pool.publish(self.blocks[position], key, replace=replace)

    def release(self) -> None:
        """Gives all blocks back to the pool."""
        self._window.pool.free(self.held)
        self.blocks, self.first = [], 0

    def _seen_from(self, position: int) -> int:
        """Returns the index of the first block that the token at a position sees."""
        return max(0, position - self._window.tokens + 1) // self._block_tokens

    def _take(self, count: int) -> list[int]:
        blocks = self._window.pool.allocate(count)
        assert blocks is not None, "the pool is as large as running sequences can need (`window_blocks_needed`)"
        return blocks
