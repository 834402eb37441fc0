"""What a gateway spends, and the part of a counter that it holds in advance for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.counters import CounterKind, LimitClaim
from maitred.store.counters.spending import MEMORY_S, SpendingMeter, slice_share

BUDGET = LimitClaim("budget", CounterKind.BUDGET, 100_000, 1)
RATE = LimitClaim("rate", CounterKind.BUCKET, 6_000, 1, refill_per_s=100.0)
POOL = LimitClaim("pool", CounterKind.POOL, 100, 1)


def share_of(claim, per_s, *, remaining=100_000, least=0.02, most=0.2):
    return slice_share(claim, per_s, remaining, use_s=270.0, least=least, most=most)


@given(st.floats(0.1, 1_000.0), st.integers(1, 20))
def test_a_steady_pace_is_measured_after_some_minutes(amount_per_s, every_s):
    meter, now_s = SpendingMeter(), 0.0
    while now_s < 6 * MEMORY_S:
        meter.observe("budget", amount_per_s * every_s, now_s)
        now_s += every_s
    assert meter.per_s("budget", now_s) == pytest.approx(amount_per_s, rel=0.25)


def test_a_pace_falls_when_nothing_is_spent():
    meter = SpendingMeter()
    meter.observe("budget", 600, 0.0)
    assert meter.per_s("budget", 0.0) == pytest.approx(600 / MEMORY_S)
    assert meter.per_s("budget", 10 * MEMORY_S) < 0.01
    assert meter.per_s("rate", 0.0) == 0.0
    meter.forget("budget")
    assert len(meter) == 0


def test_of_a_budget_it_is_what_is_spent_until_the_slice_cannot_be_used_any_more():
    assert share_of(BUDGET, 20.0) == pytest.approx(20.0 * 270.0 / 100_000)
    assert share_of(BUDGET, 20.0, remaining=50_000) == pytest.approx(2 * 20.0 * 270.0 / 100_000)


def test_of_a_rate_it_is_the_part_that_is_used_and_a_margin():
    assert share_of(RATE, 10.0) == pytest.approx(0.125)


@given(
    st.sampled_from([BUDGET, RATE, POOL]),
    st.floats(0.0, 1e9),
    st.integers(-10, 100_000),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
)
def test_it_is_between_the_least_and_the_most_and_grows_with_the_pace(claim, per_s, remaining, least, more):
    most = min(0.5, least + more)
    share = share_of(claim, per_s, remaining=remaining, least=least, most=most)
    assert least <= share <= most
    assert share <= share_of(claim, 2 * per_s, remaining=remaining, least=least, most=most)


def test_who_holds_nothing_in_advance_holds_nothing_however_much_it_spends():
    assert share_of(BUDGET, 1e6, least=0.0) == 0.0


def test_what_runs_at_one_time_is_not_spent():
    assert share_of(POOL, 1e6) == 0.02
