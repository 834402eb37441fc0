"""What requests took beyond their steps, and what it does to the capacity."""

import pytest

from maitred.core.replica import StepTimes
from maitred.scaling.capacity import ReplicaCapacity
from maitred.scaling.demand import FinishedWork, RequestMix
from maitred.scaling.slot_overhead import SlotOverhead

MIX = RequestMix(prompt_tokens=100, output_tokens=20)
CAPACITY = ReplicaCapacity(
    times=StepTimes(fixed_s=0.004, token_s=1e-4, decode_s=1e-3), max_sequences=8, kv_tokens=1_000_000
)


def finished(requests, overhead_s, running):
    itl_s = CAPACITY.times.fixed_s + running * CAPACITY.decode_s(MIX)
    tokens = 20.0 * requests
    return FinishedWork(requests=requests, output_tokens=tokens, slot_s=tokens * itl_s + requests * overhead_s)


@pytest.mark.parametrize("overhead_s", [0.0, 0.05, 0.7])
def test_the_time_beyond_the_steps_is_found(overhead_s):
    overhead = SlotOverhead()
    for running in (1, 4, 8, 2) * 50:
        work = finished(3, overhead_s, running)
        overhead.observe(work, CAPACITY, MIX, running=running, requests_per_s=0.0)
    assert overhead.mean_s == pytest.approx(overhead_s, abs=1e-9)


def test_it_follows_a_change_within_some_hundred_requests():
    overhead = SlotOverhead()
    for before_s in (0.0, 0.5):
        for _ in range(100):
            overhead.observe(finished(4, before_s, 4), CAPACITY, MIX, running=4, requests_per_s=0.0)
    assert overhead.mean_s == pytest.approx(0.5, rel=0.05)


def test_steps_that_bring_several_tokens_leave_no_time_below_zero():
    overhead = SlotOverhead()
    overhead.observe(finished(4, -0.05, 4), CAPACITY, MIX, running=4, requests_per_s=0.0)
    assert overhead.mean_s == 0.0


def test_nothing_that_has_ended_tells_nothing():
    overhead = SlotOverhead()
    overhead.observe(FinishedWork(), CAPACITY, MIX, running=4, requests_per_s=0.0)
    assert overhead.mean_s == 0.0


@pytest.mark.parametrize("overhead_s", [0.01, 0.3, 3.0])
def test_slots_are_full_at_the_rate_that_littles_law_tells(overhead_s):
    capacity = ReplicaCapacity(times=CAPACITY.times, max_sequences=8, kv_tokens=1_000_000, overhead_s=overhead_s)
    rate = capacity.requests_per_s(MIX, itl_s=10.0)
    itl_s = capacity.load(MIX, rate).itl_s
    assert rate * (MIX.output_tokens * itl_s + overhead_s) == pytest.approx(8)
    assert rate < CAPACITY.requests_per_s(MIX, itl_s=10.0)
