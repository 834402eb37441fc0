"""Virtual token counters at every level of a tree of tenants.

Each node counts the service it got, divided by its weight. Of siblings that have requests waiting, the one with the
least counter is next; so what they get stays in proportion to their weights, from the class down to the key.

What keeps idleness from earning credit is the *lift* (Sheng et al., OSDI'24): a node that begins to wait goes up to the
least counter of its siblings that wait or, when none does, to that of the sibling which waited last. Only waiting
counts, as in the paper: a node with one slow request that runs and nothing that waits gets less than its share because
it asks for less, and shall not save up the difference by keeping that request alive.

**Bound.** Let *R* be the most service that the running requests of a node may still be charged just after one was
taken. Whenever one was taken, its node had the least counter, and that *level* never falls again; so no node is ever
ahead of a sibling that waits by more than *R* / weight, and over any span in which two siblings wait throughout, what
they get differs by at most ``R_f / w_f + R_g / w_g`` per unit of weight. With whole prompts charged when a request is
taken, this is the paper's theorem 4.4. Here prompts are charged chunk by chunk, so *R* holds the rest of the prompts as
well; a request that is preempted no longer counts in *R*, counts again when it is taken again, and its recomputation is
not charged. Charges that may be refunded later are held against both sides: where *A* is the most of them at a time,
``A_f / w_f + A_g / w_g`` is added. All of it holds at every level separately.

**Streams.** Most of what is charged is one token of an answer for each sequence that decodes, in every step. So a node
knows what streams to it per tick, and its counter is a linear function of the ticks that is evaluated when somebody
looks: a tick costs O(1), however many streams there are, and the counters are as exact as if each had been charged.

Nodes are forgotten as soon as the lift makes their counter irrelevant: when they neither wait nor run and are at most
where they would be lifted to. A node that neither waits nor runs has no children.
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
"""Idle siblings that are remembered for being ahead; of more, the one that is least ahead is let off the rest."""


class LazyCharges:
    """How often everything that streams was charged."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


class Ranking(Heap["Node"]):
    """Siblings by counter. Counters are charged without telling; the top is put right when somebody looks.

    That works because a record never says more than its node's counter: charges, ticks and turns raise it, and
    `lowered` is told of refunds.
    """

    __slots__ = ()

    def join(self, node: "Node") -> None:
        """Lets a node in."""
        self.push(node.counter, node.turn, node)

    def on_lowered(self, node: "Node") -> None:
        """Puts a node right whose counter went down."""
        if node in self.live:
            self.push(node.counter, node.turn, node)

    def least(self) -> "Node | None":
        """The node with the least counter; of equals, the one that waits longest since its turn or since it began."""
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
    """The nodes that share what one parent gets.

    Args:
        parent: None for the classes, which share what there is.
        ticks: The same for all of the tree.
    """

    __slots__ = ("active", "children", "idle", "last", "min_counter", "parent", "queue", "ticks")

    def __init__(self, parent: "Node | None", ticks: LazyCharges) -> None:
        self.parent = parent
        self.ticks = ticks
        self.children: dict[object, Node] = {}
        self.queue = Ranking()
        """That have entries waiting."""
        self.active = Ranking()
        """That have entries waiting or running."""
        self.idle = Ranking()
        """That have neither, and are ahead of where they would be lifted."""
        self.last: Node | None = None
        """That waited last; kept when it is forgotten otherwise."""
        self.min_counter = 0.0
        """The level, as far as it is settled: refunds do not bring it down."""

    def level(self) -> float:
        """The counter at which one begins to wait."""
        reached = self.queue.least() or self.last
        return self.min_counter if reached is None else max(self.min_counter, reached.counter)

    def settle(self) -> None:
        """Keeps the level from falling below where it is now."""
        self.min_counter = self.level()

    def child(self, name: object, weight: float, turn: int, *, leaf: bool) -> "Node":
        """The child of this name, new or known; the weight holds from now on."""
        node = self.children.get(name)
        if node is None:
            node = self.children[name] = Node(name, self, weight, turn, leaf=leaf)
            node.lift(self.level())
            self.idle.join(node)
        else:
            node.reweigh(weight)
        return node

    def on_lowered(self, node: "Node") -> None:
        """A child's counter went down."""
        self.queue.on_lowered(node)
        self.active.on_lowered(node)
        self.idle.on_lowered(node)

    def activate(self, node: "Node") -> None:
        """An idle child begins to wait."""
        self.idle.discard(node)
        self.active.join(node)

    def deactivate(self, node: "Node") -> None:
        """A child neither waits nor runs any more. What its own children were ahead of each other is over with that."""
        if node.below is not None:
            node.below.clear()
        self.active.remove(node)
        if self.parent is not None:
            self.idle.join(node)
            self.forget()

    def forget(self) -> None:
        """Drops idle children that would be lifted anyway."""
        while (node := self.idle.least()) is not None and (
            node.counter <= self.min_counter or len(self.idle) > IDLE_KEPT
        ):
            self.idle.discard(node)
            del self.children[node.name]
            if node is not self.last:
                node.detach()

    def leave_alone(self, node: "Node") -> None:
        """Drops all children but one; none of the others waits or runs."""
        if len(self.children) > 1:
            for other in self.children.values():
                if other is not node:
                    other.detach()
            self.children = {node.name: node}
            self.idle.clear()

    def clear(self) -> None:
        """Begins anew, without children; none of them waits or runs."""
        for node in self.children.values():
            node.detach()
        if self.last is not None:
            self.last.detach()
        self.children.clear()
        for ranking in (self.queue, self.active, self.idle):
            ranking.clear()
        self.last, self.min_counter = None, 0.0


class Node:
    """A class, organisation, team or key, and what it was served.

    Args:
        name: Under which its siblings keep it.
        among: Its siblings.
        weight: Relative to theirs.
        turn: Settles ties between equal counters, the least first. It rises each time that the node begins to wait or
            is taken from, so that those who come later do not go before it for ever. Classes keep theirs.
        leaf: Whether it has entries, or else children.
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
        """Counter per service."""
        self.turn = turn
        self._booked = 0.0
        """The counter, as of..."""
        self._ticks = among.ticks
        self._since = among.ticks.now
        """...this tick."""
        self._streams = 0.0
        """Service per tick."""
        self.waiting = 0
        """Entries, here and below."""
        self.running = 0
        self.service = 0.0
        """Predicted, of the entries that wait."""
        self.taken_s = -inf
        """Of a class: when it was last taken from..."""
        self.joined: dict[QueueEntry[Any], float] = {}
        """...and its entries in the order in which they joined, with when that was."""
        self.path: tuple[Node, ...] = (self,) if among.parent is None else (self, *among.parent.path)
        """From here up to the class."""
        self.below = None if leaf else Siblings(self, among.ticks)
        self.entries = EntryQueue()
        """Of a leaf."""

    @property
    def counter(self) -> float:
        """Service per weight, up to now."""
        if not self._streams:
            return self._booked
        return self._booked + (self._ticks.now - self._since) * self._streams * self.rate

    def detach(self) -> None:
        """Detaches the node. What is charged to it later is booked above it only, where it still counts.

        Its path leads to itself, and so do its children's and its entries' places. Such circles Python only finds by
        looking through all that is new, which stops everybody for milliseconds, and a tenant with one request at a time
        would leave some with each of them.
        """
        if self.path[0] is self:
            self.path = self.path[1:]
        self.below = None
        self.entries.clear()

    def lift(self, counter: float) -> None:
        """Goes up to a counter, or stays where it is if that is more."""
        self._book(max(self.counter, counter))

    def reweigh(self, weight: float) -> None:
        """From now on the node has this weight."""
        self._book(self.counter)
        self.rate = 1.0 / weight

    def join(self, service: float, turn: int) -> None:
        """One more entry of this leaf waits."""
        for node in self.path:
            among = node.among
            if node.waiting == 0:
                node.lift(among.level())
                if among.parent is not None:
                    node.turn = turn
                among.queue.join(node)
                if node.running == 0:
                    among.activate(node)
            node.waiting += 1
            node.service += service

    def leave(self, service: float) -> None:
        """An entry of this leaf waits no more."""
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
        """An entry of this leaf, which waits yet, begins to run: that was its turn."""
        for node in self.path:
            node.among.settle()
            node.running += 1
            if node.among.parent is not None:
                node.turn = turn

    def pass_through(self, turn: int, rates: Sequence[float] = ()) -> None:
        """An entry of this leaf runs without having waited; nothing waits anywhere. As `join`, `start` and `leave`.

        Args:
            turn: See the class.
            rates: Of the nodes from here up to below the class, from now on; none: as they are.
        """
        for node, rate in zip_longest(self.path, rates):
            among = node.among
            # `lift` to the `level`, which is that of whoever waited last, and `settle`; spelt out.
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
        """An entry of this leaf runs no more."""
        for node in self.path:
            node.running -= 1
            if node.running == 0:
                node.dry()
                if node.waiting == 0:
                    node.among.deactivate(node)

    def charge(self, service: float) -> None:
        """Books service; negative: a refund."""
        for node in self.path:
            node._booked += service * node.rate
        if service < 0:
            for node in self.path:
                node.among.on_lowered(node)

    def stream(self, service: float) -> None:
        """From now on so much more is booked with each tick; negative: less."""
        for node in self.path:
            node._book(node.counter)
            node._streams += service

    def dry(self) -> None:
        """Nothing runs, so nothing streams: what rounding may have left of that is dropped."""
        self._book(self.counter)
        self._streams = 0.0

    def _book(self, counter: float) -> None:
        self._booked = counter
        self._since = self._ticks.now
