"""First come, first served, optionally with the more urgent classes first."""

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

from maitred.core.flow import Flow, PriorityClass
from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.sorted_entries import LAST, EntryQueue
from maitred.fairness.vtc import Ageing

T = TypeVar("T")


class FcfsQueue(Generic[T]):
    """Queue in order of arrival, independent of the flow. Past service has no effect.

    Args:
        classes: Whether more urgent classes go first. The class order is strict, so entries without ageing may starve.
        ageing_s: Time in a class after which a request moves up.
    """

    def __init__(self, *, classes: bool, ageing_s: float | None) -> None:
        self._classes = classes
        self._queues = [EntryQueue() for _ in PriorityClass]
        self._ageing = Ageing(ageing_s if classes else None)
        self._waiting = dict.fromkeys(PriorityClass, 0)
        self._joined = 0

    def add(self, entry: QueueEntry[T], now_s: float) -> None:
        """Adds an entry to the queue."""
        self._joined += 1
        entry.number = self._joined
        entry.rank = entry.flow.priority.rank if self._classes else 0
        self._join(entry)

    def remove(self, entry: QueueEntry[T]) -> None:
        """Removes an entry that has not run."""
        self._leave(entry)

    def head(self, now_s: float) -> QueueEntry[T] | None:
        """Returns the oldest entry of the most urgent class."""
        while (ripe := self._ageing.ripe(now_s)) is not None:
            self._leave(ripe)
            ripe.rank -= 1
            self._join(ripe)
        return next((queue.least() for queue in self._queues if queue), None)

    def take(self, entry: QueueEntry[T], now_s: float) -> None:
        """Takes an entry out of the queue to run."""
        self._leave(entry)

    def pass_through(self, entry: QueueEntry[T], now_s: float) -> None:
        """Adds an entry and takes it at once."""
        self.add(entry, now_s)
        self.take(entry, now_s)

    def charge(self, flow: Flow, service: float) -> None:
        """Does nothing: the order of arrival charges nothing."""

    def stream(self, flow: Flow, service: float) -> None:
        """Does nothing: the order of arrival charges nothing."""

    def tick(self) -> None:
        """Does nothing: the order of arrival charges nothing."""

    def done(self, flow: Flow) -> None:
        """Does nothing: the order of arrival charges nothing."""

    def requeue(self, entry: QueueEntry[T], now_s: float) -> None:
        """Puts a taken entry back to its old place."""
        self._join(entry)

    def ahead(self, entry: QueueEntry[T], now_s: float) -> WorkAhead:
        """Returns the older entries of its class and all entries of more urgent classes."""
        waits = entry in self._queues[entry.rank]
        rank = entry.rank if waits or not self._classes else entry.flow.priority.rank
        before = self._queues[rank if self._classes else 0].before(entry.arrived_s, entry.number if waits else LAST)
        above = self._queues[:rank] if self._classes else ()
        return WorkAhead(
            before.entries + sum(len(queue) for queue in above), before.service + sum(queue.service for queue in above)
        )

    def over_service(self, flow: Flow) -> float:
        """Returns 0: no flow owes service here."""
        return 0.0

    def lead(self, flow: Flow) -> float:
        """Returns 0: no flow is ahead of others here."""
        return 0.0

    def waiting_in(self, priority: PriorityClass) -> int:
        """Returns the number of waiting entries that joined with this class."""
        return self._waiting[priority]

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues)

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        return chain.from_iterable(self._queues)

    def _join(self, entry: QueueEntry[T]) -> None:
        self._queues[entry.rank].join(entry.arrived_s, entry)
        self._ageing.watch(entry)
        self._waiting[entry.flow.priority] += 1

    def _leave(self, entry: QueueEntry[T]) -> None:
        self._queues[entry.rank].leave(entry)
        self._ageing.forget(entry)
        self._waiting[entry.flow.priority] -= 1
