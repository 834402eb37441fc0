"""Redis goes away while gateways count: what they give meanwhile is bounded, and it is normal by itself afterwards."""

import asyncio
import random
import time
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
import uvloop

from maitred.core.clock import SystemClock
from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationDenied, ReservationGranted
from maitred.core.errors import StoreUnavailable
from maitred.redis.link import LinkLost
from maitred.store.counters.config import CountersConfig
from maitred.store.counters.redis import RedisCounters
from maitred.store.counters.session import CounterMode
from tests.support.clock import FakeClock
from tests.support.servers.redis_server import redis_server

TIMEOUT_S = 1.0
"""For an answer, where one that does not come is what a test is about."""
PATIENCE_S = 10.0
"""For an answer elsewhere: the most that the setting takes. A crowded machine can need more than a second."""
LONGEST_CALL_S = 300.0
"""What takes longer hangs."""


@pytest.fixture
def server():
    with redis_server() as server:
        yield server


def budget(capacity, fixed=0, **changes):
    return LimitClaim(counter="budget", kind=CounterKind.BUDGET, capacity=capacity, fixed=fixed, **changes)


def pool(capacity, fixed=0):
    return LimitClaim(counter="pool", kind=CounterKind.POOL, capacity=capacity, fixed=fixed)


def bucket(capacity, fixed=0, refill_per_s=1e-6):
    return LimitClaim(
        counter="bucket", kind=CounterKind.BUCKET, capacity=capacity, fixed=fixed, refill_per_s=refill_per_s
    )


class Gateways:
    """Several that share one Redis and one ledger, which knows at once what was used."""

    def __init__(self, server, *, clock=None, offset_s=lambda: 0.0, **changes):
        self.offset_s = offset_s
        self.clock = clock or SystemClock()
        changes = {"recovery_s": 0.3, "probe_interval_s": 0.05, "answer_timeout_s": PATIENCE_S, **changes}
        self.config = CountersConfig(url=server.url, namespace=uuid4().hex, **changes)
        self.ledger = {}

    async def spent(self, counters):
        return {counter: self.ledger[counter] for counter in counters if counter in self.ledger}

    def open(self, name):
        return RedisCounters(self.config, self.clock, name, read_spent=self.spent, offset_s=self.offset_s)

    @asynccontextmanager
    async def two(self):
        async with self.open("one") as one, self.open("two") as two:
            yield one, two


def reservation(lease, *claims, output=0, least=None, lease_s=30.0):
    return Reservation(lease, claims, output, output if least is None else least, lease_s)


async def until(condition, timeout_s=300.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is another process
            await asyncio.sleep(0.01)


async def timed(call):
    started_s = time.monotonic()
    try:
        return await call
    finally:
        assert time.monotonic() - started_s < LONGEST_CALL_S


async def test_a_race_across_a_kill_and_an_empty_restart_stays_within_the_slices(server):
    capacity, share = 2_000_000, 0.02
    gateways = Gateways(server, slice_share=share)
    rng, used, lent, stop = random.Random(11), 0, 0, False

    async with gateways.two() as (one, two):

        async def client(name, counters):
            nonlocal used, lent
            n = 0
            while not stop:
                lease, n = f"{name}-{n}", n + 1
                claim = budget(capacity, rng.randint(1, 20), per_output=3, clamps=True)
                try:
                    asked = reservation(lease, claim, pool(100_000, 1), output=rng.randint(1, 300), least=1)
                    answer = await timed(counters.reserve(asked))
                except StoreUnavailable:
                    await asyncio.sleep(0.02)
                    continue
                if isinstance(answer, ReservationDenied):
                    await asyncio.sleep(0.02)
                    continue
                lent += not counters.healthy
                await asyncio.sleep(rng.random() * 0.02)
                amount = rng.randint(0, claim.amount(answer.output))
                used += amount
                gateways.ledger["budget"] = gateways.ledger.get("budget", 0) + amount
                await timed(counters.settle(lease, {"budget": amount}))

        async with asyncio.TaskGroup() as clients:
            for n in range(20):
                clients.create_task(client(str(n), (one, two)[n % 2]))
            for _ in range(2):
                await asyncio.sleep(1.3)
                await until(lambda: one.state().slices == two.state().slices == 2)  # of the budget and the pool
                server.kill()
                lent_before = lent
                await until(lambda: not one.healthy and not two.healthy)
                await until(lambda lent_before=lent_before: lent > lent_before + 5)  # the slices are tried
                server.start()
                await until(lambda: one.healthy and two.healthy)
            await asyncio.sleep(0.5)
            await until(lambda: one.healthy and two.healthy)
            stop = True

        for counters in (one, two) * 2:
            used += await spend_all(counters, capacity)
        budget_reading, pool_reading = await one.read([budget(capacity), pool(100_000)])
        assert budget_reading.reserved == 0
        assert pool_reading.used == 0
        slices = 2 * share * capacity
        assert used <= budget_reading.used, "nothing is forgotten"
        assert used <= capacity + slices
        assert one.state().unsettled == two.state().unsettled == 0


async def test_slices_are_all_there_is_while_redis_is_away(server):
    gateways = Gateways(server, slice_share=0.1)
    claims = [budget(1000, 10), pool(1000, 10), bucket(1000, 10)]
    async with gateways.two() as (one, two):
        for lease, counters in (("first", one), ("second", two)):
            await counters.reserve(reservation(lease, *claims))
            await counters._session.renew_slices()
            assert counters.state().slices == 3
        server.kill()
        granted = {one: 0, two: 0}
        for counters in (one, two):
            for n in range(30):
                try:
                    answer = await timed(counters.reserve(reservation(f"{n}-{uuid4().hex}", *claims)))
                    assert isinstance(answer, ReservationGranted)
                    granted[counters] += 1
                except StoreUnavailable:
                    continue
        assert granted[one] == 9, "a tenth of the 990 that remained of the budget"
        assert granted[two] == 8, "a tenth of what the first left"
        assert one.state().mode is CounterMode.AWAY
        with pytest.raises(StoreUnavailable, match="away") as refusal:
            await one.reserve(reservation("other", LimitClaim("other", CounterKind.POOL, 10, 1)))
        assert refusal.value.retry_after_s is not None
        assert isinstance(await one.reserve(reservation("free")), ReservationGranted)
        soft = LimitClaim("soft", CounterKind.BUDGET, 10, 1, hard=False)
        assert isinstance(await one.reserve(reservation("soft", soft)), ReservationGranted)


async def test_what_a_slice_lent_returns_to_it(server):
    gateways = Gateways(server, slice_share=0.1)
    async with gateways.open("one") as one:
        claims = [budget(1000, 100), pool(1000, 100)]
        await one.reserve(reservation("first", budget(1000, 0), pool(1000, 0)))
        await one._session.renew_slices()
        server.kill()
        await until(lambda: not one.healthy)
        for n in range(5):
            assert isinstance(await one.reserve(reservation(str(n), *claims)), ReservationGranted)
            with pytest.raises(StoreUnavailable):
                await one.reserve(reservation("too-much", pool(1000, 1)))
            await one.settle(str(n), {})
            await one.settle(str(n), {})
        clamped = budget(1000, 0, per_output=1, clamps=True)
        answer = await one.reserve(reservation("clamped", clamped, output=500, least=1))
        assert answer.output == 100
        await one.settle("clamped", {"budget": 100})
        with pytest.raises(StoreUnavailable):
            await one.reserve(reservation("spent", budget(1000, 1)))


async def test_rates_go_on_at_their_share(server):
    clock = FakeClock()
    gateways = Gateways(server, clock=clock, slice_share=0.1)
    async with gateways.open("one") as one:
        await one.reserve(reservation("first", bucket(100, 1, refill_per_s=100.0)))
        await one._session.renew_slices()
        server.kill()
        granted = 0
        for _ in range(100):
            clock.now_s += 0.01
            for _ in range(2):
                try:
                    await one.reserve(reservation(uuid4().hex, bucket(100, 1, refill_per_s=100.0)))
                    granted += 1
                except StoreUnavailable:
                    break
        assert 19 <= granted <= 21, "10 that it held, 10 in a second"


async def test_leases_and_charges_survive_a_redis_that_forgets(server):
    gateways = Gateways(server, slice_share=0.1)
    claims = [budget(1000, 100), pool(100, 40)]
    async with gateways.two() as (one, two):
        await one.reserve(reservation("charged", *claims))
        await one.settle("charged", {"budget": 70})
        await one.reserve(reservation("settled-away", *claims))
        await one.reserve(reservation("runs", *claims))
        await one._session.renew_slices()
        server.kill()
        await until(lambda: not one.healthy and not two.healthy)
        assert isinstance(
            await one.reserve(reservation("from-slice", budget(1000, 20), pool(100, 1))), ReservationGranted
        )
        await one.settle("settled-away", {"budget": 55})
        await one.renew(["runs", "from-slice"], 60.0)
        server.start()
        await until(lambda: one.healthy and two.healthy)
        for counters in (one, two):
            readings = await counters.read([budget(1000), pool(100)])
            assert (readings[0].used, readings[0].reserved, readings[1].used) == (125, 120, 41)
        await one.settle("runs", {"budget": 5})
        await one.settle("from-slice", {"budget": 6})
        await one.settle("from-slice", {"budget": 6})
        readings = await two.read([budget(1000), pool(100)])
        assert (readings[0].used, readings[0].reserved, readings[1].used) == (136, 0, 0)


async def test_the_database_counts_where_redis_and_gateways_know_less(server):
    gateways = Gateways(server)
    gateways.ledger["budget"] = 300
    async with gateways.open("one") as one:
        assert (await one.read([budget(1000)]))[0].used == 300
        gateways.ledger["budget"] = 450  # Another gateway's, which died with what it knew.
        server.kill()
        server.start()
        await until(lambda: not one.healthy)
        await until(lambda: one.healthy)
        assert (await one.read([budget(1000)]))[0].used == 450


async def test_a_redis_that_hangs_holds_nobody_up(server):
    gateways = Gateways(server, slice_share=0.1)
    async with gateways.open("one") as one:
        await one.reserve(reservation("held", budget(100_000, 10), pool(10_000, 10)))
        await one._session.renew_slices()
        one._session._link._timeout_s = TIMEOUT_S
        server.freeze()
        try:
            started_s = time.monotonic()
            calls = [one.reserve(reservation(str(n), budget(100_000, 10), pool(10_000, 10))) for n in range(50)]
            answers = await asyncio.gather(*(timed(call) for call in calls), timed(one.settle("held", {"budget": 1})))
            assert all(isinstance(answer, ReservationGranted) for answer in answers[:-1])
            assert time.monotonic() - started_s >= TIMEOUT_S / 2
            started_s = time.monotonic()
            for n in range(50, 90):
                await one.reserve(reservation(str(n), budget(100_000, 10), pool(10_000, 10)))
            assert time.monotonic() - started_s < 20 * TIMEOUT_S, "only the first wait"
            for n in range(90):
                await one.settle(str(n), {"budget": 3})
        finally:
            server.thaw()
        await until(lambda: one.healthy)
        # What was sent before it hung is carried out late, and does no harm.
        await asyncio.sleep(0.1)
        readings = await one.read([budget(100_000), pool(10_000)])
        assert (readings[0].used, readings[0].reserved, readings[1].used) == (271, 0, 0)


async def spend_all(counters, capacity):
    """Asks for as much as there is, until nothing is given; returns what was used."""
    used = 0
    while True:
        lease, claim = uuid4().hex, budget(capacity, 0, per_output=1, clamps=True)
        try:
            answer = await counters.reserve(reservation(lease, claim, output=capacity, least=1))
        except StoreUnavailable:
            return used
        if isinstance(answer, ReservationDenied):
            return used
        used += answer.output
        await counters.settle(lease, {"budget": answer.output})


@pytest.mark.parametrize("expires", [False, True], ids=["its slice is kept", "its slice expires"])
async def test_a_gateway_that_is_cut_off_alone_oversteps_nothing(server, expires):
    added_s = 0.0
    gateways = Gateways(server, slice_share=0.1, slice_lease_s=60.0, offset_s=lambda: added_s)
    async with gateways.two() as (cut_off, other):
        await cut_off.reserve(reservation("first", budget(1000)))
        await cut_off._session.renew_slices()
        link = cut_off._session._link
        send = link.send

        async def unreachable(*commands):
            raise LinkLost("no route")

        link.send = unreachable
        assert await spend_all(cut_off, 1000) == 100
        if expires:
            added_s = 61.0
        assert await spend_all(other, 1000) == 900
        assert await spend_all(cut_off, 1000) == 0
        link.send = send
        await until(lambda: cut_off.healthy)
        for counters in (cut_off, other):
            assert (await counters.read([budget(1000)]))[0].used == 1000
            assert await spend_all(counters, 1000) == 0


async def test_what_a_cut_off_gateway_runs_stays_reserved(server):
    added_s = 0.0
    gateways = Gateways(server, slice_share=0.1, slice_lease_s=60.0, offset_s=lambda: added_s)
    async with gateways.two() as (cut_off, other):
        await cut_off.reserve(reservation("runs", budget(1000, 500), pool(1000, 500)))
        await cut_off._session.renew_slices()
        link = cut_off._session._link
        send = link.send

        async def unreachable(*commands):
            raise LinkLost("no route")

        link.send = unreachable
        await until(lambda: not cut_off.healthy)
        added_s = 40.0  # its lease has ended
        assert [r.remaining for r in await other.read([budget(1000), pool(1000)])] == [450, 400]
        added_s = 70.0  # and the time of its slices
        assert [r.remaining for r in await other.read([budget(1000), pool(1000)])] == [450, 1000]
        await cut_off.renew(["runs"], 30.0)
        link.send = send
        await until(lambda: cut_off.healthy)
        readings = await other.read([budget(1000), pool(1000)])
        assert (readings[0].reserved, readings[1].used) == (500, 500), "it still runs"
        await cut_off.settle("runs", {"budget": 200})
        readings = await other.read([budget(1000), pool(1000)])
        assert (readings[0].used, readings[0].reserved, readings[1].used) == (200, 0, 0)


async def test_no_lost_reply_leaves_a_slice_with_two(server):
    gateways = Gateways(server, slice_share=0.1)
    async with gateways.two() as (one, other):
        await one.reserve(reservation("first", budget(1000)))
        await one._session.renew_slices()
        link = one._session._link
        send = link.send
        # Redis lowers the slice, for less of the budget is left; the gateway does not know.
        await other.reserve(reservation("most", budget(1000, 800)))

        async def unreachable(*commands):
            await send(*commands)
            raise LinkLost("the answer was lost")

        link.send = unreachable
        await until(lambda: not one.healthy)
        link.send = lambda *commands: _fail()
        assert await spend_all(one, 1000) + await spend_all(other, 1000) <= 200
        link.send = send


async def _fail():
    raise LinkLost("no route")


async def test_a_gateway_that_is_busy_itself_does_not_blame_redis(server):
    # What comes after the sleep must take less than the timeout, also on a busy machine.
    timeout_s = 5 * TIMEOUT_S
    gateways = Gateways(server, answer_timeout_s=timeout_s)
    async with gateways.open("one") as one:
        calls = [asyncio.create_task(one.reserve(reservation(str(n), pool(1000, 1)))) for n in range(50)]
        await asyncio.sleep(0)
        time.sleep(1.2 * timeout_s)  # noqa: ASYNC251 - this is what it is about
        assert all(isinstance(answer, ReservationGranted) for answer in await asyncio.gather(*calls))
        assert one.healthy
        assert one.state().mode is CounterMode.SHARED
        assert one._session.loss_count == 0


async def test_calls_whose_answer_was_lost_count_once(server):
    gateways = Gateways(server, slice_share=0.1)
    async with gateways.open("one") as one:
        link = one._session._link
        send = link.send

        async def lose_answer(*commands):
            link.send = send
            await send(*commands)
            raise LinkLost("the answer was lost")

        await one.reserve(reservation("settled", budget(1000, 100), pool(100, 40)))
        link.send = lose_answer
        await one.settle("settled", {"budget": 30})
        await until(lambda: one.healthy)
        link.send = lose_answer
        with pytest.raises(StoreUnavailable):
            await one.reserve(reservation("refused", budget(1000, 500), pool(100, 40)))
        await until(lambda: one.healthy)
        link.send = lose_answer
        assert isinstance(await one.reserve(reservation("granted", budget(1000, 20), pool(100, 1))), ReservationGranted)
        await until(lambda: one.healthy)
        readings = await one.read([budget(1000), pool(100)])
        assert (readings[0].used, readings[0].reserved, readings[1].used) == (30, 20, 1)
        await one.settle("granted", {"budget": 5})
        readings = await one.read([budget(1000), pool(100)])
        assert (readings[0].used, readings[0].reserved, readings[1].used) == (35, 0, 0)


async def test_a_redis_that_is_emptied_while_in_use_is_noticed(server):
    gateways = Gateways(server)
    async with gateways.open("one") as one:
        await one.reserve(reservation("a", budget(1000, 100), pool(100, 40)))
        await one._session.renew_slices()
        server.command("FLUSHALL")
        answer = await one.reserve(reservation("b", budget(1000, 10), pool(100, 1)))
        assert isinstance(answer, ReservationGranted), "from the slices"
        assert not one.healthy
        await until(lambda: one.healthy)
        readings = await one.read([budget(1000), pool(100)])
        assert (readings[0].reserved, readings[1].used) == (110, 41)


async def test_leases_that_end_while_redis_recovers_are_settled_at_once(server):
    # Else it might be charged twice: once Redis opens, the database is asked, which knows of it as well.
    gateways = Gateways(server, recovery_s=1.5, probe_interval_s=1.4, slice_share=0.2)
    async with gateways.open("one") as one:
        session = one._session
        await one.reserve(reservation("before", budget(1000, 100)))
        await session.renew_slices()
        server.kill()
        await until(lambda: session.mode is CounterMode.AWAY)
        assert isinstance(await one.reserve(reservation("away", budget(1000, 10))), ReservationGranted)
        server.start()
        await until(lambda: session.mode is CounterMode.RECOVERING)
        await one.settle("away", {"budget": 7})
        await until(lambda: not session.lease_records.unsettled)
        assert session.mode is CounterMode.RECOVERING
        await until(lambda: one.healthy)
        assert (await one.read([budget(1000)]))[0].used == 7


def test_a_call_in_the_turn_in_which_the_connection_closes_falls_back_to_the_slices(server):
    async def main():
        async with Gateways(server).open("one") as counters:
            await counters.reserve(reservation("before", pool(100, 1)))
            await counters._session.renew_slices()
            # What a Redis that dies leaves: a transport that is closed, and a reader that has not run since.
            counters._session._link._connection._writer.transport.abort()
            await asyncio.sleep(0)
            assert isinstance(await counters.reserve(reservation("after", pool(100, 1))), ReservationGranted)

    uvloop.run(main())


async def test_starts_without_redis_and_finds_it(server):
    gateways = Gateways(server)
    server.kill()
    async with gateways.open("one") as one:
        with pytest.raises(StoreUnavailable):
            await one.reserve(reservation("a", pool(10, 1)))
        assert await one.read([pool(10, 1)]) == [one._session.slices.states([pool(10, 1)], 0.0)[0]]
        server.start()
        await until(lambda: one.healthy)
        assert isinstance(await one.reserve(reservation("a", pool(10, 1))), ReservationGranted)


async def test_a_redis_that_takes_no_writes_is_away(server):
    gateways = Gateways(server, slice_share=0.1)
    async with gateways.open("one") as one:
        await one.reserve(reservation("a", pool(1000, 1)))
        await one._session.renew_slices()
        server.command("REPLICAOF", "127.0.0.1", "1")
        assert isinstance(await one.reserve(reservation("b", pool(1000, 1))), ReservationGranted)
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert not one.healthy, "it still answers, but that is not enough"
        server.command("REPLICAOF", "NO", "ONE")
        await until(lambda: one.healthy)
        assert (await one.read([pool(1000)]))[0].used == 2
