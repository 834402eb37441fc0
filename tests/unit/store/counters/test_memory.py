"""What is true of the counters in memory beyond what all counters promise: what they keep, and when they wait."""

import asyncio

import pytest

from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationDenied, ReservationGranted
from maitred.core.errors import StoreUnavailable
from maitred.store.counters.memory import MemoryCounters
from maitred.store.counters.table import LATE_SETTLE_S

MINUTE_S = 60.0
SOME_WALL_S = 1.7e9


class StoppedClock:
    def __init__(self):
        self.now_s = 1000.0

    def monotonic_s(self):
        return self.now_s

    def wall_s(self):
        return SOME_WALL_S + self.now_s


@pytest.fixture
def clock():
    return StoppedClock()


@pytest.fixture
def counters(clock):
    return MemoryCounters(clock)


def bucket(amount, *, counter="bucket", capacity=100, refill_per_s=1.0):
    return LimitClaim(counter, CounterKind.BUCKET, capacity, amount, refill_per_s=refill_per_s)


def pool(amount, *, counter="pool", capacity=100):
    return LimitClaim(counter, CounterKind.POOL, capacity, amount)


def budget(amount, *, counter="budget", capacity=100, ends_s=None):
    return LimitClaim(counter, CounterKind.BUDGET, capacity, amount, ends_s=ends_s)


def reservation(lease, *claims, lease_s=30.0):
    return Reservation(lease, claims, 0, 0, lease_s)


async def many_calls(counters, clock, calls, *, over_s=10 * MINUTE_S):
    """Each call has a look at some counters; nothing else does."""
    for _ in range(calls):
        clock.now_s += over_s / calls
        await counters.renew([], 1.0)


# --- what is kept ---------------------------------------------------------------------------------------------------


async def test_many_keys_leave_nothing_behind(counters, clock):
    keys = 10_000
    day_ends_s = clock.wall_s() + 86_400.0
    for key in range(keys):
        claims = [
            bucket(1, counter=f"requests:{key}"),
            pool(1, counter=f"running:{key}"),
            budget(5, counter=f"day:{key}", ends_s=day_ends_s),
        ]
        await counters.reserve(reservation(str(key), *claims, lease_s=86_400.0))
        await counters.settle(str(key), {f"requests:{key}": 1, f"day:{key}": 3})
    assert counters.size().ends < 200
    await many_calls(counters, clock, 3_000)
    assert counters.size().counters == keys, "budgets, until their window ends; full buckets and free pools are gone"
    clock.now_s += 86_400.0 + MINUTE_S
    await many_calls(counters, clock, 1_000)
    assert counters.size().counters == 0


async def test_what_is_looked_at_or_denied_is_not_kept(counters):
    await counters.read([bucket(1), pool(1), budget(1)])
    assert isinstance(await counters.reserve(reservation("a", bucket(1), pool(101))), ReservationDenied)
    assert (counters.size().counters, counters.size().leases) == (0, 0)


async def test_budgets_without_end_are_kept(counters, clock):
    await counters.reserve(reservation("a", budget(10)))
    await counters.settle("a", {"budget": 10})
    await many_calls(counters, clock, 100, over_s=1e8)
    assert (await counters.read([budget(0)]))[0].used == 10


async def test_an_expired_lease_is_forgotten_at_last(counters, clock):
    await counters.reserve(reservation("a", budget(10)))
    clock.now_s += 30.0 + LATE_SETTLE_S
    await counters.settle("a", {"budget": 10})
    assert (await counters.read([budget(0)]))[0].used == 0
    assert counters.size().expired == 0


async def test_counters_that_a_lease_holds_are_kept(counters, clock):
    ends_s = clock.wall_s() + 10.0
    claims = [bucket(10), pool(20), budget(30, ends_s=ends_s)]
    await counters.reserve(reservation("a", *claims, lease_s=1e6))
    await many_calls(counters, clock, 100)
    assert [(r.used, r.reserved) for r in await counters.read(claims)] == [(0, 0), (20, 0), (0, 30)]
    await counters.settle("a", {"bucket": 25, "budget": 35})
    assert [(r.used, r.reserved) for r in await counters.read(claims)] == [(15, 0), (0, 0), (35, 0)]


async def test_the_ends_of_settled_leases_are_not_kept(counters):
    for n in range(1000):
        await counters.reserve(reservation(f"long-{n}", pool(0), lease_s=1e6))
        await counters.reserve(reservation(f"short-{n}", pool(0), lease_s=1e6))
        await counters.settle(f"short-{n}", {})
    assert 1000 <= counters.size().ends <= 2100


async def test_renewing_leaves_one_note(counters, clock):
    await counters.reserve(reservation("a", pool(5)))
    for _ in range(100):
        clock.now_s += 20.0
        await counters.renew(["a"], 30.0)
    assert counters.size().ends == 1
    assert (await counters.read([pool(0)]))[0].used == 5


# --- exactness ------------------------------------------------------------------------------------------------------


async def test_a_wait_is_long_enough_and_no_longer(counters, clock):
    claim = bucket(7, capacity=50, refill_per_s=1000 / 61)
    for n in range(7):
        await counters.reserve(reservation(str(n), claim, lease_s=1e6))
    for n in range(500):
        started_s = clock.now_s
        denied = await counters.reserve(reservation(f"at-once-{n}", claim))
        assert isinstance(denied, ReservationDenied)
        clock.now_s = started_s + denied.retry_after_s - 1e-5
        assert isinstance(await counters.reserve(reservation(f"early-{n}", claim)), ReservationDenied)
        clock.now_s = started_s + denied.retry_after_s
        assert isinstance(await counters.reserve(reservation(f"in-time-{n}", claim, lease_s=1e6)), ReservationGranted)


async def test_watching_a_slow_bucket_does_not_stop_its_refill(counters, clock):
    claim = bucket(1, capacity=1, refill_per_s=1e-5)
    await counters.reserve(reservation("a", claim))
    await counters.settle("a", {"bucket": 1})
    clock.now_s += 99_999.0
    for n in range(10_000):
        clock.now_s += 0.00005
        assert isinstance(await counters.reserve(reservation(f"b-{n}", claim)), ReservationDenied)
    clock.now_s += 0.6
    assert isinstance(await counters.reserve(reservation("c", claim)), ReservationGranted)


async def test_a_changed_refill_holds_from_now_on(counters, clock):
    await counters.reserve(reservation("a", bucket(100, refill_per_s=1.0), lease_s=1e6))
    clock.now_s += 10.0
    assert (await counters.read([bucket(0, refill_per_s=5.0)]))[0].remaining == 10
    clock.now_s += 10.0
    assert (await counters.read([bucket(0, refill_per_s=5.0)]))[0].remaining == 60


# --- faults of ours -------------------------------------------------------------------------------------------------


async def test_a_lease_is_reserved_once(counters, clock):
    await counters.reserve(reservation("a", pool(1)))
    with pytest.raises(ValueError, match="exists"):
        await counters.reserve(reservation("a", pool(1)))
    clock.now_s += 31.0
    with pytest.raises(ValueError, match="exists"):
        await counters.reserve(reservation("a", pool(1)))
    assert (await counters.read([pool(0)]))[0].used == 0


async def test_the_counters_of_a_reservation_are_distinct(counters):
    with pytest.raises(ValueError, match="same counter"):
        await counters.reserve(reservation("a", pool(60), pool(60)))
    assert (await counters.read([pool(0)]))[0].used == 0


async def test_claims_may_change_after_they_were_reserved(counters):
    claims = [pool(10), budget(10)]
    await counters.reserve(Reservation("a", claims, 0, 0, 30.0))
    claims.clear()
    await counters.settle("a", {"budget": 4})
    assert [r.used for r in await counters.read([pool(0), budget(0)])] == [0, 4]


# --- waiting for what was spent -------------------------------------------------------------------------------------


class SlowLedger:
    """Answers when its event is set."""

    def __init__(self):
        self.asked = []
        self.answers = asyncio.Queue()

    async def spent(self, counters):
        self.asked.append(list(counters))
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def started(coroutine):
    task = asyncio.ensure_future(coroutine)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_known_budgets_wait_for_nothing(clock):
    ledger = SlowLedger()
    counters = MemoryCounters(clock, ledger.spent)
    ledger.answers.put_nowait({"budget": 7})
    await counters.read([budget(0)])
    waiting = await started(counters.reserve(reservation("slow", budget(1, counter="other"))))
    for coroutine in (
        counters.reserve(reservation("a", bucket(1), pool(1), budget(1))),
        counters.read([budget(1)]),
        counters.renew(["a"], 1.0),
        counters.settle("a", {}),
    ):
        with pytest.raises(StopIteration):
            coroutine.send(None)
    assert not waiting.done()
    ledger.answers.put_nowait({})
    assert isinstance(await waiting, ReservationGranted)


async def test_those_who_meet_a_budget_together_ask_once(clock):
    ledger = SlowLedger()
    counters = MemoryCounters(clock, ledger.spent)
    both = (budget(10, counter="day"), budget(10, counter="month"))
    first = await started(counters.reserve(reservation("a", both[0])))
    second = await started(counters.reserve(reservation("b", *both)))
    third = await started(counters.reserve(reservation("c", *both)))
    assert ledger.asked == [["day"], ["month"]]
    ledger.answers.put_nowait({"day": 75})
    assert isinstance(await first, ReservationGranted)
    assert not second.done()
    ledger.answers.put_nowait({"month": 1})
    assert [type(await task) for task in (second, third)] == [ReservationGranted, ReservationDenied]
    assert [(r.used, r.reserved) for r in await counters.read(both)] == [(75, 20), (1, 10)]


async def test_a_budget_that_nobody_can_tell_of_is_refused_to_all_who_wait(clock):
    ledger = SlowLedger()
    counters = MemoryCounters(clock, ledger.spent)
    waiting = [await started(counters.reserve(reservation(str(n), pool(1), budget(1)))) for n in range(3)]
    ledger.answers.put_nowait(StoreUnavailable())
    for task in waiting:
        with pytest.raises(StoreUnavailable):
            await task
    assert ledger.asked == [["budget"]]
    assert (await counters.read([pool(0)]))[0].used == 0
    ledger.answers.put_nowait({"budget": 99})
    assert isinstance(await counters.reserve(reservation("a", budget(1))), ReservationGranted)


async def test_one_who_gives_up_does_not_take_the_others_along(clock):
    ledger = SlowLedger()
    counters = MemoryCounters(clock, ledger.spent)
    first = await started(counters.reserve(reservation("a", budget(1))))
    second = await started(counters.reserve(reservation("b", budget(1))))
    third = await started(counters.reserve(reservation("c", budget(1))))
    for task in (first, third):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    ledger.answers.put_nowait({"budget": 50})
    assert isinstance(await second, ReservationGranted)
    assert [(r.used, r.reserved) for r in await counters.read([budget(0)])] == [(50, 1)]


async def test_a_claim_on_one_budget_twice_asks_once(clock):
    ledger = SlowLedger()
    counters = MemoryCounters(clock, ledger.spent)
    ledger.answers.put_nowait({"budget": 50})
    assert [r.used for r in await counters.read([budget(0), budget(0)])] == [50, 50]
    assert ledger.asked == [["budget"]]
