"""Deficit round robin: flows take turns, and each turn is worth a quantum.

The algorithm is from Shreedhar and Varghese, SIGCOMM'95, with two changes for requests whose cost is known only at the
end. First, a flow is served while its deficit counter is above zero, so a request may cost more than the deficit; the
flow then skips turns until the debt is paid. Second, the predicted cost of a request is booked when it is taken; its
real cost replaces the prediction step by step, and the rest of the prediction is refunded when it ends.

Every key is a separate flow, weighted by the product of the weights on its path; priority classes have no effect. With
virtual token counters such a flow would go first; here it waits one whole round of the other flows.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from math import ceil, prod
from typing import Generic, TypeVar

from maitred.core.flow import Flow, PriorityClass
from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.sorted_entries import LAST, EntryQueue

T = TypeVar("T")

DEFAULT_QUANTUM = 1000.0

_SAMPLE = 128
"""Number of flows that an estimate samples."""


class DrrState:
    """State of one flow: its entries, and its deficit."""

    __slots__ = ("booked", "deficit", "entries", "running", "streams", "worth")

    def __init__(self, worth: float) -> None:
        self.worth = worth
        """Service per turn of this flow."""
        self.deficit = 0.0
        self.booked = 0.0
        """Predicted service of running entries that the real cost has not replaced yet."""
        self.running = 0
        self.streams = 0.0
        """Service charged with each tick."""
        self.entries = EntryQueue()

    def charge(self, service: float) -> None:
        """Books real service and removes the same amount of predicted service."""
        foreseen = max(0.0, min(self.booked, service))
        self.booked -= foreseen
        self.deficit -= service - foreseen


class DrrQueue(Generic[T]):
    """Deficit round robin: flows take turns.

    `head` takes one step for each skipped flow: about one step if the quantum is as large as a typical request.

    Args:
        quantum: Service per turn and unit of weight; 0 means 1,000.
    """

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum or DEFAULT_QUANTUM
        self._flows: dict[tuple[str, ...], DrrState] = {}
        """Flows with waiting or running entries; debts are dropped together with the flow."""
        self._streaming: dict[DrrState, None] = {}
        """Flows that are charged with each tick."""
        self._ring: deque[DrrState] = deque()
        """Flows with waiting entries; the first one has the turn."""
        self._turn: DrrState | None = None
        """Flow that has the turn and has already received the quantum of this turn."""
        self._waiting = dict.fromkeys(PriorityClass, 0)
        self._joined = 0

    def add(self, entry: QueueEntry[T], now_s: float) -> None:
        """Adds an entry to the queue."""
        self._joined += 1
        entry.number = self._joined
        self._join(entry)

    def remove(self, entry: QueueEntry[T]) -> None:
        """Removes an entry that has not run."""
        turns = self._leave(entry)
        self._close(_name(entry.flow), turns)

    def head(self, now_s: float) -> QueueEntry[T] | None:
        """Returns the next entry of the flow that has the turn."""
        ring = self._ring
        if not ring:
            return None
        passed = 0
        while True:
            turns = ring[0]
            if self._turn is not turns:
                self._turn = turns
                turns.deficit += turns.worth
            if turns.deficit > 0:
                return turns.entries.least()
            self._next()
            passed += 1
            if passed == len(ring):
                # All flows are in debt: skip all rounds until the first flow has paid its debt.
                rounds = min(int(-turns.deficit / turns.worth) for turns in ring)
                for turns in ring:
                    turns.deficit += rounds * turns.worth
                passed = 0

    def take(self, entry: QueueEntry[T], now_s: float) -> None:
        """Takes an entry out of the queue to run."""
        turns = self._leave(entry)
        turns.running += 1
        turns.booked += entry.service
        turns.deficit -= entry.service
        if turns.entries and turns.deficit <= 0 and self._turn is turns:
            self._next()

    def pass_through(self, entry: QueueEntry[T], now_s: float) -> None:
        """Adds an entry and takes it at once."""
        self.add(entry, now_s)
        self.take(entry, now_s)

    def charge(self, flow: Flow, service: float) -> None:
        """Books real service and removes the same amount of predicted service."""
        turns = self._flows.get(_name(flow))
        if turns is not None:
            turns.charge(service)

    def stream(self, flow: Flow, service: float) -> None:
        """Changes the service that is booked with each tick."""
        turns = self._flows[_name(flow)]
        turns.streams += service
        if turns.streams:
            self._streaming[turns] = None
        else:
            self._streaming.pop(turns, None)

    def tick(self) -> None:
        """Charges the flows that stream."""
        for turns in self._streaming:
            turns.charge(turns.streams)

    def done(self, flow: Flow) -> None:
        """Ends a taken entry and refunds its share of the predicted service."""
        name = _name(flow)
        turns = self._flows[name]
        self._stop(turns)
        self._close(name, turns)

    def requeue(self, entry: QueueEntry[T], now_s: float) -> None:
        """Puts a taken entry back to its old place in its flow."""
        self._join(entry)
        self._stop(self._flows[_name(entry.flow)])

    def ahead(self, entry: QueueEntry[T], now_s: float) -> WorkAhead:
        """Returns the work ahead of an entry: earlier work of its flow, and turns of other flows."""
        turns = self._flows.get(_name(entry.flow))
        own, rounds = WorkAhead(0, 0.0), 0.0
        if turns is not None:
            waits = entry in turns.entries
            own = turns.entries.before(entry.arrived_s, entry.number if waits else LAST)
            rounds = max(0.0, own.service - turns.deficit) / turns.worth
        step = -(-len(self._ring) // _SAMPLE) or 1
        entries, service = 0, 0.0
        for other in islice(self._ring, 0, None, step):
            if other is turns:
                continue
            mean = other.entries.service / len(other.entries)
            due = other.deficit + ceil(rounds) * other.worth
            count = min(len(other.entries), max(0, ceil(due / mean)) if mean else len(other.entries))
            entries += count
            service += count * mean
        return WorkAhead(own.entries + entries * step, own.service + service * step)

    def over_service(self, flow: Flow) -> float:
        """Returns the service that a flow owes, per weight."""
        turns = self._flows.get(_name(flow))
        return 0.0 if turns is None else max(0.0, -turns.deficit) / turns.worth * self._quantum

    def lead(self, flow: Flow) -> float:
        """Returns the same as `over_service`: a flow that runs takes no turns."""
        return self.over_service(flow)

    def waiting_in(self, priority: PriorityClass) -> int:
        """Returns the number of waiting entries that joined with this class."""
        return self._waiting[priority]

    def __len__(self) -> int:
        return sum(self._waiting.values())

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        return chain.from_iterable(turns.entries for turns in self._ring)

    def _join(self, entry: QueueEntry[T]) -> None:
        name = _name(entry.flow)
        worth = self._quantum * prod(share.weight for share in entry.flow.path)
        turns = self._flows.get(name)
        if turns is None:
            turns = self._flows[name] = DrrState(worth)
        turns.worth = worth
        if not turns.entries:
            self._ring.append(turns)
        turns.entries.join(entry.arrived_s, entry)
        self._waiting[entry.flow.priority] += 1

    def _leave(self, entry: QueueEntry[T]) -> DrrState:
        turns = self._flows[_name(entry.flow)]
        turns.entries.leave(entry)
        if not turns.entries:
            self._ring.remove(turns)
            if self._turn is turns:
                self._turn = None
            turns.deficit = min(turns.deficit, 0.0)
        self._waiting[entry.flow.priority] -= 1
        return turns

    def _next(self) -> None:
        self._ring.rotate(-1)
        self._turn = None

    def _stop(self, turns: DrrState) -> None:
        back = turns.booked / turns.running
        turns.booked -= back
        turns.deficit += back
        turns.running -= 1

    def _close(self, name: tuple[str, ...], turns: DrrState) -> None:
        if not turns.entries:
            turns.deficit = min(turns.deficit, 0.0)
            if not turns.running:
                del self._flows[name]


def _name(flow: Flow) -> tuple[str, ...]:
    return tuple(share.id for share in flow.path)
