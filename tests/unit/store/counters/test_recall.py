"""Buckets in memory begin where the process before left them."""

import math
import time

import pytest

from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationDenied, ReservationGranted
from maitred.store.counters.memory import MemoryCounters

REFILL_S = 60.0
EVER_S = -math.inf


class WallClock:
    """Its two times have nothing to do with each other."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic_s(self):
        return 5.0 + self.now_s

    def wall_s(self):
        return 1.7e9 + self.now_s


@pytest.fixture
def clock():
    return WallClock()


@pytest.fixture
def counters(clock):
    return MemoryCounters(clock)


def bucket(amount=0, *, counter="rate", capacity=60, refill_per_s=1.0):
    return LimitClaim(counter, CounterKind.BUCKET, capacity, amount, refill_per_s=refill_per_s)


def ago(clock, *taken):
    """Pairs of seconds before now, and amounts."""
    return [(clock.wall_s() - seconds, amount) for seconds, amount in taken]


async def remaining(counters, claim):
    return (await counters.read([claim]))[0].remaining


async def test_what_was_taken_is_missing_and_comes_back_at_the_rate(counters, clock):
    counters.restore_buckets({"rate": ago(clock, (20, 50))}, EVER_S, REFILL_S)
    assert await remaining(counters, bucket()) == 30
    denied = await counters.reserve(Reservation("a", [bucket(40)], 0, 0, 30.0))
    assert isinstance(denied, ReservationDenied)
    assert denied.retry_after_s == pytest.approx(10, abs=1e-3)
    clock.now_s += denied.retry_after_s
    assert isinstance(await counters.reserve(Reservation("b", [bucket(40)], 0, 0, 30.0)), ReservationGranted)


async def test_a_bucket_does_not_save_up_while_it_is_full(counters, clock):
    counters.restore_buckets({"rate": ago(clock, (100, 10), (5, 60))}, EVER_S, REFILL_S)
    assert await remaining(counters, bucket()) == 5


async def test_it_is_met_late_as_if_it_had_been_met_at_once(counters, clock):
    counters.restore_buckets({"rate": ago(clock, (0, 60))}, EVER_S, REFILL_S)
    clock.now_s += 25
    assert await remaining(counters, bucket()) == 25


async def test_more_than_there_was_leaves_less_than_nothing(counters, clock):
    counters.restore_buckets({"rate": ago(clock, (10, 60), (10, 60))}, EVER_S, REFILL_S)
    assert await remaining(counters, bucket()) == -50


async def test_what_seems_to_lie_ahead_was_taken_now(counters, clock):
    counters.restore_buckets({"rate": ago(clock, (-1000, 60))}, EVER_S, REFILL_S)
    assert await remaining(counters, bucket()) == 0
    clock.now_s += 10
    assert await remaining(counters, bucket()) == 10


async def test_of_what_is_not_known_all_was_taken(counters, clock):
    counters.restore_buckets({"rate": ago(clock, (10, 5))}, clock.wall_s() - 20, REFILL_S)
    assert await remaining(counters, bucket()) == 15
    assert await remaining(counters, bucket(counter="other")) == 20
    assert await remaining(counters, bucket(counter="small", capacity=15)) == 15
    assert counters.size().counters == 2
    clock.now_s += 10
    assert await remaining(counters, bucket(counter="another")) == 30


async def test_others_begin_full(counters, clock):
    counters.restore_buckets({"rate": ago(clock, (0, 60))}, EVER_S, REFILL_S)
    assert await remaining(counters, bucket(counter="other")) == 60


async def test_it_counts_once(counters, clock):
    counters.restore_buckets({"rate": ago(clock, (0, 10))}, EVER_S, REFILL_S)
    assert isinstance(await counters.reserve(Reservation("a", [bucket(20)], 0, 0, 30.0)), ReservationGranted)
    await counters.settle("a", {"rate": 15})
    assert await remaining(counters, bucket()) == 35
    for _ in range(20):
        clock.now_s += 60
        await counters.renew([], 1.0)
    assert counters.size().counters == 0
    assert await remaining(counters, bucket()) == 60


async def test_looking_keeps_it(counters, clock):
    counters.restore_buckets({"rate": ago(clock, (0, 60))}, EVER_S, REFILL_S)
    for _ in range(3):
        assert await remaining(counters, bucket()) == 0
    assert isinstance(await counters.reserve(Reservation("a", [bucket(1)], 0, 0, 30.0)), ReservationDenied)
    assert counters.size().counters == 1


async def test_a_settlement_of_an_expired_lease_finds_it(counters, clock):
    assert isinstance(await counters.reserve(Reservation("a", [bucket(1)], 0, 0, 1.0)), ReservationGranted)
    for _ in range(4):
        clock.now_s += 100
        await counters.renew([], 1.0)
    assert counters.size().counters == 0
    counters.restore_buckets({"rate": ago(clock, (0, 10))}, EVER_S, REFILL_S)
    await counters.settle("a", {"rate": 5})
    assert await remaining(counters, bucket()) == 45


async def test_what_is_never_met_is_forgotten_once_every_bucket_is_full(counters, clock):
    counters.restore_buckets({f"rate-{n}": ago(clock, (0, 60)) for n in range(1000)}, EVER_S, REFILL_S)
    clock.now_s += 2 * REFILL_S
    assert await remaining(counters, bucket(counter="rate-7")) == 60
    assert counters.size().counters == 0


async def test_very_many_are_taken_over_quickly(counters, clock):
    pairs = ago(clock, *((600 - second, 1) for second in range(600)))
    began_s = time.process_time()
    counters.restore_buckets({f"rate-{n}": pairs for n in range(1000)}, EVER_S, REFILL_S)
    assert time.process_time() - began_s < 1
    began_s = time.process_time()
    assert await remaining(counters, bucket(counter="rate-7", refill_per_s=0.9)) == 0
    assert time.process_time() - began_s < 0.05
