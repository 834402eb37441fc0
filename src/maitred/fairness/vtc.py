"""Fair shares: classes by weight and age, tenants by virtual token counters, a key's own requests by deadline.

Three orders, one inside the other:

1. **Classes** share by their weights, with the counters of `maitred.fairness.tree`: while interactive requests never
   stop, background ones still get their part. Of equal counters the more urgent class is first. A request that has
   waited in a class for `ageing_s`, during which nothing of the class was taken, moves up: it competes in the next
   class, with the flow that it has. So what waits because its class is passed over ages, and what waits for others of
   its class, or for its own tenant's, does not: or else a flood would make itself urgent.
2. **Tenants** share what their class gets, in a tree for each class, level by level of `Flow.path`.
3. **Inside a key** the least slack is first: the deadline less the time that the request itself will need. A request
   without a deadline counts as if it had one 30 seconds after its arrival, so that a key's requests with deadlines do
   not starve its others. Then order of arrival.

**How long a request waits at most.** While its class is passed over it moves up every `ageing_s`, so after ``rank *
ageing_s`` (rank 3: background) it competes in the most urgent one, whose weight be *w* of *W* for all classes. If its
tenant has nothing else there, it is lifted to the least counters, and each of the *n* siblings that wait along its path
is taken from at most once before it. With *s* for what the largest request costs, and *R* for the most that all that
runs may still be charged, it is taken before

    (n * s + 2 * R) * W / w + R

service has been handed out since; divided by the rate of the replicas, that is time. (The siblings cost *n s*, what
already ran *R*; the other classes get at most their weights' part beside that, and are ahead by *R* at most.) Where its
class is taken from now and then, each time puts its moving up off by at most `ageing_s`, and at most *n* times until it
is its turn there. For each request that its key has before it, as much is added again.

Aged requests are charged where they were taken from. `charge` and `done` name only a flow, so what a flow runs from two
classes at a time is charged to both in proportion, and the end counts for the class that was taken from first. Sums are
exact.
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

PATIENCE_S = 30.0
"""How long after its arrival a request without a deadline counts as due."""

SECONDS_PER_SERVICE = 0.001
"""How long a request itself is taken to need, to tell its slack from its deadline."""


class RunningFlow:
    """Running entries of one flow, by the leaf that they were taken from: several when some of them had aged."""

    __slots__ = ("leaves", "only", "rates", "streams", "total")

    def __init__(self, leaf: Node, flow: Flow) -> None:
        self.rates = [1.0 / share.weight for share in reversed(flow.path)]
        """Of each level, by the flow's own weights, from the leaf up."""
        self.leaves = {leaf: 0}
        self.only: Node | None = leaf
        """The leaf, if there is but one."""
        self.total = 0
        self.streams = 0.0
        """Service per tick, shared by the leaves."""

    def count(self, leaf: Node, runs: int) -> None:
        """Adds to the number that runs of a leaf; negative: subtracts."""
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
        """Charges so much more with each tick; negative: less."""
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
    """The line that owes everybody a share.

    Joining, leaving, the head and taking cost O(d log n) with d levels, amortised; a charge or a stream O(d), a tick
    O(1).
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
        """Nothing is due before."""
        self._locality = Locality(config.quantum) if config.quantum else None
        self._runs: dict[Flow, RunningFlow] = {}
        self._alone: Flow | None = None
        """Of the last entry that ended, if nothing else ran or waited then. It counts as running until somebody comes:
        who sends one request at a time finds its nodes as it has left them."""
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
        """Leaves without having run."""
        self._leave(entry)

    def head(self, now_s: float) -> QueueEntry[T] | None:
        """Whose turn it is."""
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
        """Joins, and is taken in the same moment, where nobody waits whom it could meet."""
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
        """Books service on every level of the flow's path; of a flow that is forgotten, nothing."""
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
        """Changes what is booked on every level of the flow's path with each tick."""
        self._runs[flow].stream(service)

    def tick(self) -> None:
        """Books what streams, in no time: counters are looked at later."""
        self._ticks.now += 1

    def done(self, flow: Flow) -> None:
        """A taken entry has ended."""
        if not self._size and len(self._runs) == 1 and self._runs[flow].total == 1:
            self._alone = flow
        else:
            self._stop(flow, None)

    def requeue(self, entry: QueueEntry[T], now_s: float) -> None:
        """Waits again, with the age it has."""
        self._join(entry, now_s)
        self._stop(entry.flow, entry.position)

    def ahead(self, entry: QueueEntry[T], now_s: float) -> WorkAhead:
        """Estimates what is taken before an entry; see `maitred.fairness.estimate`."""
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
        """The lead over the least served sibling that waits or runs, added up over the levels below the class."""
        return sum(_lead(node, node.among.active) for node in self._levels(flow))

    def lead(self, flow: Flow) -> float:
        """The lead over the least served sibling that waits, added up in the same way."""
        return sum(_lead(node, node.among.queue) for node in self._levels(flow))

    def waiting_in(self, priority: PriorityClass) -> int:
        """How many wait that joined with this class."""
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
        """The leaf of a flow in a class, new or known."""
        node = self._classes[rank]
        self._numbers += 1
        for share in flow.path[:-1]:
            assert node.below is not None
            node = node.below.child(share.id, share.weight, self._numbers, leaf=False)
        assert node.below is not None
        last = flow.path[-1]
        # Named otherwise than an inner node: where one path ends and another goes on, they are siblings.
        return node.below.child((last.id,), last.weight, self._numbers, leaf=True)

    def _trace(self, flow: Flow, rank: int) -> list[tuple[Node | None, Siblings | None, float]]:
        """Each level of a flow from the class down: the node, its siblings, its weight. None: not there yet."""
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
        """The nodes of a flow from its leaf up to below the class; none if it is not known."""
        self._part()
        runs = self._runs.get(flow)
        leaf = self._home(flow) if runs is None else next(iter(runs.leaves))
        return () if leaf is None else leaf.path[:-1]

    def _home(self, flow: Flow) -> Node | None:
        return self._trace(flow, flow.priority.rank)[-1][0]

    def _first(self, node: Node | None) -> QueueEntry[T] | None:
        """Whose turn it is below a node."""
        while node is not None and node.below is not None:
            node = node.below.queue.least()
        return None if node is None else node.entries.least()

    def _age(self, now_s: float) -> None:
        """Moves up what is due, as if somebody had looked all the time."""
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
        """When the request of a class moves up that has waited there longest."""
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
        """Whether the flow that arrives is the one that was alone, which goes on; else that one is dropped."""
        if flow != self._alone:
            self._part()
            return False
        self._alone = None
        # Whoever was ahead of others would have been let off when all had ended.
        for leaf in self._runs[flow].leaves:
            for node in leaf.path[:-1]:
                node.among.leave_alone(node)
        return True

    def _part(self) -> None:
        """Lets go of the one that was alone."""
        alone, self._alone = self._alone, None
        if alone is not None:
            self._stop(alone, None)

    def _stop(self, flow: Flow, leaf: Node | None) -> None:
        """One run of a flow ends, of this leaf if it has one."""
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
        return entry.arrived_s + PATIENCE_S
    return entry.deadline_s - SECONDS_PER_SERVICE * entry.service


def yields_to(held: int, weight: float, newcomer_held: int, newcomer_weight: float, places: int = 1) -> bool:
    """Whether a tenant that gives up so many places still has as many, per weight, as the one who gets them.

    So places move towards equal numbers per weight, and never back and forth.

    Args:
        held: Places of the tenant that would give.
        weight: Its weight.
        newcomer_held: Places of the one who would get.
        newcomer_weight: Its weight.
        places: How many.
    """
    return (held - places) / weight >= (newcomer_held + places) / newcomer_weight


class Ageing:
    """Knows which waiting entry is the next to move up.

    An entry moves up one class each time that its age, counted from its arrival, passes a multiple of `ageing_s`; one
    that ran and was put back goes on from there.

    Args:
        ageing_s: Time in each class; None: nobody ever moves.
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
        """An entry waits no more."""
        self._due.discard(entry)

    def ripe(self, now_s: float) -> QueueEntry[Any] | None:
        """An entry whose time in its class is up; it is watched no more. None when there is none."""
        entry = self._due.least()
        if entry is None or self._due.live[entry][0] > now_s:
            return None
        self._due.discard(entry)
        return entry
