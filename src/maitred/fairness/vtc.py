"""Fair shares: classes by weight and age, tenants by token counters, requests by deadline.

The queue has three nested orders:

1. **Classes** share by their weights, with the counters of `maitred.fairness.tree`: background requests get their share
   even during a constant load of interactive requests. If counters are equal, the more urgent class goes first. A
   request moves up if it has waited in a class for `ageing_s` and nothing of the class was taken in that time: it then
   competes in the next class, with the same flow. So a request ages only while its whole class is passed over. A
   request that waits for others of its class or tenant does not age, because otherwise a flood would become urgent by
   itself.
2. **Tenants** share the service of their class, in one tree per class with the levels of `Flow.path`.
3. **Inside a key** the request with the least slack goes first: slack is the deadline minus the time that the request
   itself needs. A request without a deadline counts as if it had one 30 seconds after its arrival, so that a key's
   requests with deadlines do not starve its others. Ties go in order of arrival.

While its class is passed over, it moves up every `ageing_s`, so after ``rank * ageing_s`` (rank 3: background) it
competes in the most urgent class. Let *w* be the weight of that class and *W* the sum of all class weights. If its
tenant has no other request there, its nodes are lifted to the least counters, and each of the *n* waiting siblings
along its path is served at most once before it. Let *s* be the service of the largest request, and *R* the maximum that
all running requests may still be charged. Then the request is taken before

    (n * s + 2 * R) * W / w + R

of further service is done; divided by the rate of the replicas, this is a time. If entries of its class are taken
sometimes, each of them delays its next move up by at most `ageing_s`, and this happens at most *n* times before the
request itself is taken there. Each earlier request of its key adds the same amount again.

Aged requests are charged in the class from which they were taken. `charge` and `done` receive only a flow. So if a flow
runs entries from two classes at a time, its charges are split between both in proportion, and `done` counts for the
class that was taken from first. The sums are exact.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, Generic, TypeVar

from maitred.core.flow import Flow, PriorityClass
from maitred.fairness.config import QueueOrderConfig
from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.estimate import before_siblings, in_leaf
from maitred.fairness.heap import Heap
from maitred.fairness.locality import Locality
from maitred.fairness.tree import LazyCharges, Node, Ranking, Siblings

T = TypeVar("T")

TURN_S = 1.0
"""How much later each further entry of a request without a deadline counts as having arrived. So what a key asks later
does not wait behind all entries of an earlier request with very many."""
PATIENCE_S = 30.0
"""Assumed deadline of a request without a deadline, in seconds after its arrival."""

SECONDS_PER_SERVICE = 0.001
"""Assumed run time in seconds per unit of service, to compute the slack."""


class RunningFlow:
    """Running entries of one flow by their leaf; aged entries add further leaves."""

    __slots__ = ("leaves", "only", "rates", "streams", "total")

    def __init__(self, leaf: Node, flow: Flow) -> None:
        self.rates = [1.0 / share.weight for share in reversed(flow.path)]
        """Counter rates of each level by the flow's own weights, from the leaf up."""
        self.leaves = {leaf: 0}
        self.only: Node | None = leaf
        """The only leaf; None if there are several."""
        self.total = 0
        self.streams = 0.0
        """Service per tick, split between the leaves."""

    def count(self, leaf: Node, runs: int) -> None:
        """Adds to the number of running entries of a leaf; a negative value subtracts."""
        total = self.total + runs
        if total and self.only is leaf:
            self.total = self.leaves[leaf] = total
        elif self.streams and (self.only is not leaf or self.total + runs == 0):
            self._stream(-self.streams)
            self._count(leaf, runs)
            self._stream(self.streams)
        else:
            self._count(leaf, runs)

    def stream(self, service: float) -> None:
        """Raises the charge per tick; a negative value lowers it."""
        self.streams += service
        self._stream(service)

    def _stream(self, service: float) -> None:
        for leaf, count in self.leaves.items():
            leaf.stream(service * count / self.total)

    def _count(self, leaf: Node, runs: int) -> None:
        self.total += runs
        self.leaves[leaf] = self.leaves.get(leaf, 0) + runs
        if not self.leaves[leaf]:
            del self.leaves[leaf]
        self.only = next(iter(self.leaves)) if len(self.leaves) == 1 else None


class VtcQueue(Generic[T]):
    """Queue with fair shares by virtual token counters.

    `add`, `remove`, `head` and `take` cost O(d log n), amortised, with d levels; `charge` and `stream` cost O(d), and
    `tick` costs O(1).
    """

    def __init__(self, config: QueueOrderConfig) -> None:
        self._ticks = LazyCharges()
        self._top = Siblings(None, self._ticks)
        self._classes = []
        for priority in PriorityClass:
            weight = config.class_weights.get(priority, 1.0)
            node = self._top.children[priority] = Node(priority, self._top, weight, priority.rank, leaf=False)
            self._classes.append(node)
        self._ageing_s = inf if config.ageing_s is None else config.ageing_s
        self._look_s = inf
        """Time before which no entry is due to age."""
        self._locality = Locality(config.quantum) if config.quantum else None
        self._runs: dict[Flow, RunningFlow] = {}
        self._alone: Flow | None = None
        """Flow of the last entry that ended, if nothing else ran or waited at that time. The flow counts as running
        until the next request arrives, so a caller with one request at a time finds its nodes unchanged."""
        self._waiting = dict.fromkeys(PriorityClass, 0)
        self._size = 0
        self._numbers = 0

    def add(self, entry: QueueEntry[T], now_s: float) -> None:
        """Adds an entry to the queue."""
        self._numbers += 1
        entry.number = self._numbers
        entry.rank = entry.flow.priority.rank
        goes_on = self._alone is not None and self._meet(entry.flow)
        self._join(entry, now_s)
        if goes_on:
            self._stop(entry.flow, None)

    def remove(self, entry: QueueEntry[T]) -> None:
        """Removes an entry that has not run."""
        self._leave(entry)

    def head(self, now_s: float) -> QueueEntry[T] | None:
        """Returns the next entry to take."""
        self._age(now_s)
        first = self._first(self._top.queue.least())
        return first if first is None or self._locality is None else self._locality.prefer(first)

    def take(self, entry: QueueEntry[T], now_s: float) -> None:
        """Takes an entry out of the queue to run."""
        leaf: Node = entry.position
        self._numbers += 1
        leaf.start(self._numbers)
        self._leave(entry)
        self._runs_now(entry, leaf, self._runs.get(entry.flow), now_s)

    def pass_through(self, entry: QueueEntry[T], now_s: float) -> None:
        """Adds an entry to the empty queue and takes it at once."""
        flow = entry.flow
        entry.number = self._numbers + 1
        rank = entry.rank = flow.priority.rank
        goes_on = self._alone is not None and self._meet(flow)
        runs = self._runs.get(flow)
        if runs is None or (leaf := runs.only) is None or leaf.path[-1] is not self._classes[rank]:
            self._numbers += 1
            leaf = self._leaf(flow, rank)
            self._numbers += 1
            leaf.pass_through(self._numbers)
        else:
            self._numbers += 3
            leaf.pass_through(self._numbers, runs.rates)
        entry.position = leaf
        self._runs_now(entry, leaf, runs, now_s)
        if goes_on:
            self._stop(flow, None)

    def _runs_now(self, entry: QueueEntry[T], leaf: Node, runs: RunningFlow | None, now_s: float) -> None:
        leaf.path[-1].taken_s = now_s
        if runs is None:
            runs = self._runs[entry.flow] = RunningFlow(leaf, entry.flow)
        runs.count(leaf, 1)
        if self._locality is not None:
            self._locality.on_take(entry)

    def charge(self, flow: Flow, service: float) -> None:
        """Books service on every level of the flow's path; ignores an unknown flow."""
        if self._alone is not None:
            self._part()
        runs = self._runs.get(flow)
        if runs is not None:
            if runs.only is not None:
                runs.only.charge(service)
                return
            for leaf, count in runs.leaves.items():
                leaf.charge(service * count / runs.total)
        elif (home := self._home(flow)) is not None:
            home.charge(service)

    def stream(self, flow: Flow, service: float) -> None:
        """Changes the service per tick on every level of the flow's path."""
        self._runs[flow].stream(service)

    def tick(self) -> None:
        """Books all streams in O(1): counters are evaluated later."""
        self._ticks.now += 1

    def done(self, flow: Flow) -> None:
        """Notes that a taken entry has ended."""
        if not self._size and len(self._runs) == 1 and self._runs[flow].total == 1:
            self._alone = flow
        else:
            self._stop(flow, None)

    def requeue(self, entry: QueueEntry[T], now_s: float) -> None:
        """Puts a taken entry back with its age."""
        self._join(entry, now_s)
        self._stop(entry.flow, entry.position)

    def ahead(self, entry: QueueEntry[T], now_s: float) -> WorkAhead:
        """Estimates the work ahead of an entry; see `maitred.fairness.estimate`."""
        self._part()
        waits = entry.position is not None and entry in entry.position.entries
        rank = entry.rank if waits else entry.flow.priority.rank
        path = self._trace(entry.flow, rank)
        ahead = in_leaf(path[-1][0], entry, _due_s(entry))
        for node, among, weight in reversed(path):
            if among is not None:
                ahead = before_siblings(node, among, weight, ahead)
        return ahead

    def over_service(self, flow: Flow) -> float:
        """Returns the lead over the least served active sibling, summed over the levels below the class."""
        return sum(_lead(node, node.among.active) for node in self._levels(flow))

    def lead(self, flow: Flow) -> float:
        """Returns the lead over the least served waiting sibling, summed in the same way."""
        return sum(_lead(node, node.among.queue) for node in self._levels(flow))

    def waiting_in(self, priority: PriorityClass) -> int:
        """Returns the number of waiting entries that joined with this class."""
        return self._waiting[priority]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        pending = list(self._classes)
        while pending:
            node = pending.pop()
            if node.below is None:
                yield from node.entries
            else:
                pending.extend(node.below.queue)

    def _leaf(self, flow: Flow, rank: int) -> Node:
        """Returns the leaf of a flow in a class, new or existing."""
        node = self._classes[rank]
        self._numbers += 1
        for share in flow.path[:-1]:
            assert node.below is not None
            node = node.below.child(share.id, share.weight, self._numbers, leaf=False)
        assert node.below is not None
        last = flow.path[-1]
        # The leaf name is a tuple, unlike that of an inner node, because a leaf and an inner node with the same id can
        # be siblings.
        return node.below.child((last.id,), last.weight, self._numbers, leaf=True)

    def _trace(self, flow: Flow, rank: int) -> list[tuple[Node | None, Siblings | None, float]]:
        """Returns the node, its siblings and its weight for each level from the class down.

        None: it does not exist yet.
        """
        node: Node | None = self._classes[rank]
        assert node is not None
        path: list[tuple[Node | None, Siblings | None, float]] = [(node, self._top, 1.0 / node.rate)]
        for depth, share in enumerate(flow.path, start=1):
            among = None if node is None else node.below
            name: object = (share.id,) if depth == len(flow.path) else share.id
            node = None if among is None else among.children.get(name)
            path.append((node, among, share.weight))
        return path

    def _levels(self, flow: Flow) -> Sequence[Node]:
        """Returns the nodes of a flow from its leaf up to the level below the class; empty if unknown."""
        self._part()
        runs = self._runs.get(flow)
        leaf = self._home(flow) if runs is None else next(iter(runs.leaves))
        return () if leaf is None else leaf.path[:-1]

    def _home(self, flow: Flow) -> Node | None:
        return self._trace(flow, flow.priority.rank)[-1][0]

    def _first(self, node: Node | None) -> QueueEntry[T] | None:
        """Returns the next entry below a node."""
        while node is not None and node.below is not None:
            node = node.below.queue.least()
        return None if node is None else node.entries.least()

    def _age(self, now_s: float) -> None:
        """Moves up all due entries, with the same result as a continuous check."""
        while now_s >= self._look_s:
            node = min(self._classes[1:], key=self._due_s)
            due_s = self._look_s = self._due_s(node)
            if due_s > now_s:
                return
            entry = next(iter(node.joined))
            self._leave(entry)
            entry.rank -= 1
            self._join(entry, due_s)

    def _due_s(self, node: Node) -> float:
        """Returns the time at which the longest waiting entry of a class moves up."""
        if not node.joined:
            return inf
        return max(next(iter(node.joined.values())), node.taken_s) + self._ageing_s

    def _join(self, entry: QueueEntry[T], since_s: float) -> None:
        leaf = entry.position = self._leaf(entry.flow, entry.rank)
        leaf.entries.join(_due_s(entry), entry)
        leaf.join(entry.service, self._numbers)
        leaf.path[-1].joined[entry] = since_s
        self._look_s = min(self._look_s, since_s + self._ageing_s)
        self._waiting[entry.flow.priority] += 1
        self._size += 1
        if self._locality is not None:
            self._locality.join(entry)

    def _leave(self, entry: QueueEntry[T]) -> None:
        leaf: Node = entry.position
        leaf.entries.leave(entry)
        leaf.leave(entry.service)
        del leaf.path[-1].joined[entry]
        self._waiting[entry.flow.priority] -= 1
        self._size -= 1
        if self._locality is not None:
            self._locality.leave(entry)

    def _meet(self, flow: Flow) -> bool:
        """Returns whether the arriving flow is the one in `_alone`; otherwise drops that one."""
        if flow != self._alone:
            self._part()
            return False
        self._alone = None
        # Without `_alone`, all leads would have been dropped when the last entry ended.
        for leaf in self._runs[flow].leaves:
            for node in leaf.path[:-1]:
                node.among.leave_alone(node)
        return True

    def _part(self) -> None:
        """Drops the flow in `_alone`."""
        alone, self._alone = self._alone, None
        if alone is not None:
            self._stop(alone, None)

    def _stop(self, flow: Flow, leaf: Node | None) -> None:
        """Ends one run of a flow, of this leaf if the flow runs there."""
        runs = self._runs[flow]
        if leaf is None or leaf not in runs.leaves:
            leaf = next(iter(runs.leaves)) if runs.only is None else runs.only
        runs.count(leaf, -1)
        if not runs.total:
            del self._runs[flow]
        leaf.stop()


def _lead(node: Node, siblings: Ranking) -> float:
    least = siblings.least()
    return 0.0 if least is None else max(0.0, node.counter - least.counter)


def _due_s(entry: QueueEntry[T]) -> float:
    if entry.deadline_s is None:
        return entry.arrived_s + PATIENCE_S + TURN_S * entry.turn
    return entry.deadline_s - SECONDS_PER_SERVICE * entry.service


def yields_to(held: int, weight: float, newcomer_held: int, newcomer_weight: float, places: int = 1) -> bool:
    """Whether a tenant that gives slots still holds as many per weight as the receiver.

    So the slots move towards equal numbers per weight and never move back and forth.

    Args:
        held: Slots of the tenant that would give.
        weight: Weight of that tenant.
        newcomer_held: Slots of the tenant that would receive.
        newcomer_weight: Weight of the receiving tenant.
        places: Number of slots to give.
    """
    return (held - places) / weight >= (newcomer_held + places) / newcomer_weight


class Ageing:
    """Finds the waiting entry that moves up next.

    An entry moves up one class each time that its age since its arrival passes a multiple of `ageing_s`; a requeued
    entry keeps its age.

    Args:
        ageing_s: Time in each class, in seconds; None: no ageing.
    """

    def __init__(self, ageing_s: float | None) -> None:
        self._ageing_s = ageing_s
        self._due: Heap[QueueEntry[Any]] = Heap()

    def watch(self, entry: QueueEntry[Any]) -> None:
        """Watches a waiting entry that may age."""
        if self._ageing_s is not None and entry.rank:
            classes = entry.flow.priority.rank - entry.rank + 1
            self._due.push(entry.arrived_s + classes * self._ageing_s, entry.number, entry)

    def forget(self, entry: QueueEntry[Any]) -> None:
        """Notes that an entry stops waiting."""
        self._due.discard(entry)

    def ripe(self, now_s: float) -> QueueEntry[Any] | None:
        """Returns and forgets an entry whose time in its class has passed. None: no such entry."""
        entry = self._due.least()
        if entry is None or self._due.live[entry][0] > now_s:
            return None
        self._due.discard(entry)
        return entry
