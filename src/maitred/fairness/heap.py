"""A priority queue whose members may leave from the middle.

Leaving only forgets the member; its record stays in the heap until it comes to the top or until such remains outnumber
the living, when the heap is built anew. So every operation is O(log n), amortised, and remains take no more room than
the members.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

M = TypeVar("M")

_MOST_STALE_RECORDS = 32
"""Remains that are not worth a rebuild."""


class Heap(Generic[M]):
    """Members by a key of two numbers, the least first. The second number is a member's own, so that no two tie."""

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
        """Lets a member in, or gives one that is in another key."""
        record = (first, second, member)
        self.live[member] = record
        heappush(self.records, record)
        if len(self.records) > 2 * len(self.live) + _MOST_STALE_RECORDS:
            self._rebuild()

    def remove(self, member: M) -> None:
        """Lets a member go.

        Raises:
            KeyError: It is not in.
        """
        del self.live[member]
        if len(self.records) > 2 * len(self.live) + _MOST_STALE_RECORDS:
            self._rebuild()

    def discard(self, member: M) -> None:
        """Lets a member go, if it is in."""
        if member in self.live:
            self.remove(member)

    def clear(self) -> None:
        """Removes all entries at once."""
        self.live.clear()
        self.records.clear()

    def least(self) -> M | None:
        """The member with the least key; None when empty."""
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
