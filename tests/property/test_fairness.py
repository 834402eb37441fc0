"""The fair line does, in whatever order things happen, what a slow model does that looks at everything each time."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maitred.core.flow import Flow, PriorityClass, Share
from maitred.fairness.line import Entry, LineConfig, make_line

AGEING_S = 5.0
WEIGHTS = {PriorityClass.INTERACTIVE: 8.0, PriorityClass.STANDARD: 4.0, PriorityClass.BATCH: 2.0}
CLASSES = list(PriorityClass)

flows = st.builds(
    Flow,
    st.one_of(
        st.tuples(st.sampled_from([Share("a"), Share("b", 2.0), Share("c", 0.5)])),
        st.tuples(
            st.sampled_from([Share("a"), Share("d", 4.0)]), st.sampled_from([Share("x"), Share("y", 3.0), Share("a")])
        ),
    ),
    st.sampled_from(PriorityClass),
)
services = st.sampled_from([1.0, 10.0, 100.0, 128.0])


class Spot:
    """One node of the model."""

    def __init__(self, weight: float, turn: int, counter: float) -> None:
        self.weight, self.turn, self.counter = weight, turn, counter
        self.waiting: list[Entry[int]] = []
        self.running = 0


class Model:
    """The rules, word for word: no heaps, no caches, and no node is forgotten unless its parent has nothing to do."""

    def __init__(self) -> None:
        self.spots: dict[tuple[Any, ...], Spot] = {(p,): Spot(WEIGHTS.get(p, 1.0), p.rank, 0.0) for p in PriorityClass}
        self.floors: dict[tuple[Any, ...], float] = {}
        self.last: dict[tuple[Any, ...], Spot] = {}
        self.waiting: list[Entry[int]] = []
        self.rank: dict[Entry[int], int] = {}
        self.joined: dict[Entry[int], int] = {}
        self.taken: dict[Flow, dict[tuple[Any, ...], int]] = {}
        self.events = 0

    def path(self, flow: Flow, rank: int) -> list[tuple[Any, ...]]:
        """Names from the class down to the leaf."""
        names = [share.id for share in flow.path[:-1]] + [f"leaf {flow.path[-1].id}"]
        return [(CLASSES[rank], *names[:depth]) for depth in range(len(names) + 1)]

    def siblings(self, parent: tuple[Any, ...]) -> list[Spot]:
        return [spot for name, spot in self.spots.items() if name[:-1] == parent]

    def level(self, parent: tuple[Any, ...]) -> float:
        floor = self.floors.get(parent, 0.0)
        waiting = [spot.counter for spot in self.siblings(parent) if spot.waiting]
        if waiting:
            return max(floor, min(waiting))
        return max(floor, self.last[parent].counter) if parent in self.last else floor

    def join(self, entry: Entry[int], rank: int) -> None:
        self.events += 1
        self.rank[entry] = rank
        weights = [None, *(share.weight for share in entry.flow.path)]
        for name, weight in zip(self.path(entry.flow, rank), weights, strict=True):
            if name not in self.spots:
                self.spots[name] = Spot(weight, self.events, self.level(name[:-1]))
            elif weight is not None:
                self.spots[name].weight = weight
            spot = self.spots[name]
            if not spot.waiting:
                spot.counter = max(spot.counter, self.level(name[:-1]))
                if len(name) > 1:
                    spot.turn = self.events
        for name in self.path(entry.flow, rank):
            self.spots[name].waiting.append(entry)
        self.waiting.append(entry)

    def leave(self, entry: Entry[int]) -> None:
        self.waiting.remove(entry)
        path = self.path(entry.flow, self.rank[entry])
        for name in reversed(path):
            spot = self.spots[name]
            spot.waiting.remove(entry)
            if not spot.waiting:
                self.last[name[:-1]] = spot
        self.rest(path)

    def rest(self, path: list[tuple[Any, ...]]) -> None:
        for name in path:
            if not self.spots[name].waiting and not self.spots[name].running:
                for memory in (self.spots, self.floors, self.last):
                    for below in [other for other in memory if other[: len(name)] == name]:
                        if below != name or memory is not self.spots:
                            del memory[below]
                return

    def age(self, now_s: float) -> None:
        while True:
            due = [
                (entry.arrived_s + (entry.flow.priority.rank - rank + 1) * AGEING_S, self.joined[entry], entry)
                for entry in self.waiting
                if (rank := self.rank[entry])
            ]
            if not due or min(due)[0] > now_s:
                return
            entry = min(due)[2]
            self.leave(entry)
            self.join(entry, self.rank[entry] - 1)

    def head(self, now_s: float) -> Entry[int] | None:
        self.age(now_s)
        name: tuple[Any, ...] = ()
        while True:
            below = [(s.counter, s.turn, n) for n, s in self.spots.items() if n[:-1] == name and s.waiting]
            if not below:
                break
            name = min(below, key=lambda record: record[:2])[2]
        if not name:
            return None
        return min(
            self.spots[name].waiting,
            key=lambda e: (
                e.arrived_s + 30 if e.deadline_s is None else e.deadline_s - e.service / 1000,
                self.joined[e],
            ),
        )

    def take(self, entry: Entry[int]) -> None:
        self.events += 1
        path = self.path(entry.flow, self.rank[entry])
        for name in path:
            self.floors[name[:-1]] = self.level(name[:-1])
            self.spots[name].running += 1
            if len(name) > 1:
                self.spots[name].turn = self.events
        leaves = self.taken.setdefault(entry.flow, {})
        leaves[path[-1]] = leaves.get(path[-1], 0) + 1
        self.leave(entry)

    def charge(self, flow: Flow, service: float) -> None:
        leaves = self.taken[flow]
        for leaf, count in leaves.items():
            for depth in range(1, len(leaf) + 1):
                spot = self.spots[leaf[:depth]]
                share = service if len(leaves) == 1 else service * count / sum(leaves.values())
                spot.counter += share * (1.0 / spot.weight)

    def done(self, flow: Flow, leaf: tuple[Any, ...] | None = None) -> None:
        leaves = self.taken[flow]
        leaf = leaf if leaf in leaves else next(iter(leaves))
        leaves[leaf] -= 1
        if not leaves[leaf]:
            del leaves[leaf]
        if not leaves:
            del self.taken[flow]
        path = [leaf[:depth] for depth in range(1, len(leaf) + 1)]
        for name in path:
            self.spots[name].running -= 1
        self.rest(path)


class FairLineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.line = make_line(LineConfig(class_weights=WEIGHTS, ageing_s=AGEING_S))
        self.model = Model()
        self.now_s = 0.0
        self.running: list[Entry[int]] = []
        self.made = 0

    @rule(flow=flows, service=services, deadline_s=st.none() | st.integers(0, 40))
    def add(self, flow, service, deadline_s):
        deadline_s = None if deadline_s is None else self.now_s + deadline_s
        entry = Entry(self.made, flow, arrived_s=self.now_s, service=service, deadline_s=deadline_s)
        self.model.joined[entry] = self.made
        self.made += 1
        self.line.add(entry, self.now_s)
        self.model.join(entry, flow.priority.rank)

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def wait(self, seconds):
        self.now_s += seconds

    def entry(self, drawn: int) -> Entry[int]:
        return self.model.waiting[drawn % len(self.model.waiting)]

    @precondition(lambda self: self.model.waiting)
    @rule(drawn=st.integers(0, 99))
    def remove(self, drawn):
        entry = self.entry(drawn)
        self.line.remove(entry)
        self.model.leave(entry)

    @precondition(lambda self: self.model.waiting)
    @rule(drawn=st.none() | st.integers(0, 99))
    def take(self, drawn):
        self.same_head()
        entry = self.model.head(self.now_s) if drawn is None else self.entry(drawn)
        self.line.take(entry, self.now_s)
        self.model.take(entry)
        self.running.append(entry)

    @precondition(lambda self: self.running)
    @rule(drawn=st.integers(0, 99), service=services | services.map(lambda service: -service))
    def charge(self, drawn, service):
        flow = self.running[drawn % len(self.running)].flow
        self.line.charge(flow, service)
        self.model.charge(flow, service)

    @precondition(lambda self: self.running)
    @rule(drawn=st.integers(0, 99))
    def done(self, drawn):
        flow = self.running.pop(drawn % len(self.running)).flow
        self.line.done(flow)
        self.model.done(flow)

    @precondition(lambda self: self.running)
    @rule(drawn=st.integers(0, 99))
    def put_back(self, drawn):
        entry = self.running.pop(drawn % len(self.running))
        self.line.put_back(entry, self.now_s)
        self.model.join(entry, self.model.rank[entry])
        self.model.done(entry.flow, self.model.path(entry.flow, self.model.rank[entry])[-1])

    @invariant()
    def same_head(self):
        head = self.line.head(self.now_s)
        assert head is self.model.head(self.now_s)
        assert self.line.head(self.now_s) is head

    @invariant()
    def same_waiting(self):
        assert sorted(entry.value for entry in self.line) == sorted(entry.value for entry in self.model.waiting)
        assert len(self.line) == len(self.model.waiting)
        for priority in PriorityClass:
            expected = sum(entry.flow.priority is priority for entry in self.model.waiting)
            assert self.line.waiting_in(priority) == expected

    @invariant()
    def estimates_are_possible(self):
        for entry in self.model.waiting[:3]:
            ahead = self.line.ahead(entry, self.now_s)
            assert 0 <= ahead.entries < len(self.line)
            assert 0 <= ahead.service <= sum(other.service for other in self.model.waiting) + 1e-6
            assert self.line.over_service(entry.flow) >= 0

    def teardown(self):
        while (entry := self.line.head(self.now_s)) is not None:
            self.line.remove(entry)
        for entry in self.running:
            self.line.done(entry.flow)
        assert list(self.line) == []


FairLineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestFairLine = FairLineMachine.TestCase
