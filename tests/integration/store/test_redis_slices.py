"""What gateways hold in advance, step by step: cuts and lost answers at the moments that random ones seldom meet."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from uuid import uuid4

import msgspec
import pytest

from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationGranted
from maitred.core.errors import StoreUnavailable
from maitred.redis.link import LinkLost
from maitred.store.counters.calls import REGISTER, SLICE
from maitred.store.counters.config import CountersConfig
from maitred.store.counters.redis import RedisCounters
from tests.support.clock import FakeClock
from tests.support.servers.redis_server import redis_server


@pytest.fixture(scope="module")
def server():
    with redis_server() as server:
        yield server


def budget(fixed, **changes):
    return LimitClaim(counter="budget", kind=CounterKind.BUDGET, capacity=1000, fixed=fixed, **changes)


def pool(fixed):
    return LimitClaim(counter="pool", kind=CounterKind.POOL, capacity=1000, fixed=fixed)


def rate(fixed, refill_per_s=10.0):
    return LimitClaim(counter="rate", kind=CounterKind.BUCKET, capacity=600, fixed=fixed, refill_per_s=refill_per_s)


class Gateways:
    """Gateways without tasks of their own; the clock is the only time that passes, here and in Redis."""

    def __init__(self, server, **changes):
        self.clock = FakeClock()
        began_s = self.clock.now_s
        self.offset_s = lambda: self.clock.now_s - began_s
        changes = {"recovery_s": 0.0, "answer_timeout_s": 10.0, "slice_share": 0.1, **changes}
        self.config = CountersConfig(url=server.url, namespace=uuid4().hex, **changes)

    @asynccontextmanager
    async def open(self, number):
        async with AsyncExitStack() as stack:
            gateways = []
            for n in range(number):
                counters = RedisCounters(
                    self.config, self.clock, f"gateway-{n}", read_spent=_nothing, offset_s=self.offset_s
                )
                await stack.enter_async_context(counters)
                await counters._session._stop_upkeep()
                gateways.append(counters)
            yield gateways


async def _nothing(counters):
    return {}


class Line:
    """The line of one gateway to Redis."""

    def __init__(self, counters):
        self.link = counters._session._link
        self.send, self.open = self.link.send, self.link.open

    def cut(self):
        self.link.send = self.link.open = self._fail

    def lose_next_answer(self):
        self.link.send = self._lose

    def heal(self):
        self.link.send, self.link.open = self.send, self.open

    async def _fail(self, *_):
        raise LinkLost("no route")

    async def _lose(self, *commands):
        await self.send(*commands)
        self.cut()
        raise LinkLost("the answer was lost")


async def upkeep(counters):
    session = counters._session
    try:
        if counters.healthy:
            await session.report_pending()
            await session.renew_slices()
        else:
            await session._recover()
    except LinkLost as error:
        session.on_link_lost(error)


async def take(counters, claim, lease=None, lease_s=30.0):
    """Reserves one claim; returns whether it was granted."""
    try:
        answer = await counters.reserve(Reservation(lease or uuid4().hex, [claim], 0, 0, lease_s))
    except StoreUnavailable:
        return False
    return isinstance(answer, ReservationGranted)


async def take_all(counters, claim_of):
    """Takes all that a gateway gives, and returns it."""
    taken, amount = 0, 512
    while amount:
        if await take(counters, claim_of(amount)):
            taken += amount
        else:
            amount //= 2
    return taken


async def test_slices_of_a_rate_are_never_refilled_with_more_than_the_rate(server):
    gateways = Gateways(server, slice_share=0.5)
    async with gateways.open(4) as all_of_them:
        for counters in all_of_them:
            assert await take(counters, rate(1))
        for counters in all_of_them:
            await upkeep(counters)
        for counters in all_of_them:
            Line(counters).cut()
        admitted = 4
        for _ in range(24):
            gateways.clock.now_s += 10.0
            for counters in all_of_them:
                admitted += await take_all(counters, rate)
        assert admitted <= 600 + 10.0 * 240 + len(all_of_them)


async def test_the_part_of_a_rate_that_a_slice_leaves_is_there_for_others(server):
    gateways = Gateways(server, slice_share=0.5)
    async with gateways.open(3) as (one, two, three):
        for counters in (one, two, three):
            assert await take(counters, rate(1))
        for counters in (one, two, three):
            await upkeep(counters)
        assert "rate" in two._session.slices
        assert three._session.slices.states([rate(0)], gateways.clock.now_s)[0].remaining == 0
        gateways.clock.now_s += 61.0
        await take(two, rate(1))
        one._session._expire()
        for counters in (one, two, three):
            await take(three, rate(1))
            await upkeep(counters)
        Line(three).cut()
        await take_all(three, rate)
        gateways.clock.now_s += 10.0
        assert await take_all(three, rate) in (50, 51), "half of the rate"


def empty(server):
    server.kill()
    server.start()


async def test_an_emptied_redis_is_told_the_slices_and_who_holds_the_leases(server):
    gateways = Gateways(server)
    async with gateways.open(2) as (one, other):
        assert await take(one, budget(100), "runs")
        await upkeep(one)
        empty(server)
        assert not await take(other, budget(901))
        line = Line(one)
        link_lost = LinkLost("it was emptied")
        one._session.on_link_lost(link_lost)
        one._session.renew_slices = line._fail  # It is cut off when it has told everything.
        await upkeep(one)
        line.cut()
        one._session.on_link_lost(link_lost)
        await upkeep(other)
        gateways.clock.now_s += 35.0  # The lease has ended.
        spent = 100 + await take_all(one, budget)
        assert spent > 100, "out of its slice"
        assert spent + await take_all(other, budget) <= 1000


async def test_an_emptied_redis_is_told_again_when_that_failed(server):
    gateways = Gateways(server)
    async with gateways.open(2) as (one, other):
        assert await take(one, budget(400), "ended")
        await one.settle("ended", {"budget": 400})
        gateways.clock.now_s += 61.0  # It has no slice of it any more.
        await one.read([budget(0)])
        one._session._expire()
        await upkeep(one)
        empty(server)
        one._session.on_link_lost(LinkLost("it was emptied"))
        send = one._session._link.send

        async def fail_report(*commands):
            if commands[0][1] == REGISTER.sha:
                one._session._link.send = send
                raise LinkLost("no route")
            return await send(*commands)

        one._session._link.send = fail_report
        await upkeep(one)
        assert not one.healthy
        await upkeep(one)
        assert one.healthy
        other._session.on_link_lost(LinkLost("it was emptied"))
        await upkeep(other)
        assert await take_all(other, budget) == 600


async def test_slices_that_expired_are_not_kept_by_an_answer_about_others(server):
    gateways = Gateways(server, slice_lease_s=60.0)
    async with gateways.open(2) as (one, other):
        others = [LimitClaim(counter=f"{n}", kind=CounterKind.BUDGET, capacity=1000, fixed=1) for n in range(100)]
        one._session.note_use([*others, pool(0)])  # The last one is in the second call.
        await upkeep(one)
        line = Line(one)
        line.cut()
        one._session.on_link_lost(LinkLost("no route"))
        gateways.clock.now_s += 61.0
        spent = await take_all(other, pool)
        line.heal()
        slice_calls = []

        async def fail_second_slice(*commands):
            if commands[0][1] == SLICE.sha:
                slice_calls.append(commands)
                if len(slice_calls) == 2:
                    raise LinkLost("no route")
            return await line.send(*commands)

        line.link.send = fail_second_slice
        one._session.note_use([*others, pool(0)])
        await upkeep(one)
        assert len(slice_calls) == 2
        assert not one.healthy
        assert spent + await take_all(one, pool) <= 1000


async def test_what_an_answer_that_was_lost_took_out_of_a_slice_is_not_spent_again(server):
    gateways = Gateways(server)
    async with gateways.open(2) as (one, other):
        assert await take(one, budget(1))
        await upkeep(one)
        assert await take(other, budget(900))
        line = Line(one)
        line.lose_next_answer()
        # It does not fit beside the slice of 99, so it comes out of it. Nothing of it is used.
        assert await take(one, budget(99), "lost")
        await one.settle("lost", {})
        line.heal()
        session = one._session
        renew, session.renew_slices = session.renew_slices, line._fail
        await upkeep(one)
        line.cut()
        session.renew_slices = renew
        assert 901 + await take_all(other, budget) + await take_all(one, budget) <= 1000
        line.heal()
        await upkeep(one)
        await upkeep(one)
        assert (await one.read([budget(0)]))[0].remaining == 0


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_what_is_refused_after_a_lost_answer_comes_out_of_the_slice_until_redis_tells(server, is_cancelled):
    gateways = Gateways(server)
    async with gateways.open(2) as (one, other):
        assert await take(one, budget(1))
        await upkeep(one)
        assert await take(other, budget(899))
        line = Line(one)
        if is_cancelled:
            granted = asyncio.Event()

            async def hold_answer(*commands):
                await line.send(*commands)
                granted.set()
                await asyncio.Event().wait()

            line.link.send = hold_answer
            reserving = asyncio.create_task(take(one, budget(100)))
            await granted.wait()
            reserving.cancel()
            await asyncio.gather(reserving, return_exceptions=True)
            line.heal()
        else:
            line.lose_next_answer()
            assert not await take(one, budget(100))
            line.heal()
        session = one._session
        renew, session.renew_slices = session.renew_slices, line._fail
        await upkeep(one)
        line.cut()
        session.renew_slices = renew
        assert 900 + await take_all(other, budget) + await take_all(one, budget) <= 1000


async def test_a_slice_whose_answer_was_lost_is_given_back(server):
    gateways = Gateways(server)
    async with gateways.open(2) as (one, other):
        await take(one, pool(100), "ended")
        await one.settle("ended", {})
        line = Line(one)
        line.lose_next_answer()
        await upkeep(one)
        line.heal()
        gateways.clock.now_s += 61.0
        one._session._expire()
        for _ in range(2):
            await upkeep(one)
        assert (await other.read([pool(0)]))[0].remaining == 1000


async def test_two_reports_at_one_time_lose_no_settlement(server):
    gateways = Gateways(server)
    async with gateways.open(1) as (one,):
        for n in range(3):
            assert await take(one, budget(100), f"lease-{n}")
        session, line = one._session, Line(one)
        session.settle_later("lease-0", {"budget": 10})

        async def add_one_more(*commands):
            line.heal()
            session.settle_later("lease-1", {"budget": 20})
            return await line.send(*commands)

        line.link.send = add_one_more
        await asyncio.gather(session.report_pending(), one.release_gateway("dead-1"), one.release_gateway("dead-2"))
        await session.report_pending()
        state = (await one.read([budget(0)]))[0]
        assert (state.used, state.reserved, session.state().unsettled) == (30, 100, 0)
        assert not session._ended_gateways


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_a_lease_that_was_taken_over_lasts_as_long_as_its_new_gateway_may_spend_it(server, is_resumed):
    gateways = Gateways(server)
    async with gateways.open(3) as (dead, heir, other):
        assert await take(dead, budget(800), "survives")
        await upkeep(dead)
        Line(dead).cut()
        await heir.release_gateway("gateway-0", ["survives"])
        if is_resumed:
            await heir.resume(Reservation("survives", [budget(800)], 0, 0, 30.0))
            await heir.renew(["survives"], 30.0)
        await upkeep(heir)
        line = Line(heir)
        line.cut()
        heir._session.on_link_lost(LinkLost("no route"))
        gateways.clock.now_s += 35.0
        assert await take_all(other, budget) <= 200
        await heir.settle("survives", {"budget": 700})
        line.heal()
        await upkeep(heir)
        state = (await heir.read([budget(0)]))[0]
        assert (state.used >= 700, state.used + state.reserved <= 1000) == (True, True)


async def test_an_emptied_redis_is_told_of_a_lease_that_was_taken_over(server):
    gateways = Gateways(server)
    async with gateways.open(2) as (heir, other):
        await heir.resume(Reservation("survives", [budget(800)], 0, 0, 30.0))
        empty(server)
        for counters in (heir, other):
            counters._session.on_link_lost(LinkLost("it was emptied"))
            await upkeep(counters)
        assert await take_all(other, budget) <= 200


async def test_a_slice_is_refilled_in_place_of_the_rest_of_a_rate_and_not_beside_it(server):
    gateways = Gateways(server, slice_share=0.5)
    async with gateways.open(3) as (one, two, three):
        for counters in (one, two, three):
            assert await take(counters, rate(4))
        for counters in (one, two):
            await upkeep(counters)
        Line(two).cut()  # Its slice is 12 less than half.
        for _ in range(30):
            gateways.clock.now_s += 1.0
            for counters in (one, three):
                await upkeep(counters)
        taken = 0
        for counters in (one, two, three):
            taken += await take_all(counters, rate)
        assert taken <= 600 + 1


async def test_a_call_that_arrives_after_a_cut_tells_nothing_of_the_cut(server):
    gateways = Gateways(server)
    async with gateways.open(2) as (one, other):
        assert await take(one, rate(1))
        for counters in (one, other):
            await upkeep(counters)
        taken = 1 + await take_all(other, rate)
        line, late = Line(one), []

        async def keep(*commands):
            late.append(commands)
            line.cut()
            raise LinkLost("no route")

        line.link.send = keep
        await upkeep(one)
        assert not one.healthy
        for _ in range(20):
            gateways.clock.now_s += 1.0
            taken += await take_all(one, rate)
        # The old connection was not ended, and its line is whole again.
        *words, arguments = late[0][0]
        arguments = {**msgspec.msgpack.decode(arguments), "offset_s": gateways.offset_s()}
        await other._session._link.send((*words, msgspec.msgpack.encode(arguments)))
        for _ in range(2):
            await upkeep(other)
            taken += await take_all(other, rate)
        assert taken <= 600 + 20 * 10.0 + 1
