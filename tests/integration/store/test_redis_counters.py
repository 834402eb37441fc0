"""Counters on a real Redis: the rules of all counters, several gateways at once, and what leaves with a gateway."""

import asyncio
import random
import time
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from maitred.core.clock import SystemClock
from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationDenied, ReservationGranted
from maitred.core.errors import Bug
from maitred.store.counters.config import CountersConfig
from maitred.store.counters.memory import MemoryCounters
from maitred.store.counters.redis import RedisCounters
from maitred.store.counters.session import CounterMode
from maitred.testing.counters_conformance import CHECKS, CountersUnderTest, exercise_counters
from tests.support.servers.redis_server import redis_server


@pytest.fixture(scope="module")
def server():
    with redis_server() as server:
        yield server


class Time:
    """The machine's, and what was added to it."""

    def __init__(self):
        self.added_s = 0.0

    def monotonic_s(self):
        return time.monotonic() + self.added_s

    def wall_s(self):
        return time.time() + self.added_s

    async def advance(self, seconds):
        self.added_s += seconds


def config_of(server, **changes):
    changes = {"recovery_s": 0.0, "answer_timeout_s": 10.0, "namespace": uuid4().hex, **changes}
    return CountersConfig(url=server.url, **changes)


async def nothing_spent(counters):
    return {}


def budget(capacity, fixed, **changes):
    return LimitClaim(counter="budget", kind=CounterKind.BUDGET, capacity=capacity, fixed=fixed, **changes)


def pool(capacity, fixed):
    return LimitClaim(counter="pool", kind=CounterKind.POOL, capacity=capacity, fixed=fixed)


def bucket(capacity, fixed, refill_per_s=1e-6):
    return LimitClaim(
        counter="bucket", kind=CounterKind.BUCKET, capacity=capacity, fixed=fixed, refill_per_s=refill_per_s
    )


def reservation(lease, claims, output=0, least=None, lease_s=30.0):
    return Reservation(lease, claims, output, output if least is None else least, lease_s)


class AlwaysSliced(RedisCounters):
    """Takes slices before every call, so that a call meets counters whose room lies in its own slice."""

    async def reserve(self, reservation):
        self._session.note_use(reservation.claims)
        await self._session.renew_slices()
        return await super().reserve(reservation)

    async def settle(self, lease, amounts):
        await self._session.renew_slices()
        await super().settle(lease, amounts)

    async def read(self, claims):
        await self._session.renew_slices()
        return await super().read(claims)


@pytest.mark.parametrize("counters_class", [RedisCounters, AlwaysSliced])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_keeps_the_rules_of_all_counters(server, check, counters_class):
    @asynccontextmanager
    async def make():
        clock, spent, asked = Time(), {}, []

        async def spent_of(counters):
            asked.extend(counters)
            return {counter: spent[counter] for counter in counters if counter in spent}

        config = config_of(server, slice_share=0.3)
        async with counters_class(
            config, clock, "one", read_spent=spent_of, offset_s=lambda: clock.added_s
        ) as counters:
            yield CountersUnderTest(counters, clock.advance, clock.wall_s, spent, asked)
            assert counters.healthy, "Redis was not away at any time"

    await exercise_counters(make, check)


@pytest.mark.parametrize("seed", range(4))
async def test_counts_as_the_counters_in_memory_do(server, seed):
    """Any sequence of calls has the same answers."""
    clock, rng = Time(), random.Random(seed)
    ends_s = clock.wall_s() + 1e5

    def some_claims():
        choices = []
        for n in range(2):
            for kind in CounterKind:
                per_output = rng.choice([0, 1, 3])
                choices.append(
                    LimitClaim(
                        counter=f"{kind}-{n}",
                        kind=kind,
                        capacity=rng.choice([400, 500]),
                        fixed=rng.randint(0, 60),
                        per_output=per_output,
                        divisor=rng.choice([1, 1, 7]),
                        refill_per_s=1e-6 if kind is CounterKind.BUCKET else 0.0,
                        ends_s=ends_s if kind is CounterKind.BUDGET and n else None,
                        hard=rng.random() < 0.9,
                        clamps=rng.random() < 0.6,
                    )
                )
        return rng.sample(choices, rng.randint(0, 4))

    def seen(answer):
        readings = [(r.capacity, r.remaining, r.used, r.reserved) for r in answer.readings]
        if isinstance(answer, ReservationGranted):
            return answer.output, readings
        return answer.claim, answer.retry_after_s is None, readings

    async def spent(counters):
        return {counter: 35 for counter in counters if counter.endswith("1")}

    memory, leases = MemoryCounters(clock, spent), []
    config = config_of(server, slice_share=0.3)
    async with AlwaysSliced(config, clock, "one", read_spent=spent, offset_s=lambda: clock.added_s) as redis:
        for n in range(400):
            match rng.choice(["reserve", "reserve", "settle", "settle", "renew", "advance", "read"]):
                case "reserve":
                    output = rng.randint(0, 90)
                    asked = reservation(str(n), some_claims(), output, rng.randint(0, output))
                    answer = await redis.reserve(asked)
                    assert seen(answer) == seen(await memory.reserve(asked)), f"call {n}: {asked}"
                    if isinstance(answer, ReservationGranted):
                        leases.append(asked)
                case "settle" if leases:
                    asked = leases.pop(rng.randrange(len(leases))) if rng.random() < 0.9 else rng.choice(leases)
                    amounts = {claim.counter: rng.randint(0, 30) for claim in asked.claims if rng.random() < 0.8}
                    await redis.settle(asked.lease, amounts)
                    await memory.settle(asked.lease, amounts)
                case "renew" if leases:
                    some = [asked.lease for asked in rng.sample(leases, rng.randint(1, len(leases)))]
                    await redis.renew(some, 30.0)
                    await memory.renew(some, 30.0)
                case "advance":
                    await clock.advance(rng.choice([0.0, 1.0, 9.0]))
                case "read":
                    claims = some_claims()
                    assert seen(ReservationGranted(0, await redis.read(claims))) == seen(
                        ReservationGranted(0, await memory.read(claims))
                    )
        assert redis.healthy


@pytest.mark.parametrize("counters_class", [RedisCounters, AlwaysSliced])
async def test_gateways_that_race_overspend_nothing(server, counters_class):
    config = config_of(server, slice_share=0.02)
    capacity, rng = 200_000, random.Random(7)
    used, granted, denied = 0, 0, 0

    async with (
        counters_class(config, SystemClock(), "one", read_spent=nothing_spent) as one,
        counters_class(config, SystemClock(), "two", read_spent=nothing_spent) as two,
    ):

        async def client(name, counters):
            nonlocal used, granted, denied
            for n in range(100):
                lease = f"{name}-{n}"
                claims = [budget(capacity, rng.randint(1, 50), per_output=2, clamps=True), pool(60_000, 1)]
                answer = await counters.reserve(reservation(lease, claims, output=rng.randint(1, 400), least=1))
                if isinstance(answer, ReservationDenied):
                    denied += 1
                    continue
                granted += 1
                most = claims[0].amount(answer.output)
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
                amount = rng.randint(0, most)
                used += amount
                await counters.settle(lease, {"budget": amount})
                if rng.random() < 0.1:
                    await counters.settle(lease, {"budget": amount})

        async with asyncio.TaskGroup() as clients:
            for n in range(40):
                clients.create_task(client(str(n), (one, two)[n % 2]))
        readings = await one.read([budget(capacity, 0), pool(60_000, 0)])
        assert (readings[0].used, readings[0].reserved, readings[1].used) == (used, 0, 0)
        assert one.healthy
        assert two.healthy
    assert used <= capacity
    assert granted > 500
    assert denied > 100, "the budget must run out, or nothing raced for its end"


async def test_leases_and_slices_of_a_gateway_that_vanishes_expire(server):
    config = config_of(server, slice_share=0.2, slice_lease_s=5.0, absence_s=100.0)
    clock = Time()
    claims = [bucket(100, 10), pool(100, 10), budget(100, 10)]
    gone = RedisCounters(config, clock, "gone", read_spent=nothing_spent, offset_s=lambda: clock.added_s)
    await gone.__aenter__()
    assert isinstance(await gone.reserve(reservation("a", claims)), ReservationGranted)
    await gone._session.renew_slices()
    await gone._session._stop_upkeep()  # As `kill -9` does: Redis gets no message.
    await gone._session._link.close()

    async with RedisCounters(config, clock, "two", read_spent=nothing_spent, offset_s=lambda: clock.added_s) as two:
        assert [r.remaining for r in await two.read(claims)] == [70, 70, 72], "10 reserved, a fifth in the slices"
        await clock.advance(5.1)
        # Nobody can tell whether the gateway is dead or spent its slices where it was cut off.
        assert [r.remaining for r in await two.read(claims)] == [70, 90, 72]
        await clock.advance(25.0)
        assert [r.remaining for r in await two.read(claims)] == [70, 100, 72]
        await clock.advance(100.0)
        assert [r.remaining for r in await two.read(claims)] == [70, 100, 100]


async def test_closing_gives_slices_back(server):
    config = config_of(server, slice_share=0.2)
    async with RedisCounters(config, SystemClock(), "two", read_spent=nothing_spent) as two:
        async with RedisCounters(config, SystemClock(), "one", read_spent=nothing_spent) as one:
            await one.reserve(reservation("a", [pool(100, 10)]))
            await one._session.renew_slices()
            assert one.state().slices == 1
            assert (await two.read([pool(100, 0)]))[0].remaining == 70
            await one.settle("a", {})
        assert (await two.read([pool(100, 0)]))[0].remaining == 100


async def test_slices_vanish_as_a_budget_runs_out(server):
    async with RedisCounters(config_of(server), SystemClock(), "one", read_spent=nothing_spent) as one:
        for n, slices in enumerate((1, 1, 0)):
            answer = await one.reserve(reservation(str(n), [budget(1000, (500, 450, 50)[n])]))
            assert isinstance(answer, ReservationGranted)
            await one._session.renew_slices()
            assert one.state().slices == slices


async def test_a_lease_id_serves_once(server):
    async with RedisCounters(config_of(server), SystemClock(), "one", read_spent=nothing_spent) as one:
        await one.reserve(reservation("a", [pool(10, 1)]))
        with pytest.raises(Bug, match="used before"):
            await one.reserve(reservation("a", [pool(10, 1)]))


async def test_a_cancelled_reservation_leaves_nothing(server):
    async with RedisCounters(config_of(server), SystemClock(), "one", read_spent=nothing_spent) as one:
        calls = [asyncio.create_task(one.reserve(reservation(str(n), [pool(100, 1)]))) for n in range(50)]
        await asyncio.sleep(0.002)
        for call in calls:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for n, answer in enumerate(answers):
            if isinstance(answer, ReservationGranted):
                await one.settle(str(n), {})
        await one._session.report_pending()
        assert (await one.read([pool(100, 0)]))[0].remaining == 100
        assert one.state().mode is CounterMode.SHARED


async def test_an_empty_redis_waits_for_all_gateways_before_it_opens(server):
    started_s = time.monotonic()
    async with RedisCounters(config_of(server, recovery_s=0.3), SystemClock(), "one", read_spent=nothing_spent) as one:
        assert time.monotonic() - started_s >= 0.3
        assert one.healthy
        assert isinstance(await one.reserve(reservation("a", [pool(10, 1)])), ReservationGranted)
