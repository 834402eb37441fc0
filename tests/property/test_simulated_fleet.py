"""The compiled fleet of `benchmarks.scaling` serves as a simulation step by step does."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.scaling.fleet import ReplicaKind, RequestTrace, SimulatedFleet
from maitred.core.replica import StepTimes

TIMES = StepTimes(fixed_s=0.02, token_s=0.0001, context_token_s=1e-6, decode_s=0.0004, chunk_s=0.001, pair_s=1e-8)


class SteppedReplica:
    """Replica that serves requests, each a dictionary, one step after the other."""

    def __init__(self, kind, ordered_s, ready_s):
        self.kind, self.ordered_s, self.ready_s = kind, ordered_s, ready_s
        self.phase = "starting"
        self.requests = []
        self.step_ends_s = None

    def free(self):
        return self.phase == "serving" and len(self.requests) < self.kind.slots

    def begin(self, now_s):
        """Plans one step: every answer gets a token, and what is left of the step's tokens is prefill, oldest first."""
        if not self.requests:
            self.step_ends_s = None
            return
        decoding = [request for request in self.requests if request["left"] == 0]
        budget = self.kind.step_tokens - len(decoding)
        seconds = self.kind.times.decoding(len(decoding), sum(request["context"] for request in decoding))
        self.planned = [(request, 0) for request in decoding]
        for request in sorted(self.requests, key=lambda request: request["number"]):
            length = min(budget, request["left"])
            if length:
                seconds += self.kind.times.chunk(request["prompt"] - request["left"], length)
                budget -= length
                self.planned.append((request, length))
        self.step_ends_s = now_s + seconds

    def end(self, now_s):
        for request, length in self.planned:
            request["left"] -= length
            if request["left"] == 0:
                request["tokens"] += 1
                request["context"] = request["prompt"] + request["tokens"]
                if request["tokens"] == 1:
                    request["first"] = now_s
                if request["tokens"] == request["output"]:
                    request["finished"] = now_s
                    self.requests.remove(request)
        self.step_ends_s = None


class SteppedFleet:
    """Replicas with one line before them; the rules are those of `benchmarks.support.scaling.fleet.SimulatedFleet`."""

    def __init__(self, trace, kind, *, lead_s, replicas):
        rows = zip(trace.arrived, trace.prompts, trace.outputs, strict=True)
        self.requests = [
            {"number": n, "at": at, "prompt": p, "left": p, "output": o, "tokens": 0, "context": 0}
            for n, (at, p, o) in enumerate(rows)
        ]
        self.coming = deque(self.requests)
        self.queue = deque()
        self.kind, self.lead_s, self.now_s, self.paid_s, self.starts = kind, lead_s, 0.0, 0.0, 0
        self.rows = []
        for _ in range(replicas):
            replica = self._order(0.0)
            replica.phase = "serving"

    def _order(self, ready_s):
        replica = SteppedReplica(self.kind, self.now_s, ready_s)
        for row, known in enumerate(self.rows):
            if known is None:
                self.rows[row] = replica
                return replica
        self.rows.append(replica)
        return replica

    def _present(self, *phases):
        return [replica for replica in self.rows if replica is not None and replica.phase in phases]

    def _remove(self, replica):
        self.paid_s += self.now_s - replica.ordered_s
        self.rows[self.rows.index(replica)] = None

    def _fill(self, replica):
        while self.queue and replica.free():
            replica.requests.append(self.queue.popleft())
        if replica.step_ends_s is None:
            replica.begin(self.now_s)

    def advance(self, until_s):
        while True:
            events = [(until_s, 0, None)]
            if self.coming:
                events.append((self.coming[0]["at"], 1, None))
            events += [(replica.ready_s, 2, replica) for replica in self._present("starting")]
            events += [
                (replica.step_ends_s, 3, replica)
                for replica in self._present("serving", "draining")
                if replica.step_ends_s is not None
            ]
            self.now_s, kind, replica = min(events, key=lambda event: event[:2])
            if kind == 0:
                return
            if kind == 1:
                self.queue.append(self.coming.popleft())
                if free := [replica for replica in self._present("serving") if replica.free()]:
                    self._fill(min(free, key=lambda replica: len(replica.requests)))
            elif kind == 2:
                replica.phase = "serving"
                self._fill(replica)
            else:
                replica.end(self.now_s)
                self._fill(replica)
                if replica.phase == "draining" and not replica.requests:
                    self._remove(replica)

    def scale(self, desired):
        have = len(self._present("starting", "serving"))
        for _ in range(desired - have):
            if draining := self._present("draining"):
                replica = max(draining, key=lambda replica: len(replica.requests))
                replica.phase = "serving"
                self._fill(replica)
            else:
                self.starts += 1
                self._order(self.now_s + self.lead_s)
        for _ in range(have - desired):
            if starting := self._present("starting"):
                self._remove(max(reversed(starting), key=lambda replica: replica.ordered_s))
                continue
            replica = min(self._present("serving"), key=lambda replica: len(replica.requests))
            replica.phase = "draining"
            if not replica.requests:
                self._remove(replica)

    def replica_seconds(self):
        return self.paid_s + sum(self.now_s - replica.ordered_s for replica in self.rows if replica is not None)


@given(
    seed=st.integers(0, 2**32 - 1),
    rate=st.sampled_from([0.5, 3.0, 20.0]),
    slots=st.integers(1, 6),
    step_tokens=st.sampled_from([16, 100, 2048]),
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=12),
)
@settings(max_examples=60)
def test_the_fleet_serves_as_step_by_step(seed, rate, slots, step_tokens, counts):
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 80))
    trace = RequestTrace(
        "drawn",
        60.0,
        np.cumsum(rng.exponential(1 / rate, requests)),
        rng.integers(1, 400, requests),
        rng.integers(1, 60, requests),
    )
    kind = ReplicaKind(TIMES, slots, step_tokens)
    fast = SimulatedFleet(trace, kind, lead_s=2.0, replicas=2)
    slow = SteppedFleet(trace, kind, lead_s=2.0, replicas=2)
    end_s = 0.0
    for number in [*counts, 3]:
        end_s += float(rng.uniform(0.1, 6.0))
        for fleet in (fast, slow):
            fleet.advance(end_s)
            fleet.scale(number)
    for fleet in (fast, slow):
        fleet.advance(end_s + 1000)
    assert fast.starts == slow.starts
    assert fast.replica_seconds() == pytest.approx(slow.replica_seconds())
    assert fast.state.first == pytest.approx([request["first"] for request in slow.requests])
    assert fast.state.finished == pytest.approx([request["finished"] for request in slow.requests])
    assert not np.isnan(fast.state.finished).any()


def test_the_fleet_says_what_waits_runs_and_costs():
    trace = RequestTrace("three", 10.0, np.array([1.0, 1.0, 1.0]), np.full(3, 50), np.full(3, 40))
    fleet = SimulatedFleet(trace, ReplicaKind(TIMES, 1, 100), lead_s=4.0, replicas=1)
    assert fleet.advance(10.0, stop_at_wait=True) == 1.0
    assert fleet.scale(2) == 2
    fleet.advance(1.5)
    seen = fleet.observe()
    assert (seen.waiting, seen.running, seen.serving, seen.starting) == (2, 1, 1, 1)
    assert seen.oldest_wait_s == 0.5
    assert fleet.scale(1) == 1
    fleet.advance(5.5)
    assert fleet.replica_seconds() == 5.5 + 0.5
    late, slow = fleet.missed(ttft_s=0.5, itl_s=0.01)
    assert list(late) == [False, True, True]
    assert list(slow) == [True, False, False]
