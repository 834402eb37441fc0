"""Entries in a fixed order, and how much is before one of them."""

from bisect import bisect_left
from math import inf
from typing import Any

from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.heap import Heap

_SAMPLE = 128
"""How many of those who wait an estimate looks at; of more, it takes so many from all over and scales what it finds."""
_STALE = 64
"""It takes others when one in so many has joined or left."""

LAST = 1 << 62
"""The number of an entry that has not joined yet."""
_FIRST = (-inf, 0)


class EntryQueue(Heap[QueueEntry[Any]]):
    """Waiting entries by a key that does not change while they wait, with the sum of their service."""

    __slots__ = ("_last", "_moves", "_sample", "service")

    def __init__(self) -> None:
        super().__init__()
        self.service = 0.0
        self._last = _FIRST
        """Of all that have joined since it was empty."""
        self._sample: list[tuple[float, int]] = []
        self._moves = 0
        """Since that was taken."""

    def join(self, key: float, entry: QueueEntry[Any]) -> None:
        """Lets an entry in; its number settles ties."""
        self.push(key, entry.number, entry)
        self.service += entry.service
        self._last = max(self._last, (key, entry.number))
        self._moves += 1

    def leave(self, entry: QueueEntry[Any]) -> None:
        """Lets an entry go.

        Raises:
            KeyError: It is not in.
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
