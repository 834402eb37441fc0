"""Room in the host's memory for blocks that preempted sequences will want again.

A preempted sequence gives its blocks back, and what they hold stays findable until the room is needed. Only then, when
such a block is about to be written over, is it copied out, and only if somebody who was preempted waits for it. So
nothing is copied that would have survived. When the sequence comes back, blocks that are found neither in the pool nor
here are computed again.

Blocks go by their keys, as in the pool. A key holds all tokens before it and the scope in which prefixes are shared
(`core.prefix`), so what a tenant finds here it could have found in the pool.

What is to be copied is handed over as `BlockCopy`s, in an order that must be kept: a slot or a block may be used twice
in a step. All of them come before whatever the step writes.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class BlockCopy(NamedTuple):
    """One block's content, on its way."""

    block: int
    slot: int
    out: bool
    """From the block to the slot; otherwise back."""


class SwapSpace:
    """Which slot holds which block, and who waits for it.

    Args:
        slots: So many blocks fit.

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
        """Slots that hold nothing."""
        return len(self._free)

    def want(self, keys: Iterable[bytes]) -> None:
        """Notes that a sequence waits for these blocks."""
        self._wanted.update(keys)

    def release(self, keys: Iterable[bytes]) -> None:
        """One waits no longer. What nobody waits for is dropped."""
        for key in keys:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
                slot = self._slot_of.pop(key, None)
                if slot is not None:
                    self._free.append(slot)

    def on_evict(self, key: bytes, block: int) -> None:
        """The block with this key is about to be written over: it is copied out if it is wanted and there is room."""
        if key in self._wanted and key not in self._slot_of and self._free:
            slot = self._slot_of[key] = self._free.pop()
            self._moves.append(BlockCopy(block, slot, out=True))
            self.swapped += 1

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def restore(self, key: bytes, block: int) -> None:
        """Copies the content with this key into a block; it stays here for others who wait."""
        self._moves.append(BlockCopy(block, self._slot_of[key], out=False))
        self.restored += 1

    def take_moves(self) -> list[BlockCopy]:
        """Takes the copies to be made before the next step, in this order."""
        moves, self._moves = self._moves, []
        return moves
