import pytest

from maitred.core.request import WaitCause
from maitred.engine.scheduler.wait_clock import WaitClock


def advance(clock, now_s, cause):
    clock.advance(now_s)
    clock.cause = cause


def test_time_counts_for_the_reason_of_its_day():
    clock = WaitClock()
    advance(clock, 10.0, WaitCause.SLOTS)
    arrival = clock.arrival()
    advance(clock, 11.0, WaitCause.KV_FULL)
    advance(clock, 13.0, WaitCause.PREFILL_BUDGET)
    advance(clock, 16.0, WaitCause.SLOTS)
    assert clock.on_admit(0, arrival) == {"slots": 1.0, "kv_full": 2.0, "prefill_budget": 3.0}


def test_who_came_between_two_plans_is_not_charged_for_the_time_before():
    clock = WaitClock()
    advance(clock, 10.0, WaitCause.SLOTS)
    clock.advance(10.75)
    arrival = clock.arrival()
    clock.advance(11.0)
    assert clock.on_admit(0, arrival) == {"slots": 0.25}


def test_nobody_who_is_admitted_at_once_has_waited():
    clock = WaitClock()
    clock.advance(5.0)
    assert clock.on_admit(0, clock.arrival()) == {}


def test_from_the_first_later_arrival_that_goes_first_it_is_the_share():
    clock = WaitClock()
    advance(clock, 1.0, WaitCause.SLOTS)
    early, late = clock.arrival(), clock.arrival()
    clock.advance(3.0)
    assert clock.on_admit(2, late) == {"slots": 2.0}
    clock.advance(7.0)
    assert clock.on_admit(1, early) == {"slots": 2.0, "tenant_share": 4.0}


def test_who_was_away_when_it_was_overtaken_waits_for_its_share_from_its_return():
    clock = WaitClock()
    advance(clock, 1.0, WaitCause.SLOTS)
    clock.on_admit(5, clock.arrival())
    clock.advance(4.0)
    back = clock.arrival()
    clock.advance(6.0)
    assert clock.on_admit(3, back) == {"tenant_share": 2.0}


def test_memory_is_bounded_and_order_of_arrival_stays_exact():
    clock = WaitClock()
    advance(clock, 1.0, WaitCause.SLOTS)
    oldest = clock.arrival()
    for key in range(1, 20_000):
        clock.advance(float(key + 1))
        assert clock.on_admit(key, clock.arrival()) == {}
    assert len(clock._latest) <= 4096
    waited = clock.on_admit(0, oldest)
    assert sum(waited.values()) == pytest.approx(20_000 - 1)
    assert waited["tenant_share"] > 15_000
