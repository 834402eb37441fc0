"""Entries in a fixed order, and how much is before one of them."""

from typing import Any

from maitred.fairness.entry import Ahead, Entry
from maitred.fairness.heap import Heap

_SAMPLE = 128
"""How many of those who wait an estimate looks at; of more, it takes so many from all over and scales what it finds."""

LAST = 1 << 62
"""The number of an entry that has not joined yet."""


class EntryQueue(Heap[Entry[Any]]):
    """Waiting entries by a key that does not change while they wait, with the sum of their service."""

    __slots__ = ("service",)

    def __init__(self) -> None:
        super().__init__()
        self.service = 0.0

    def join(self, key: float, entry: Entry[Any]) -> None:
        """Lets an entry in; its number settles ties."""
        self.push(key, entry.number, entry)
        self.service += entry.service

    def leave(self, entry: Entry[Any]) -> None:
        """Lets an entry go.

        Raises:
            KeyError: It is not in.
        """
        self.remove(entry)
        self.service = self.service - entry.service if self.live else 0.0

    def before(self, key: float, number: int) -> Ahead:
        """What stands before this key."""
        records = self.records
        step = -(-len(records) // _SAMPLE) or 1
        sampled = entries = 0
        service = 0.0
        for record in records[::step]:
            entry = record[2]
            if self.live.get(entry) is not record:
                continue
            sampled += 1
            if record[0] < key or (record[0] == key and record[1] < number):
                entries += 1
                service += entry.service
        if step == 1 or sampled == 0:
            return Ahead(entries, service)
        share = entries / sampled
        return Ahead(round(share * len(self.live)), share * self.service)
