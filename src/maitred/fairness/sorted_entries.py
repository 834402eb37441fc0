"""Entries in a fixed order, and the work ahead of one entry."""

from bisect import bisect_left
from math import inf
from typing import Any

from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.heap import Heap

_SAMPLE = 128
"""Maximum number of entries that an estimate examines. Of more entries it takes an even sample of this size and scales
the result."""
_STALE = 64
"""A new sample is taken when one in this many entries has joined or left."""

LAST = 1 << 62
"""Number for an entry that has not joined yet."""
_FIRST = (-inf, 0)


class EntryQueue(Heap[QueueEntry[Any]]):
    """Waiting entries by a key that does not change while they wait, with the sum of their service."""

    __slots__ = ("_last", "_moves", "_sample", "service")

    def __init__(self) -> None:
        super().__init__()
        self.service = 0.0
        self._last = _FIRST
        """Largest key of all entries that have joined since the queue was empty."""
        self._sample: list[tuple[float, int]] = []
        self._moves = 0
        """Joins and leaves since the sample was taken."""

    def join(self, key: float, entry: QueueEntry[Any]) -> None:
        """Adds an entry; its number breaks ties."""
        self.push(key, entry.number, entry)
        self.service += entry.service
        self._last = max(self._last, (key, entry.number))
        self._moves += 1

    def leave(self, entry: QueueEntry[Any]) -> None:
        """Removes an entry from the queue.

        Raises:
            KeyError: The entry is not in the queue.
        """
        self.remove(entry)
        self._moves += 1
        if self.live:
            self.service -= entry.service
        else:
            self.service, self._last = 0.0, _FIRST

    def before(self, key: float, number: int) -> WorkAhead:
        """Returns the work that stands before a key."""
        if (key, number) > self._last:
            return WorkAhead(len(self.live), self.service)
        if len(self.records) > _SAMPLE:
            return self._estimate(key, number)
        entries = 0
        service = 0.0
        for record in self.records:
            entry = record[2]
            if self.live.get(entry) is record and (record[0], record[1]) < (key, number):
                entries += 1
                service += entry.service
        return WorkAhead(entries, service)

    def _estimate(self, key: float, number: int) -> WorkAhead:
        """Returns an estimate of the work before a key among many entries, by a sample of them."""
        if not self._sample or self._moves * _STALE > len(self.live):
            step = -(-len(self.records) // _SAMPLE)
            taken = [record for record in self.records[::step] if self.live.get(record[2]) is record]
            self._sample = sorted([(at, of) for at, of, _ in taken])
            self._moves = 0
        share = bisect_left(self._sample, (key, number)) / max(1, len(self._sample))
        return WorkAhead(round(share * len(self.live)), share * self.service)
