"""The clock that stands still while its process does."""

import pytest

from maitred.app.runtime import PauseFreeClock
from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationDenied, ReservationGranted
from maitred.store.counters.memory import MemoryCounters
from tests.support.clock import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


def test_a_clock_that_ticks_in_time_loses_nothing(clock):
    steady = PauseFreeClock(clock, longest_s=10)
    before_s = steady.monotonic_s()
    for _ in range(100):
        clock.now_s += 9.5
        steady.tick()
    assert steady.monotonic_s() - before_s == pytest.approx(950)


def test_a_pause_counts_as_the_time_between_two_ticks_and_the_calendar_goes_on(clock):
    steady = PauseFreeClock(clock, longest_s=10)
    before_s, wall_s = steady.monotonic_s(), steady.wall_s()
    clock.now_s += 3600
    assert steady.monotonic_s() - before_s == pytest.approx(10)
    steady.tick()
    assert steady.monotonic_s() - before_s == pytest.approx(10)
    assert steady.wall_s() - wall_s == pytest.approx(3600)
    clock.now_s += 1
    assert steady.monotonic_s() - before_s == pytest.approx(11)


async def test_a_busy_event_loop_gives_nobody_what_running_requests_hold(clock):
    """Thousands of requests may be handled in a row, before the loop comes to the renewal of the leases."""
    counters = MemoryCounters(PauseFreeClock(clock, longest_s=10))
    budget = LimitClaim("usd_total|*|*|total", CounterKind.BUDGET, 100, 80, 0)
    assert isinstance(await counters.reserve(Reservation("running", [budget], 0, 0, lease_s=30)), ReservationGranted)
    for number in range(60):
        clock.now_s += 1
        denied = await counters.reserve(Reservation(f"next-{number}", [budget], 0, 0, lease_s=30))
        assert isinstance(denied, ReservationDenied)


async def test_after_a_pause_nobody_is_given_what_running_requests_hold(clock):
    counters = MemoryCounters(PauseFreeClock(clock, longest_s=10))
    budget = LimitClaim("usd_total|*|*|total", CounterKind.BUDGET, 100, 80, 0)
    assert isinstance(await counters.reserve(Reservation("running", [budget], 0, 0, lease_s=30)), ReservationGranted)
    clock.now_s += 60  # stopped: neither a request nor a renewal came
    assert isinstance(await counters.reserve(Reservation("next", [budget], 0, 0, lease_s=30)), ReservationDenied)
