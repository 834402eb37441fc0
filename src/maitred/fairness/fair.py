"""Fair shares: classes by weight and age, tenants by virtual token counters, a key's own requests by deadline."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from maitred.core.flow import Flow, PriorityClass
from maitred.fairness import tree
from maitred.fairness.config import LineConfig
from maitred.fairness.entry import Ahead, Entry
from maitred.fairness.tree import Node

T = TypeVar("T")


class Account:
    """What one flow has in the line and out of it; kept while there is anything."""

    __slots__ = ("home", "runs", "total", "waiting")

    def __init__(self, home: Node) -> None:
        self.home = home
        """Its leaf in the tree of its own class."""
        self.waiting = 0
        self.total = 0
        """Entries that run."""
        self.runs: dict[Node, int] = {}
        """The same by the leaf they were taken from: another than `home` for those that have aged."""


class FairLine(Generic[T]):
    """The line that owes everybody a share."""

    def __init__(self, config: LineConfig) -> None:
        self._config = config
        self._root = Node(None, None, 1.0, 0)
        self._classes = []
        for priority in PriorityClass:
            node = Node(priority, self._root, config.class_weights.get(priority, 1.0), priority.rank)
            self._root.children[priority] = node
            self._classes.append(node)
        self._accounts: dict[Flow, Account] = {}
        self._entries: dict[Entry[T], None] = {}
        self._waiting = dict.fromkeys(PriorityClass, 0)
        self._turns = 0

    def add(self, entry: Entry[T], now_s: float) -> None:
        """Joins."""
        self._turns += 1
        entry.number = self._turns
        account = self._accounts.get(entry.flow)
        if account is None:
            account = self._accounts[entry.flow] = Account(self._leaf(entry.flow, entry.flow.priority.rank))
        self._join(entry, account, account.home)

    def remove(self, entry: Entry[T]) -> None:
        """Leaves without having run."""
        self._leave(entry)
        self._close(entry.flow)

    def head(self, now_s: float) -> Entry[T] | None:
        """Whose turn it is."""
        node = self._root.queue.least()
        while node is not None and not node.entries:
            node = node.queue.least()
        return None if node is None else node.entries.least()

    def take(self, entry: Entry[T], now_s: float) -> None:
        """Leaves and runs."""
        leaf: Node = entry.place
        self._turns += 1
        tree.run(leaf)
        for node in leaf.path[:-1]:
            node.turn = self._turns
        account = self._accounts[entry.flow]
        account.total += 1
        account.runs[leaf] = account.runs.get(leaf, 0) + 1
        self._leave(entry)

    def charge(self, flow: Flow, service: float) -> None:
        """Books service on every level of the flow's path."""
        account = self._accounts.get(flow)
        if account is None:
            leaf = self._leaf(flow, flow.priority.rank)
            self._book(leaf, service)
            for node in leaf.path[:-1]:
                assert node.parent is not None
                tree.forget(node.parent)
        elif len(account.runs) <= 1:
            for leaf in account.runs or (account.home,):
                self._book(leaf, service)
        else:
            for leaf, count in account.runs.items():
                self._book(leaf, service * count / account.total)

    def done(self, flow: Flow) -> None:
        """A taken entry has ended."""
        account = self._accounts[flow]
        self._end(account, next(iter(account.runs)))
        self._close(flow)

    def put_back(self, entry: Entry[T], now_s: float) -> None:
        """Waits again, with the age it has."""
        account = self._accounts[entry.flow]
        leaf: Node = entry.place
        self._join(entry, account, leaf)
        self._end(account, leaf if leaf in account.runs else next(iter(account.runs)))

    def ahead(self, entry: Entry[T], now_s: float) -> Ahead:
        """Estimates what is taken before an entry."""
        return Ahead(len(self._entries), self._root.service)

    def over_service(self, flow: Flow) -> float:
        """The lead over the least served active sibling, added up over the levels."""
        account = self._accounts.get(flow)
        if account is None:
            return 0.0
        lead = 0.0
        for node in account.home.path[:-1]:
            assert node.parent is not None
            least = node.parent.active.least()
            if least is not None and node.counter > least.counter:
                lead += node.counter - least.counter
        return lead

    def waiting_in(self, priority: PriorityClass) -> int:
        """How many wait that joined with this class."""
        return self._waiting[priority]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries)

    def _leaf(self, flow: Flow, rank: int) -> Node:
        node = self._classes[rank]
        for share in flow.path[:-1]:
            self._turns += 1
            node = node.child(share.id, share.weight, self._turns)
        self._turns += 1
        last = flow.path[-1]
        # A path may end where another goes on; they are siblings then.
        return node.child((last.id,), last.weight, self._turns)

    def _join(self, entry: Entry[T], account: Account, leaf: Node) -> None:
        entry.place = leaf
        key = entry.arrived_s + 30.0 if entry.deadline_s is None else entry.deadline_s - 0.001 * entry.service
        leaf.entries.join(key, entry)
        tree.wait(leaf, entry.service)
        account.waiting += 1
        self._entries[entry] = None
        self._waiting[entry.flow.priority] += 1

    def _leave(self, entry: Entry[T]) -> None:
        leaf: Node = entry.place
        leaf.entries.leave(entry)
        tree.unwait(leaf, entry.service)
        self._accounts[entry.flow].waiting -= 1
        del self._entries[entry]
        self._waiting[entry.flow.priority] -= 1

    def _book(self, leaf: Node, service: float) -> None:
        for node in leaf.path:
            node.counter += service * node.rate
        if service < 0:
            for node in leaf.path:
                parent = node.parent
                assert parent is not None
                parent.queue.lowered(node)
                parent.active.lowered(node)
                parent.idle.lowered(node)

    def _end(self, account: Account, leaf: Node) -> None:
        account.total -= 1
        if account.runs[leaf] == 1:
            del account.runs[leaf]
        else:
            account.runs[leaf] -= 1
        tree.rest(leaf)

    def _close(self, flow: Flow) -> None:
        account = self._accounts[flow]
        if not account.waiting and not account.total:
            del self._accounts[flow]
