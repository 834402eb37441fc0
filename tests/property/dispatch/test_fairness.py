"""The fair queue does, in whatever order things happen, what a slow model does that looks at everything each time."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.fairness.fair_queue import QueueEntry, QueueOrderConfig, make_queue

AGEING_S = 5.0
WEIGHTS = {PriorityClass.INTERACTIVE: 8.0, PriorityClass.STANDARD: 4.0, PriorityClass.BATCH: 2.0}
CLASSES = list(PriorityClass)

PATHS = [
    (FlowLevel("a"),),
    (FlowLevel("b", 2.0),),
    (FlowLevel("d", 4.0), FlowLevel("x")),
    (FlowLevel("d", 4.0), FlowLevel("y", 3.0)),
    (FlowLevel("a"), FlowLevel("a", 0.5)),
]
SERVICES = [1.0, 10.0, 100.0, 128.0]
UNIT = 3 * 720720 / 2**17
"""A short binary fraction that weights, and whatever of a flow may run at a time, divide without a rest: so sums are
exact, and do not depend on their order."""
CHARGES = [UNIT / 16, UNIT, 6 * UNIT, 8 * UNIT]
STREAMS = [UNIT / 16, UNIT / 8, 2 * UNIT]


class Spot:
    """One node of the model."""

    def __init__(self, weight: float, turn: int, counter: float) -> None:
        self.weight, self.turn, self.counter = weight, turn, counter
        self.waiting: list[QueueEntry[int]] = []
        self.running = 0
        self.new = False
        """Whether it had no turn since it began to wait."""


class Model:
    """The rules, word for word: no heaps, no caches, and no node is forgotten unless its parent has nothing to do."""

    def __init__(self) -> None:
        self.spots: dict[tuple[Any, ...], Spot] = {(p,): Spot(WEIGHTS.get(p, 1.0), p.rank, 0.0) for p in PriorityClass}
        self.levels: dict[tuple[Any, ...], float] = {}
        self.last: dict[tuple[Any, ...], Spot] = {}
        self.waiting: list[QueueEntry[int]] = []
        self.rank: dict[QueueEntry[int], int] = {}
        self.joined: dict[QueueEntry[int], int] = {}
        self.since: dict[QueueEntry[int], tuple[int, float]] = {}
        """When each joined the class that it waits in."""
        self.taken_s: dict[tuple[Any, ...], float] = {}
        """When each class was last taken from."""
        self.taken: dict[Flow, dict[tuple[Any, ...], int]] = {}
        self.streams: dict[Flow, float] = {}
        self.events = 0

    def path(self, flow: Flow, rank: int) -> list[tuple[Any, ...]]:
        """Names from the class down to the leaf."""
        names = [share.id for share in flow.path[:-1]] + [f"leaf {flow.path[-1].id}"]
        return [(CLASSES[rank], *names[:depth]) for depth in range(len(names) + 1)]

    def siblings(self, parent: tuple[Any, ...]) -> list[Spot]:
        return [spot for name, spot in self.spots.items() if name[:-1] == parent]

    def level(self, parent: tuple[Any, ...]) -> float:
        lowest = self.levels.get(parent, 0.0)
        waiting = [spot.counter for spot in self.siblings(parent) if spot.waiting]
        if waiting:
            return max(lowest, min(waiting))
        return max(lowest, self.last[parent].counter) if parent in self.last else lowest

    def join(self, entry: QueueEntry[int], rank: int, now_s: float) -> None:
        self.events += 1
        self.rank[entry] = rank
        self.since[entry] = self.events, now_s
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
                    spot.turn, spot.new = self.events, True
        for name in self.path(entry.flow, rank):
            self.spots[name].waiting.append(entry)
        self.waiting.append(entry)

    def leave(self, entry: QueueEntry[int]) -> None:
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
                for memory in (self.spots, self.levels, self.last):
                    for below in [other for other in memory if other[: len(name)] == name]:
                        if below != name or memory is not self.spots:
                            del memory[below]
                return

    def age(self, now_s: float) -> None:
        while True:
            due = []
            for rank, priority in enumerate(PriorityClass):
                waiting = self.spots[priority,].waiting
                if rank and waiting:
                    oldest = min(waiting, key=lambda entry: self.since[entry])
                    since_s = max(self.since[oldest][1], self.taken_s.get((priority,), 0.0))
                    due.append((since_s + AGEING_S, rank, oldest))
            if not due or min(due)[0] > now_s:
                return
            due_s, _, entry = min(due)
            self.leave(entry)
            self.join(entry, self.rank[entry] - 1, due_s)

    def head(self, now_s: float) -> QueueEntry[int] | None:
        self.age(now_s)
        return self.first(())

    def first(self, name: tuple[Any, ...]) -> QueueEntry[int] | None:
        while True:
            below = [(s.counter, not s.new, s.turn, n) for n, s in self.spots.items() if n[:-1] == name and s.waiting]
            if not below:
                break
            name = min(below, key=lambda record: record[:3])[3]
        if not name:
            return None
        return min(
            self.spots[name].waiting,
            key=lambda e: (
                e.arrived_s + 30 if e.deadline_s is None else e.deadline_s - e.service / 1000,
                self.joined[e],
            ),
        )

    def take(self, entry: QueueEntry[int], now_s: float) -> None:
        self.events += 1
        path = self.path(entry.flow, self.rank[entry])
        self.taken_s[path[0]] = now_s
        for name in path:
            self.levels[name[:-1]] = self.level(name[:-1])
            self.spots[name].running += 1
            if len(name) > 1:
                self.spots[name].turn, self.spots[name].new = self.events, False
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

    def tick(self) -> None:
        for flow, service in self.streams.items():
            self.charge(flow, service)

    def over_service(self, flow: Flow) -> float:
        return self._lead(flow, lambda spot: spot.waiting or spot.running)

    def lead(self, flow: Flow) -> float:
        return self._lead(flow, lambda spot: spot.waiting)

    def _lead(self, flow: Flow, over: Callable[[Spot], int]) -> float:
        leaf = next(iter(self.taken[flow]))
        lead = 0.0
        for depth in range(len(leaf), 1, -1):
            counters = [spot.counter for spot in self.siblings(leaf[: depth - 1]) if over(spot)]
            if counters:
                lead += max(0.0, self.spots[leaf[:depth]].counter - min(counters))
        return lead

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


class Both:
    """The queue and its model, with the same calls."""

    def __init__(self) -> None:
        self.queue = make_queue(QueueOrderConfig(class_weights=WEIGHTS, ageing_s=AGEING_S))
        self.model = Model()
        self.now_s = 0.0
        self.running: list[QueueEntry[int]] = []
        self.made = 0

    def add(self, flow: Flow, service: float, due_in_s: float | None) -> None:
        deadline_s = None if due_in_s is None else self.now_s + due_in_s
        entry = QueueEntry(self.made, flow, arrived_s=self.now_s, service=service, deadline_s=deadline_s)
        self.model.joined[entry] = self.made
        self.made += 1
        self.queue.add(entry, self.now_s)
        self.model.join(entry, flow.priority.rank, self.now_s)

    def remove(self, drawn: int) -> None:
        entry = self.model.waiting[drawn % len(self.model.waiting)]
        self.queue.remove(entry)
        self.model.leave(entry)

    def take(self, drawn: int | None) -> None:
        self.model.age(self.now_s)
        self.queue.head(self.now_s)
        waiting = self.model.waiting
        entry = self.model.head(self.now_s) if drawn is None else waiting[drawn % len(waiting)]
        self.queue.take(entry, self.now_s)
        self.model.take(entry, self.now_s)
        self.running.append(entry)

    def charge(self, drawn: int, service: float) -> None:
        flow = self.running[drawn % len(self.running)].flow
        self.queue.charge(flow, service)
        self.model.charge(flow, service)

    def stream(self, drawn: int, service: float) -> None:
        flow = self.running[drawn % len(self.running)].flow
        self.queue.stream(flow, service)
        self.model.streams[flow] = self.model.streams.get(flow, 0.0) + service

    def tick(self) -> None:
        self.queue.tick()
        self.model.tick()

    def stop(self, flow: Flow) -> None:
        """What runs no more gets nothing."""
        if all(entry.flow != flow for entry in self.running) and flow in self.model.streams:
            self.queue.stream(flow, -self.model.streams.pop(flow))

    def done(self, drawn: int) -> None:
        flow = self.running.pop(drawn % len(self.running)).flow
        self.stop(flow)
        self.queue.done(flow)
        self.model.done(flow)

    def requeue(self, drawn: int) -> None:
        entry = self.running.pop(drawn % len(self.running))
        self.stop(entry.flow)
        self.queue.requeue(entry, self.now_s)
        self.model.join(entry, self.model.rank[entry], self.now_s)
        self.model.done(entry.flow, self.model.path(entry.flow, self.model.rank[entry])[-1])

    def check(self) -> None:
        head = self.queue.head(self.now_s)
        assert head is self.model.head(self.now_s)
        assert self.queue.head(self.now_s) is head
        assert len(self.queue) == len(self.model.waiting)
        for flow in self.model.taken:
            assert self.queue.over_service(flow) == self.model.over_service(flow)
            assert self.queue.lead(flow) == self.model.lead(flow)

    def check_waiting(self) -> None:
        assert sorted(entry.value for entry in self.queue) == sorted(entry.value for entry in self.model.waiting)
        for priority in PriorityClass:
            expected = sum(entry.flow.priority is priority for entry in self.model.waiting)
            assert self.queue.waiting_in(priority) == expected
        for entry in self.model.waiting[:3]:
            ahead = self.queue.ahead(entry, self.now_s)
            assert 0 <= ahead.entries < len(self.queue)
            assert 0 <= ahead.service <= sum(other.service for other in self.model.waiting) + 1e-6

    def finish(self) -> None:
        while (entry := self.queue.head(self.now_s)) is not None:
            self.queue.remove(entry)
        while self.running:
            self.done(0)
        assert list(self.queue) == []


numbers = st.integers(0, 99)


class FairLineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.both = Both()

    @rule(
        path=st.sampled_from(PATHS),
        priority=st.sampled_from(PriorityClass),
        service=st.sampled_from(SERVICES),
        due_in_s=st.none() | st.integers(0, 40),
    )
    def add(self, path, priority, service, due_in_s):
        self.both.add(Flow(path, priority), service, due_in_s)

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def wait(self, seconds):
        self.both.now_s += seconds

    @precondition(lambda self: self.both.model.waiting)
    @rule(drawn=numbers)
    def remove(self, drawn):
        self.both.remove(drawn)

    @precondition(lambda self: self.both.model.waiting)
    @rule(drawn=st.none() | numbers)
    def take(self, drawn):
        self.both.take(drawn)

    @precondition(lambda self: self.both.running)
    @rule(drawn=numbers, service=st.sampled_from([*CHARGES, -UNIT]))
    def charge(self, drawn, service):
        self.both.charge(drawn, service)

    @precondition(lambda self: self.both.running)
    @rule(drawn=numbers, service=st.sampled_from(STREAMS))
    def stream(self, drawn, service):
        self.both.stream(drawn, service)

    @rule(times=st.integers(1, 3))
    def tick(self, times):
        for _ in range(times):
            self.both.tick()

    @precondition(lambda self: self.both.running)
    @rule(drawn=numbers)
    def done(self, drawn):
        self.both.done(drawn)

    @precondition(lambda self: self.both.running)
    @rule(drawn=numbers)
    def requeue(self, drawn):
        self.both.requeue(drawn)

    @invariant()
    def same(self):
        self.both.check()
        self.both.check_waiting()

    def teardown(self):
        self.both.finish()


FairLineMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestFairLine = FairLineMachine.TestCase


@pytest.mark.parametrize("seed", range(120))
def test_long_busy_histories_agree_with_the_model(seed):
    # Few flows that meet often: drawn blindly, histories seldom come to where memory of the past matters.
    draw = random.Random(seed)
    both = Both()
    paths = draw.sample(PATHS, 4)
    priorities = draw.choice([[PriorityClass.STANDARD], [PriorityClass.STANDARD, PriorityClass.BACKGROUND]])
    most = draw.choice([2, 6, 12])
    for _ in range(200):
        kind = draw.random()
        if kind < 0.3 and len(both.model.waiting) < most:
            due_in_s = draw.choice([None, None, 5.0, 29.0])
            both.add(Flow(draw.choice(paths), draw.choice(priorities)), draw.choice(SERVICES), due_in_s)
        elif kind < 0.5 and both.model.waiting:
            both.take(None if draw.random() < 0.8 else draw.randrange(99))
        elif kind < 0.55 and both.model.waiting:
            both.remove(draw.randrange(99))
        elif kind < 0.6 and both.running:
            both.stream(draw.randrange(99), draw.choice(STREAMS))
        elif kind < 0.67:
            both.tick()
        elif kind < 0.75 and both.running:
            both.charge(draw.randrange(99), draw.choice([*CHARGES, -UNIT / 4, -4 * UNIT]))
        elif kind < 0.9 and both.running:
            both.done(draw.randrange(99))
        elif kind < 0.95 and both.running:
            both.requeue(draw.randrange(99))
        else:
            both.now_s += draw.choice([0.1, 1.0, 4.0])
        both.check()
    both.check_waiting()
    both.finish()
