"""First come, first served; with classes, the more urgent first."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from maitred.core.flow import Flow, PriorityClass
from maitred.fairness.entry import Ahead, Entry
from maitred.fairness.queue import EntryQueue

T = TypeVar("T")


class FifoLine(Generic[T]):
    """Order of arrival, whoever it is. What was served changes nothing."""

    def __init__(self) -> None:
        self._queue = EntryQueue()
        self._joined = 0
        self._waiting = dict.fromkeys(PriorityClass, 0)

    def add(self, entry: Entry[T], now_s: float) -> None:
        """Joins."""
        self._joined += 1
        entry.number = self._joined
        self._join(entry)

    def remove(self, entry: Entry[T]) -> None:
        """Leaves without having run."""
        self._leave(entry)

    def head(self, now_s: float) -> Entry[T] | None:
        """The oldest."""
        return self._queue.least()

    def take(self, entry: Entry[T], now_s: float) -> None:
        """Leaves and runs."""
        self._leave(entry)

    def charge(self, flow: Flow, service: float) -> None:
        """Changes nothing."""

    def done(self, flow: Flow) -> None:
        """Changes nothing."""

    def put_back(self, entry: Entry[T], now_s: float) -> None:
        """Waits again, where it stood."""
        self._join(entry)

    def ahead(self, entry: Entry[T], now_s: float) -> Ahead:
        """Everybody for an arrival; for one that waits, those who are older, read from a sample when they are many."""
        if entry not in self._queue:
            return Ahead(len(self._queue), self._queue.service)
        return self._queue.before(entry.arrived_s, entry.number)

    def over_service(self, flow: Flow) -> float:
        """Nobody is owed anything."""
        return 0.0

    def waiting_in(self, priority: PriorityClass) -> int:
        """How many wait that joined with this class."""
        return self._waiting[priority]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._queue)

    def _join(self, entry: Entry[T]) -> None:
        self._queue.join(entry.arrived_s, entry)
        self._waiting[entry.flow.priority] += 1

    def _leave(self, entry: Entry[T]) -> None:
        self._queue.leave(entry)
        self._waiting[entry.flow.priority] -= 1
