"""Deficit round robin: flows take turns, and each turn is worth a quantum.

Shreedhar and Varghese, SIGCOMM'95, with two changes for requests whose cost is known only in the end. A flow may be
served while its deficit is above zero, rather than up to it, and pays back a request that cost more by sitting out
turns. And a request is booked as predicted when it is taken; what it really costs is booked in its place as it comes,
and what is left of the prediction is given back when it ends.

Every key is a flow of its own, with the product of the weights on its path; classes do not matter. Compared to virtual
token counters, a flow waits a whole round of the others where those would let it go first.
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
"""Flows that an estimate looks at."""


class DrrState:
    """State of one flow: its entries, and its deficit."""

    __slots__ = ("booked", "deficit", "entries", "running", "streams", "worth")

    def __init__(self, worth: float) -> None:
        self.worth = worth
        """Service per turn."""
        self.deficit = 0.0
        self.booked = 0.0
        """Predicted of what runs, and not yet replaced by what it costs."""
        self.running = 0
        self.streams = 0.0
        """Service per tick."""
        self.entries = EntryQueue()

    def charge(self, service: float) -> None:
        """Books service in the place of what was predicted."""
        foreseen = max(0.0, min(self.booked, service))
        self.booked -= foreseen
        self.deficit -= service - foreseen


class DrrQueue(Generic[T]):
    """Deficit round robin: flows take turns.

    The head costs as many steps as flows are passed over: about one, if a quantum is worth a typical request.

    Args:
        quantum: Service per turn and weight; 0: 1,000.
    """

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum or DEFAULT_QUANTUM
        self._flows: dict[tuple[str, ...], DrrState] = {}
        """That wait or run; debts are forgotten with them."""
        self._streaming: dict[DrrState, None] = {}
        """That are charged with each tick."""
        self._ring: deque[DrrState] = deque()
        """That wait; the first one's turn it is."""
        self._turn: DrrState | None = None
        """Whose turn it is, once it has been given what a turn is worth."""
        self._waiting = dict.fromkeys(PriorityClass, 0)
        self._joined = 0

    def add(self, entry: QueueEntry[T], now_s: float) -> None:
        """Adds an entry to the queue."""
        self._joined += 1
        entry.number = self._joined
        self._join(entry)

    def remove(self, entry: QueueEntry[T]) -> None:
        """Leaves without having run."""
        turns = self._leave(entry)
        self._close(_name(entry.flow), turns)

    def head(self, now_s: float) -> QueueEntry[T] | None:
        """The next of the flow whose turn it is."""
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
                # Everybody owes: the rounds until the first one does not are gone through at once.
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
        """Joins, and is taken in the same moment."""
        self.add(entry, now_s)
        self.take(entry, now_s)

    def charge(self, flow: Flow, service: float) -> None:
        """Books service in the place of what was predicted."""
        turns = self._flows.get(_name(flow))
        if turns is not None:
            turns.charge(service)

    def stream(self, flow: Flow, service: float) -> None:
        """Changes what is booked with each tick."""
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
        """A taken entry has ended: its part of what is still booked is given back."""
        name = _name(flow)
        turns = self._flows[name]
        self._stop(turns)
        self._close(name, turns)

    def requeue(self, entry: QueueEntry[T], now_s: float) -> None:
        """Waits again, in its old place within its flow."""
        self._join(entry)
        self._stop(self._flows[_name(entry.flow)])

    def ahead(self, entry: QueueEntry[T], now_s: float) -> WorkAhead:
        """Returns the work ahead of an entry: that of its own flow, and as many turns of the others as this takes."""
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
        """How many wait that joined with this class."""
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
