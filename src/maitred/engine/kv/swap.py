"""Swap space: host memory for blocks that preempted sequences will need again.

A preempted sequence frees its blocks, and their content stays findable until the blocks are reused. A block is copied
to the host only when it is about to be overwritten, and only if a preempted sequence waits for it. So content that
would have survived is never copied. When the sequence is admitted again, blocks that are neither in the pool nor here
are recomputed.

Blocks are identified by their keys, as in the pool. A key depends on all tokens up to the block's end and on the
sharing scope of the prefix (`core.prefix`). So a tenant can find only blocks here that it could also have found in the
pool.

The copies are returned as a list of `BlockCopy`, whose order must be kept because a slot or a block may be used twice
in a step. All copies are made before the step writes to the KV cache.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Copy of one block's content between the device and the host."""

    block: int
    slot: int
    out: bool
    """Whether the copy goes from the block to the slot; otherwise it goes back."""


class SwapSpace:
    """Map of swap slots to block keys, with the number of sequences that wait for each key.

    Args:
        slots: Number of blocks that fit into the space.

    Attributes:
        swapped: Blocks copied out so far.
        restored: Blocks copied back so far.
    """

    def __init__(self, slots: int) -> None:
        self.total = slots
        self.swapped = 0
        self.restored = 0
        self._free = list(range(slots))
        self._slot_of: dict[bytes, int] = {}
        self._wanted: Counter[bytes] = Counter()
        self._moves: list[BlockCopy] = []

    @property
    def free(self) -> int:
        """Number of slots that are free."""
        return len(self._free)

    def want(self, keys: Iterable[bytes]) -> None:
        """Notes that one more sequence waits for these blocks."""
        self._wanted.update(keys)

    def release(self, keys: Iterable[bytes]) -> None:
        """Notes that one fewer sequence waits for these blocks. Blocks for which no sequence waits are dropped."""
        for key in keys:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
                slot = self._slot_of.pop(key, None)
                if slot is not None:
                    self._free.append(slot)

    def on_evict(self, key: bytes, block: int) -> None:
        """Copies a block that will be overwritten to the host, if it is wanted and a slot is free."""
        if key in self._wanted and key not in self._slot_of and self._free:
            slot = self._slot_of[key] = self._free.pop()
            self._moves.append(BlockCopy(block, slot, out=True))
            self.swapped += 1

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def restore(self, key: bytes, block: int) -> None:
        """Copies the content with this key into a block, and keeps it for other waiting sequences."""
        self._moves.append(BlockCopy(block, self._slot_of[key], out=False))
        self.restored += 1

    def take_moves(self) -> list[BlockCopy]:
        """Takes the copies to be made before the next step, in this order."""
        moves, self._moves = self._moves, []
        return moves
