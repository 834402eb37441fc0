"""The plan of hindsight is the cheapest there is, compared with a search through all plans."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.scaling.fleet import ReplicaKind, RequestTrace
from benchmarks.support.scaling.hindsight import FluidLoad, cheapest_plan, fluid_load, plan_at
from maitred.core.replica import StepTimes

MOST = 3
LOADS = st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.3, 2.0, 2.9]), min_size=1, max_size=6)
LEADS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.5, 7.0])


def every_plan(load, lead_s, least):
    """Cost and share of misses of every plan."""
    for replicas in itertools.product(range(least, MOST + 1), repeat=len(load.replicas)):
        starts = sum(max(0, b - a) for a, b in itertools.pairwise(replicas))
        missed = sum(
            requests * max(0.0, needed - there) / needed
            for requests, needed, there in zip(load.requests, load.replicas, replicas, strict=True)
            if needed
        )
        yield sum(replicas) + lead_s * starts, missed / max(1.0, load.requests.sum())


@given(replicas=LOADS, lead_s=LEADS, least=st.integers(0, 1), data=st.data())
def test_no_plan_costs_less(replicas, lead_s, least, data):
    few = st.lists(st.integers(0, 9), min_size=len(replicas), max_size=len(replicas))
    load = FluidLoad(np.array(replicas), np.array(data.draw(few), float))
    # A second without requests has nothing to miss, so its load may be left out.
    plans = list(every_plan(load, lead_s, least))
    without_misses = cheapest_plan(load, lead_s, least=least)
    assert without_misses.missed == 0
    assert without_misses.replica_s == pytest.approx(min(cost for cost, missed in plans if missed <= 1e-12))
    price = data.draw(st.sampled_from([0.05, 0.3, 1.0, 4.0]))
    plan = plan_at(load, lead_s, price, least=least)
    requests = max(1.0, load.requests.sum())
    cheapest = min(cost + price * missed * requests for cost, missed in plans)
    assert plan.replica_s + price * plan.missed * requests == pytest.approx(cheapest)


@given(replicas=LOADS, lead_s=LEADS, missed=st.sampled_from([0.01, 0.1, 0.3]))
def test_the_bound_holds_for_the_allowed_misses(replicas, lead_s, missed):
    load = FluidLoad(np.array(replicas), np.ones(len(replicas)))
    plan = cheapest_plan(load, lead_s, missed=missed)
    least = min(cost for cost, share in every_plan(load, lead_s, 0) if share <= missed + 1e-12)
    assert plan.missed <= missed
    assert plan.least_replica_s <= least + 1e-6
    assert plan.replica_s >= least - 1e-6


def test_a_gap_is_bridged_if_it_is_shorter_than_a_start():
    load = FluidLoad(np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]), np.ones(8))
    plan = cheapest_plan(load, 2.5)
    assert list(plan.replicas) == [1, 1, 1, 1, 0, 0, 0, 1]
    assert (plan.starts, plan.replica_s) == (1, 5 + 2.5)


def test_the_load_of_a_trace_is_what_its_requests_hold():
    # Four slots, all taken: a step of 0.1 s. Ten steps from 0.5 s on hold a quarter of a replica for a second.
    kind = ReplicaKind(StepTimes(fixed_s=0.1), 4, 100)
    trace = RequestTrace("one", 3.0, np.array([0.5]), np.array([50]), np.array([9]))
    load = fluid_load(trace, kind)
    assert load.replicas == pytest.approx([0.125, 0.125, 0.0])
    assert list(load.requests) == [1, 0, 0]
    delayed = fluid_load(trace, kind, delay_s=1)
    assert delayed.replicas == pytest.approx([0.0625, 0.125, 0.0625])
