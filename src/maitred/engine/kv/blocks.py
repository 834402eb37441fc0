"""The block pool: every KV block is held by a number of sequences, or idle and up for reuse.

An idle block keeps its content and, if it has one, its key, until the room is needed: a later sequence with the same
prefix revives it for nothing. Idle blocks are taken back least recently used first. There is no third state, hence
nothing to leak: `held + idle == total` at all times, and a pool whose sequences are gone has every block idle.

All operations are O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from maitred.engine.kv.swap import SwapSpace


class BlockPool:
    """Reference counts, the prefix index and the order of eviction, over block numbers ``0 … total-1``.

    Args:
        total: Number of blocks (at least 1).
        swap: Where content goes that is taken back and wanted; None: nowhere.

    Attributes:
        cached: Idle blocks that can be found by their keys.
    """

    def __init__(self, total: int, swap: SwapSpace | None = None) -> None:
        self.swap = swap
        self.total = total
        self.evictions = 0
        self.cached = 0
        self._reference_counts = [0] * total
        self._keys: list[bytes | None] = [None] * total
        self._by_key: dict[bytes, int] = {}
        self.changes = BlockChanges()
        # First out first; a linked list underneath, so that reviving a block from the middle is O(1).
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    @property
    def idle(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._idle)

    def keys(self) -> Iterable[bytes]:
        """Returns the keys of all blocks that can be found."""
        return self._by_key.keys()

    def reference_count(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._reference_counts[block]

    def find(self, key: bytes) -> int | None:
        """The block whose content has this key, held or idle."""
        return self._by_key.get(key)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks for one holder, evicting cached content if need be; None when there are too few."""
        if count > len(self._idle):
            return None
        blocks = [self._idle.popitem(last=False)[0] for _ in range(count)]
        changed = self.changes.take_update
        for block in blocks:
            self._reference_counts[block] = 1
            key = self._keys[block]
            if key is not None:
                del self._by_key[key]
                self._keys[block] = None
                self.evictions += 1
                self.cached -= 1
                changed[key] = False
                if self.swap is not None:
                    self.swap.on_evict(key, block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to each block; an idle one is revived with its content."""
        for block in blocks:
            if self._reference_counts[block] == 0:
                del self._idle[block]
                self.cached -= self._keys[block] is not None
            self._reference_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Removes one holder from each block of a sequence.

        The last block goes first: the further from the root, the fewer can reuse it. Blocks that nobody can find
        again (without a key) are reused before any cached one.
        """
        for block in reversed(blocks):
            self._reference_counts[block] -= 1
            if self._reference_counts[block] == 0:
                self._idle[block] = None
                if self._keys[block] is None:
                    self._idle.move_to_end(block, last=False)
                else:
                    self.cached += 1

    def clear(self) -> None:
        """Forgets all contents: what is in the blocks is gone. Only while nobody holds any."""
        assert self.idle == self.total
        self.changes.take_update.update(dict.fromkeys(self._by_key, False))
        self._by_key.clear()
        self._keys = [None] * self.total
        self.cached = 0

    def publish(self, block: int, key: bytes) -> None:
        """Makes a held, completely written block findable. The first block with a key keeps it."""
        if key not in self._by_key:
            self._by_key[key] = block
            self._keys[block] = key
            self.changes.take_update[key] = True


MOST_CHANGES = 8192
"""That are told at once: 128 KiB of keys. A step stores fewer blocks than it computes tokens."""


class BlockChanges:
    """Blocks that became findable, or no longer are, since the changes were last taken.

    For those who follow the prefix cache from outside. A change is one entry in a dict, under the block's key: what is
    stored and evicted before anybody asks is one change and not two, and the number of entries is bounded. Where there
    are more, none of them are reported and a number is skipped, by which a follower notices that it has to ask for the
    whole (`core.prefix.BlockUpdate`).

    Attributes:
        take_update: By key, whether the block can be found now. Written by the pool.
        sequence: Of what was taken last.
    """

    __slots__ = ("sequence", "take_update")

    def __init__(self) -> None:
        self.take_update: dict[bytes, bool] = {}
        self.sequence = 0

    def take(self) -> tuple[bytes, bytes] | None:
        """Takes what was stored and what was removed, as joined keys; None: nothing, or more than is reported."""
        changed = self.take_update
        if not changed:
            return None
        self.sequence += 1
        if len(changed) > MOST_CHANGES:
            changed.clear()
            return None
        stored = b"".join([key for key, there in changed.items() if there])
        removed = b"".join([key for key, there in changed.items() if not there])
        changed.clear()
        return stored, removed
