"""A priority queue whose members may leave from the middle.

A removal only marks the member: its stale record stays in the heap until it reaches the top, or until the stale records
outnumber the members and the heap is rebuilt. So every operation is O(log n), amortised, and stale records take no more
memory than the members.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

M = TypeVar("M")

_MOST_STALE_RECORDS = 32
"""Number of stale records up to which the heap is not rebuilt."""


class Heap(Generic[M]):
    """Heap of members by a key of two numbers, the least key first. The second number is unique, so keys never tie."""

    __slots__ = ("live", "records")

    def __init__(self) -> None:
        self.records: list[tuple[float, int, M]] = []
        self.live: dict[M, tuple[float, int, M]] = {}

    def __len__(self) -> int:
        return len(self.live)

    def __contains__(self, member: M) -> bool:
        return member in self.live

    def __iter__(self) -> Iterator[M]:
        return iter(self.live)

    def push(self, first: float, second: int, member: M) -> None:
        """Adds a member, or changes the key of an existing member."""
        record = (first, second, member)
        self.live[member] = record
        heappush(self.records, record)
        if len(self.records) > 2 * len(self.live) + _MOST_STALE_RECORDS:
            self._rebuild()

    def remove(self, member: M) -> None:
        """Removes a member from the heap.

        Raises:
            KeyError: The member is not in the heap.
        """
        del self.live[member]
        if len(self.records) > 2 * len(self.live) + _MOST_STALE_RECORDS:
            self._rebuild()

    def discard(self, member: M) -> None:
        """Removes a member if it is in the heap."""
        if member in self.live:
            self.remove(member)

    def clear(self) -> None:
        """Removes all entries at once."""
        self.live.clear()
        self.records.clear()

    def least(self) -> M | None:
        """Returns the member with the least key; None if the heap is empty."""
        records, live = self.records, self.live
        while records:
            record = records[0]
            if live.get(record[2]) is record:
                return record[2]
            heappop(records)
        return None

    def _rebuild(self) -> None:
        self.records = list(self.live.values())
        heapify(self.records)
