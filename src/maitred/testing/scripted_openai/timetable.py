"""Timetable of due entries, in buckets of half a millisecond.

A heap of all entries would sort 100,000 entries per second to the nanosecond, which is not needed. Here the heap has
only the numbers of non-empty buckets, and the entries of one bucket leave in the order in which they came: constant
cost, never early, at most one bucket late.
"""

import heapq
from typing import Generic, TypeVar

BUCKET_S = 0.0005

Thing = TypeVar("Thing")


class DeliverySchedule(Generic[Thing]):
    """Timetable of entries by due time, in seconds of any one clock."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Thing]] = {}
        self._numbers: list[int] = []

    def add(self, thing: Thing, due_s: float) -> None:
        """Adds an entry to the bucket that ends next after its due time."""
        number = self.bucket(due_s)
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = [thing]
            heapq.heappush(self._numbers, number)
        else:
            bucket.append(thing)

    def bucket(self, due_s: float) -> int:
        """Returns the number of the bucket that ends next after a time."""
        return int(due_s / BUCKET_S) + 1

    def take(self, now_s: float) -> list[Thing]:
        """Removes and returns the first bucket that is over; empty when none is."""
        numbers = self._numbers
        if numbers and numbers[0] * BUCKET_S <= now_s:
            return self._buckets.pop(heapq.heappop(numbers))
        return []

    @property
    def next_s(self) -> float:
        """Returns when `take` will return entries; infinity: never."""
        return self._numbers[0] * BUCKET_S if self._numbers else float("inf")
