"""The compiled fleet of `benchmarks.scaling` serves as a simulation step by step does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.scaling.fleet import ReplicaKind, RequestTrace, SimulatedFleet
from maitred.core.replica import StepTimes
from tests.support.stepped_fleet import SteppedFleet

TIMES = StepTimes(fixed_s=0.02, token_s=0.0001, context_token_s=1e-6, decode_s=0.0004, chunk_s=0.001, pair_s=1e-8)


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
