"""Block pool: each KV block is held by one or more sequences, or idle and free for reuse.

An idle block keeps its content and its key (if any) until the block is needed. A later sequence with the same prefix
can reuse it at no cost. Idle blocks are evicted in least-recently-used order. There is no third state, so no block can
leak: `held + idle == total` at all times, and without sequences all blocks are idle.

All operations are O(1) per block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maitred.engine.kv.swap import SwapSpace


class WindowPool(NamedTuple):
    """Pool of the blocks of layers with a window, beside the pool of all other layers."""

    pool: "BlockPool"
    tokens: int
    """The window: a token attends to so many tokens at most, itself the last one."""
    pin_blocks: int
    """Number of blocks that pins may hold, because running sequences never need them."""


class BlockPool:
    """Pool of block numbers ``0 … total-1``, with reference counts, prefix index and eviction order.

    Args:
        total: Number of blocks (at least 1).
        swap: Host memory for evicted blocks that preempted sequences need; None: evicted content is lost.
        window: Blocks of the layers with a sliding window, which then are in none of this pool's; None: there are no
            such layers, or they use the same blocks.

    Attributes:
        cached: Idle blocks that can be found by their keys.
    """

    def __init__(self, total: int, swap: SwapSpace | None = None, window: WindowPool | None = None) -> None:
        self.swap = swap
        self.window = window
        self.total = total
        self.evictions = 0
        self.cached = 0
        self._reference_counts = [0] * total
        self._keys: list[bytes | None] = [None] * total
        self._by_key: dict[bytes, int] = {}
        self.changes = BlockChanges()
        # The first block is evicted first. The container uses a linked list, so reviving a block from the middle is
        # O(1).
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    @property
    def idle(self) -> int:
        """Number of blocks that can be allocated now."""
        return len(self._idle)

    def keys(self) -> Iterable[bytes]:
        """Returns the keys of all blocks that can be found."""
        return self._by_key.keys()

    def reference_count(self, block: int) -> int:
        """Returns the number of sequences that hold the block."""
        return self._reference_counts[block]

    def find(self, key: bytes) -> int | None:
        """Returns the block whose content has this key, held or idle."""
        return self._by_key.get(key)

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` blocks for one sequence and evicts if necessary; None if there are too few."""
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
        """Increments the reference count of each block; an idle block is revived with its content."""
        for block in blocks:
            if self._reference_counts[block] == 0:
                del self._idle[block]
                self.cached -= self._keys[block] is not None
            self._reference_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Decrements the reference count of each block of a sequence.

        The last block becomes evictable first, because fewer sequences can reuse blocks far from the start. Blocks
        without a key cannot be found again, so they are reused before any cached block.
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
        """Clears the prefix index, because the contents of all blocks are lost.

        Call this only while no sequence holds a block.
        """
        assert self.idle == self.total
        self.changes.take_update.update(dict.fromkeys(self._by_key, False))
        self._by_key.clear()
        self._keys = [None] * self.total
        self.cached = 0
        if self.window is not None:
            self.window.pool.clear()

    def publish(self, block: int, key: bytes, *, replace: bool = False) -> bool:
        """Makes a held, completely written block findable by its key.

        Args:
            block: The block.
            key: Key of its content.
            replace: Whether the block takes the key from another one that has it; otherwise the first one keeps it.

        Returns:
            Whether the block has become findable.
        """
        other = self._by_key.get(key)
        if other is not None:
            if not replace or other == block:
                return False
            self._keys[other] = None
            if self._reference_counts[other] == 0:
                self._idle.move_to_end(other, last=False)
                self.cached -= 1
        self._by_key[key] = block
        self._keys[block] = key
        self.changes.take_update[key] = True
        return True


MOST_CHANGES = 8192
"""Maximum number of changes in one update: 128 KiB of keys. A step stores fewer blocks than it computes tokens."""


class BlockChanges:
    """Blocks that became findable or were evicted since the changes were last taken.

    Receivers use the changes to track the prefix cache from outside. A change is one entry in a dict, under the block's
    key. So a block that is stored and evicted between two reports is one change, and the number of entries is bounded.
    If there are more changes, none is reported and one sequence number is skipped. The gap tells a receiver to request
    the whole content (`core.prefix.BlockUpdate`).

    Attributes:
        take_update: Key -> whether the block can be found now; the pool writes it.
        sequence: Sequence number of the last update taken.
    """

    __slots__ = ("sequence", "take_update")

    def __init__(self) -> None:
        self.take_update: dict[bytes, bool] = {}
        self.sequence = 0

    def take(self) -> tuple[bytes, bytes] | None:
        """Takes the keys of stored and removed blocks, joined; None: no changes, or too many to report."""
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
