"""Virtual token counters at every level of a tree of tenants.

Each node counts the service it got, divided by its weight. The sibling with waiting requests and the least counter is
next, so the service of siblings stays in proportion to their weights, from the class down to the key. Where counters
are equal, nodes that have had no turn since they began to wait go first, and then the one whose last turn is oldest. A
node is lifted to exactly the counter of a sibling, so without this rule it would wait for one more turn of it.

The *lift* prevents idle nodes from earning credit (Sheng et al., OSDI'24): when a node begins to wait, its counter
rises to the least counter of its waiting siblings or, if none waits, to the counter of the sibling that waited last.
As in the paper, only waiting counts: a node with one slow running request and no waiting requests gets less than its
share because it needs less, and it must not save the difference while that request runs.

Let *R* be the maximum service that the running requests of a node may still be charged just after one of them was
taken. When a request is taken, its node has the least counter, and this *level* never decreases. So a node leads a
waiting sibling by at most *R* / weight. In any interval in which two siblings wait all the time, their service per unit
of weight differs by at most ``R_f / w_f + R_g / w_g``. If whole prompts are charged when a request is taken, this is
theorem 4.4 of the paper. Here prompts are charged chunk by chunk, so *R* holds the rest of the prompts as well; a
request that is preempted no longer counts in *R*, counts again when it is taken again, and its recomputation is not
charged. Charges that may be refunded later widen the bound: let *A* be their maximum at one time, then ``A_f / w_f +
A_g / w_g`` is added. The bound holds at every level separately.

Most charges are one output token per decoding sequence in every step. So a node stores its streamed service per tick,
and its counter is a linear function of the ticks that is evaluated on access: a tick costs O(1) for any number of
streams, and the counters are as exact as with single charges.

A node is dropped as soon as the lift makes its counter irrelevant: when it neither waits nor runs, and its counter is
at most the value to which it would be lifted. A node that neither waits nor runs has no children.
"""

from collections.abc import Sequence
from heapq import heappop, heapreplace
from itertools import zip_longest
from math import inf
from typing import Any

from maitred.fairness.entry import QueueEntry
from maitred.fairness.heap import Heap
from maitred.fairness.sorted_entries import EntryQueue

IDLE_KEPT = 4096
"""Maximum number of idle siblings that are kept because they lead. If there are more, the one with the smallest lead is
dropped."""
_NO_TURN = 1 << 62
"""Subtracted from the number of a node that begins to wait, so that it is lower than that of any turn."""


class LazyCharges:
    """Number of ticks, each of which charges every stream once."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


class Ranking(Heap["Node"]):
    """Heap of siblings by counter. Charges do not update it; `least` corrects the top.

    This works because a record is never above the counter of its node: charges, ticks and turns raise the counter, and
    `on_lowered` is called for refunds.
    """

    __slots__ = ()

    def join(self, node: "Node") -> None:
        """Adds a node to the ranking."""
        self.push(node.counter, node.turn, node)

    def on_lowered(self, node: "Node") -> None:
        """Corrects the record of a node whose counter went down."""
        if node in self.live:
            self.push(node.counter, node.turn, node)

    def least(self) -> "Node | None":
        """Returns the node with the least counter; a tie goes to the node with the oldest turn."""
        records, live = self.records, self.live
        while records:
            record = records[0]
            node = record[2]
            if live.get(node) is not record:
                heappop(records)
            elif record[0] == node.counter and record[1] == node.turn:
                return node
            else:
                record = live[node] = (node.counter, node.turn, node)
                heapreplace(records, record)
        return None


class Siblings:
    """The nodes that share the service of one parent.

    Args:
        parent: Parent node; None for the classes, which share the whole service.
        ticks: Tick counter of the whole tree.
    """

    __slots__ = ("active", "children", "idle", "last", "min_counter", "parent", "queue", "ticks")

    def __init__(self, parent: "Node | None", ticks: LazyCharges) -> None:
        self.parent = parent
        self.ticks = ticks
        self.children: dict[object, Node] = {}
        self.queue = Ranking()
        """Nodes with waiting entries."""
        self.active = Ranking()
        """Nodes with waiting or running entries."""
        self.idle = Ranking()
        """Idle nodes with a counter above the value to which they would be lifted."""
        self.last: Node | None = None
        """Node that waited last; kept here even if it is dropped elsewhere."""
        self.min_counter = 0.0
        """Lower bound of the level; refunds do not lower it."""

    def level(self) -> float:
        """Returns the counter to which a node is lifted when it begins to wait."""
        reached = self.queue.least() or self.last
        return self.min_counter if reached is None else max(self.min_counter, reached.counter)

    def settle(self) -> None:
        """Keeps the level from falling below where it is now."""
        self.min_counter = self.level()

    def child(self, name: object, weight: float, turn: int, *, leaf: bool) -> "Node":
        """Returns the child with this name, new or existing, and sets its weight."""
        node = self.children.get(name)
        if node is None:
            node = self.children[name] = Node(name, self, weight, turn, leaf=leaf)
            node.lift(self.level())
            self.idle.join(node)
        else:
            node.reweigh(weight)
        return node

    def on_lowered(self, node: "Node") -> None:
        """Notes that a child's counter went down."""
        self.queue.on_lowered(node)
        self.active.on_lowered(node)
        self.idle.on_lowered(node)

    def activate(self, node: "Node") -> None:
        """Notes that an idle child begins to wait."""
        self.idle.discard(node)
        self.active.join(node)

    def deactivate(self, node: "Node") -> None:
        """Notes that a child neither waits nor runs. The leads among its own children end with that."""
        if node.below is not None:
            node.below.clear()
        self.active.remove(node)
        if self.parent is not None:
            self.idle.join(node)
            self.forget()

    def forget(self) -> None:
        """Drops idle children that are at or below the lift."""
        while (node := self.idle.least()) is not None and (
            node.counter <= self.min_counter or len(self.idle) > IDLE_KEPT
        ):
            self.idle.discard(node)
            del self.children[node.name]
            if node is not self.last:
                node.detach()

    def leave_alone(self, node: "Node") -> None:
        """Drops all children except one; the others neither wait nor run."""
        if len(self.children) > 1:
            for other in self.children.values():
                if other is not node:
                    other.detach()
            self.children = {node.name: node}
            self.idle.clear()

    def clear(self) -> None:
        """Drops all children; none of them waits or runs."""
        for node in self.children.values():
            node.detach()
        if self.last is not None:
            self.last.detach()
        self.children.clear()
        for ranking in (self.queue, self.active, self.idle):
            ranking.clear()
        self.last, self.min_counter = None, 0.0


class Node:
    """A class, organisation, team or key, with its service counter.

    Args:
        name: Name of the node among its siblings.
        among: The siblings of the node.
        weight: Weight relative to its siblings.
        turn: Breaks ties between equal counters, the least first. It grows each time that the node begins to wait or an
            entry is taken from it, so a node with a recent turn goes after older ones. Classes keep a constant turn.
        leaf: Whether the node has entries instead of children.
    """

    __slots__ = (
        "_booked",
        "_since",
        "_streams",
        "_ticks",
        "among",
        "below",
        "entries",
        "joined",
        "name",
        "path",
        "rate",
        "running",
        "service",
        "taken_s",
        "turn",
        "waiting",
    )

    def __init__(self, name: object, among: Siblings, weight: float, turn: int, *, leaf: bool) -> None:
        self.name = name
        self.among = among
        self.rate = 1.0 / weight
        """Growth of the counter per unit of service."""
        self.turn = turn
        self._booked = 0.0
        """The counter, as of..."""
        self._ticks = among.ticks
        self._since = among.ticks.now
        """...this tick."""
        self._streams = 0.0
        """Service charged with each tick."""
        self.waiting = 0
        """Number of waiting entries of this node and the nodes below it."""
        self.running = 0
        self.service = 0.0
        """Predicted service of the waiting entries."""
        self.taken_s = -inf
        """Of a class: when it was last taken from..."""
        self.joined: dict[QueueEntry[Any], float] = {}
        """...and its entries in the order in which they joined, with when that was."""
        self.path: tuple[Node, ...] = (self,) if among.parent is None else (self, *among.parent.path)
        """Nodes from this one up to the class."""
        self.below = None if leaf else Siblings(self, among.ticks)
        self.entries = EntryQueue()
        """Waiting entries of a leaf."""

    @property
    def counter(self) -> float:
        """Returns the service per weight up to now."""
        if not self._streams:
            return self._booked
        return self._booked + (self._ticks.now - self._since) * self._streams * self.rate

    def detach(self) -> None:
        """Detaches the node from the tree.

        Later charges are booked only on the levels above it, where they still count.

        Its path refers to itself, and its children and entries refer to it, so there are reference cycles. Only
        Python's cyclic garbage collector frees such cycles, which pauses the process for milliseconds, and a tenant
        with one request at a time would leave cycles after each request.
        """
        if self.path[0] is self:
            self.path = self.path[1:]
        self.below = None
        self.entries.clear()

    def lift(self, counter: float) -> None:
        """Raises the counter to at least the given value."""
        self._book(max(self.counter, counter))

    def reweigh(self, weight: float) -> None:
        """Sets the weight of the node from now on."""
        self._book(self.counter)
        self.rate = 1.0 / weight

    def join(self, service: float, turn: int) -> None:
        """Notes that one more entry of this leaf waits."""
        for node in self.path:
            among = node.among
            if node.waiting == 0:
                node.lift(among.level())
                if among.parent is not None:
                    node.turn = turn - _NO_TURN
                among.queue.join(node)
                if node.running == 0:
                    among.activate(node)
            node.waiting += 1
            node.service += service

    def leave(self, service: float) -> None:
        """Notes that an entry of this leaf stops waiting."""
        for node in self.path:
            among = node.among
            node.waiting -= 1
            node.service -= service
            if node.waiting == 0:
                node.service = 0.0
                among.queue.remove(node)
                among.last = node
                if node.running == 0:
                    among.deactivate(node)

    def start(self, turn: int) -> None:
        """Notes that a waiting entry of this leaf begins to run, which uses its turn."""
        for node in self.path:
            node.among.settle()
            node.running += 1
            if node.among.parent is not None:
                node.turn = turn

    def pass_through(self, turn: int, rates: Sequence[float] = ()) -> None:
        """Starts an entry of this leaf without waiting, while the queue is empty. Equals `join`, `start`, `leave`.

        Args:
            turn: See the class docstring.
            rates: New rates of the nodes from this one up to the level below the class; empty: the rates stay.
        """
        for node, rate in zip_longest(self.path, rates):
            among = node.among
            # Inlined `lift` to the `level` (the counter of the node that waited last) and `settle`.
            counter = node.counter if node._streams else node._booked
            last = among.last
            if last is not None and (reached := last.counter if last._streams else last._booked) > counter:
                counter = reached
            if among.min_counter > counter:
                counter = among.min_counter
            among.min_counter = node._booked = counter
            node._since = node._ticks.now
            if rate is not None:
                node.rate = rate
            if among.parent is not None:
                node.turn = turn
            if node.running == 0:
                among.activate(node)
            node.running += 1
            among.last = node

    def stop(self) -> None:
        """Notes that an entry of this leaf has stopped running."""
        for node in self.path:
            node.running -= 1
            if node.running == 0:
                node.dry()
                if node.waiting == 0:
                    node.among.deactivate(node)

    def charge(self, service: float) -> None:
        """Books service; a negative value is a refund."""
        for node in self.path:
            node._booked += service * node.rate
        if service < 0:
            for node in self.path:
                node.among.on_lowered(node)

    def stream(self, service: float) -> None:
        """Raises the service that is booked with each tick; a negative value lowers it."""
        for node in self.path:
            node._book(node.counter)
            node._streams += service

    def dry(self) -> None:
        """Sets the stream to 0 because nothing runs, which removes rounding errors."""
        self._book(self.counter)
        self._streams = 0.0

    def _book(self, counter: float) -> None:
        self._booked = counter
        self._since = self._ticks.now
