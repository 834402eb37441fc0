"""Virtual token counters at every level of a tree of tenants.

Each node counts the service it got, divided by its weight. Among siblings that have requests waiting, the least counter
is next; so what they get stays in proportion to their weights, at every level from the organisation down to the key.

What keeps idleness from earning credit is the *lift* (Sheng et al., OSDI'24): a node that begins to wait goes up to the
least counter of its siblings that wait, or, when none does, to that of the sibling which waited last. Only waiting
counts, as in the paper: a node with one slow request that runs, and nothing waiting, gets less than its share because
it asks for less, and shall not save up the difference by keeping that request alive.

Nodes are forgotten as soon as the lift makes their counter irrelevant, that is when they neither wait nor run and have
no more than they would be lifted to.
"""

from heapq import heappop, heapreplace

from maitred.fairness.heap import Heap
from maitred.fairness.queue import EntryQueue

_NEVER = -(1 << 62)
"""Turns of nodes that were never taken from; before all others."""

IDLE_KEPT = 4096
"""Idle siblings that are remembered because they are ahead of the others; beyond, the one that is least ahead is let
off the rest."""


class Ranking(Heap["Node"]):
    """Siblings by counter. Counters are charged without telling; the top is put right when somebody looks.

    That works because a record never says more than its node's counter: charges raise it, and `lowered` is told of
    refunds.
    """

    __slots__ = ()

    def join(self, node: "Node") -> None:
        """Lets a node in."""
        self.push(node.counter, node.turn, node)

    def lowered(self, node: "Node") -> None:
        """Puts a node right whose counter went down."""
        if node in self.live:
            self.push(node.counter, node.turn, node)

    def least(self) -> "Node | None":
        """The node with the least counter; of equals, the one taken from longest ago."""
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


class Node:
    """A class, organisation, team or key: what it was served, and its children.

    Args:
        name: Under which its parent keeps it.
        parent: None for the root.
        weight: Relative to its siblings.
        turn: Settles ties between equal counters, the least first.
    """

    __slots__ = (
        "active",
        "children",
        "counter",
        "entries",
        "floor",
        "idle",
        "last",
        "name",
        "parent",
        "path",
        "queue",
        "rate",
        "running",
        "service",
        "turn",
        "waiting",
    )

    def __init__(self, name: object, parent: "Node | None", weight: float, turn: int) -> None:
        self.name = name
        self.parent = parent
        self.rate = 1.0 / weight
        """Counter per service."""
        self.turn = turn
        self.counter = 0.0
        self.waiting = 0
        """Entries, here and below."""
        self.running = 0
        self.service = 0.0
        """Predicted, of the entries that wait."""
        self.path: tuple[Node, ...] = (
            (self, *parent.path)
            if parent is not None and parent.parent is not None
            else ((self,) if parent is not None else ())
        )
        """From here up to below the root."""
        self.children: dict[object, Node] = {}
        self.queue = Ranking()
        """Children that wait."""
        self.active = Ranking()
        """Children that wait or run."""
        self.idle = Ranking()
        """Children that do neither, and are ahead of where they would be lifted."""
        self.last: Node | None = None
        """The child that waited last."""
        self.floor = 0.0
        """Where the one that waited last stood when it was forgotten."""
        self.entries = EntryQueue()
        """Of a leaf."""

    def level(self) -> float:
        """Where a child is lifted that begins to wait."""
        least = self.queue.least()
        if least is not None:
            return least.counter
        return self.floor if self.last is None else self.last.counter

    def child(self, name: object, weight: float, created: int) -> "Node":
        """The child of this name, new or known; the weight holds from now on."""
        node = self.children.get(name)
        if node is None:
            node = self.children[name] = Node(name, self, weight, _NEVER + created)
            node.counter = self.level()
            self.idle.join(node)
        else:
            node.rate = 1.0 / weight
        return node


def wait(leaf: Node, service: float) -> None:
    """One more entry of this service waits."""
    for node in leaf.path:
        parent = node.parent
        assert parent is not None
        if node.waiting == 0:
            level = parent.level()
            if node.counter < level:
                node.counter = level
            parent.queue.join(node)
            if node.running == 0:
                parent.idle.discard(node)
                parent.active.join(node)
        node.waiting += 1
        node.service += service


def unwait(leaf: Node, service: float) -> None:
    """An entry waits no more."""
    for node in leaf.path:
        parent = node.parent
        assert parent is not None
        node.waiting -= 1
        node.service -= service
        if node.waiting == 0:
            node.service = 0.0
            parent.queue.discard(node)
            parent.last = node
            if node.running == 0:
                _rest(node, parent)


def run(leaf: Node) -> None:
    """One more entry runs."""
    for node in leaf.path:
        if node.running == 0 and node.waiting == 0:
            assert node.parent is not None
            node.parent.idle.discard(node)
            node.parent.active.join(node)
        node.running += 1


def rest(leaf: Node) -> None:
    """An entry runs no more."""
    for node in leaf.path:
        node.running -= 1
        if node.running == 0 and node.waiting == 0:
            assert node.parent is not None
            _rest(node, node.parent)


def _rest(node: Node, parent: Node) -> None:
    parent.active.discard(node)
    parent.idle.join(node)
    forget(parent)


def forget(parent: Node) -> None:
    """Drops the idle children that would be lifted anyway; classes stay."""
    if parent.parent is None:
        return
    level = parent.level()
    idle = parent.idle
    while (node := idle.least()) is not None and (node.counter <= level or len(idle) > IDLE_KEPT):
        idle.discard(node)
        del parent.children[node.name]
        if parent.last is node:
            parent.floor = node.counter
            parent.last = None
