"""Slices follow what each gateway spends: random paces, cuts and heals, with a clock that a test moves."""

import asyncio
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationGranted
from maitred.core.errors import StoreUnavailable
from tests.integration.store.test_redis_slices import Gateways, Line
from tests.integration.store.test_redis_slices import upkeep as renew
from tests.support.servers.redis_server import redis_server

LEAST, MOST = 0.02, 0.3
STEP_S = 2.0


@pytest.fixture(scope="module")
def server():
    with redis_server() as server:
        yield server


def budget(fixed, capacity):
    return LimitClaim("budget", CounterKind.BUDGET, capacity, fixed)


def rate(fixed, capacity):
    return LimitClaim("rate", CounterKind.BUCKET, capacity, fixed, refill_per_s=capacity / 60)


async def upkeep(counters):
    await renew(counters)
    counters._session._expire()


class Spender:
    """A gateway that spends at a pace, and what it spent and was refused."""

    def __init__(self, counters, claim_of, capacity):
        self.counters, self.claim_of, self.capacity = counters, claim_of, capacity
        self.line = Line(counters)
        self.spent = 0
        self.refused = 0

    async def spend(self, amount):
        lease = uuid4().hex
        claim = self.claim_of(amount, self.capacity)
        try:
            answer = await self.counters.reserve(Reservation(lease, [claim], 0, 0, 30.0))
        except StoreUnavailable:
            self.refused += 1
            return False
        if not isinstance(answer, ReservationGranted):
            self.refused += 1
            return False
        self.spent += amount
        await self.counters.settle(lease, {claim.counter: amount})
        return True

    def held(self):
        session = self.counters._session
        return session.slices.amount_of(self.claim_of(1, self.capacity), session._clock.monotonic_s())


async def pass_steps(gateways, spenders, steps, paces):
    """Lets time pass, in which each spends at its pace and does its upkeep."""
    for _ in range(steps):
        gateways.clock.now_s += STEP_S
        for spender, pace in zip(spenders, paces, strict=True):
            if pace:
                await spender.spend(pace)
            await upkeep(spender.counters)


@settings(
    max_examples=15,
    phases=[Phase.generate],
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    pace=st.integers(1, 120),
    capacity=st.integers(20_000, 60_000),
    phases=st.lists(
        st.tuples(st.sets(st.integers(0, 2)), st.integers(1, 40), st.lists(st.integers(0, 60), min_size=3, max_size=3)),
        min_size=1,
        max_size=5,
    ),
)
def test_nothing_is_overspent_an_idle_gateway_gives_back_and_a_busy_one_is_not_refused(server, pace, capacity, phases):
    async def work():
        gateways = Gateways(server, slice_share=LEAST, busy_slice_share=MOST)
        async with gateways.open(3) as opened:
            spenders = [Spender(counters, budget, capacity) for counters in opened]
            for cut, steps, paces in phases:
                for number in cut:
                    spenders[number].line.cut()
                await pass_steps(gateways, spenders, steps, paces)
                for spender in spenders:
                    spender.line.heal()
                    await upkeep(spender.counters)
                    await upkeep(spender.counters)
                assert sum(spender.spent for spender in spenders) <= capacity
            busy, *idle = spenders
            busy.refused = 0
            for _ in range(60):
                gateways.clock.now_s += STEP_S
                left = capacity - sum(spender.spent for spender in spenders)
                held = sum(spender.held() for spender in idle)
                granted = await busy.spend(pace)
                assert granted or left - held <= pace + 1, (
                    f"{left=} {held=} {pace=}: the ledger has money, and the line is whole"
                )
                for spender in spenders:
                    await upkeep(spender.counters)
            left = capacity - sum(spender.spent for spender in spenders)
            for spender in idle:
                assert spender.held() == 0, f"nothing was spent for two minutes, and {left=}"
            assert sum(spender.spent for spender in spenders) <= capacity

    asyncio.run(work())


@pytest.mark.parametrize("claim_of", [budget, rate])
def test_a_busy_gateway_holds_more_goes_on_longer_in_a_cut_and_gives_it_back_when_it_is_idle(server, claim_of):
    async def work():
        gateways = Gateways(server, slice_share=LEAST, busy_slice_share=MOST)
        capacity, pace = 60_000, 100
        async with gateways.open(2) as opened:
            busy, quiet = (Spender(counters, claim_of, capacity) for counters in opened)
            await pass_steps(gateways, [busy, quiet], 120, [pace, 0])
            await pass_steps(gateways, [busy, quiet], 2, [pace, 1])
            assert busy.held() > 3 * LEAST * capacity * 0.7
            assert quiet.held() <= LEAST * capacity + 1
            busy.line.cut()
            before, busy.refused = busy.spent, 0
            await pass_steps(gateways, [busy, quiet], 50, [pace, 1])
            assert busy.refused == 0
            assert busy.spent - before == 50 * pace
            busy.line.heal()
            await upkeep(busy.counters)
            # One that spends little still uses the limit.
            await pass_steps(gateways, [busy, quiet], 250, [1, pace])
            left = capacity - busy.spent - quiet.spent if claim_of is budget else capacity
            assert busy.held() <= LEAST * left * 1.1 + 1
            assert quiet.held() > 2 * busy.held()

    asyncio.run(work())


def test_without_a_part_for_busy_gateways_all_hold_the_same(server):
    async def work():
        gateways = Gateways(server, slice_share=LEAST, busy_slice_share=0.0)
        async with gateways.open(2) as opened:
            busy, quiet = (Spender(counters, budget, 60_000) for counters in opened)
            await pass_steps(gateways, [busy, quiet], 60, [100, 1])
            assert busy.held() == pytest.approx(quiet.held(), rel=0.05)

    asyncio.run(work())


def test_a_lower_part_of_a_rate_is_not_refilled_beyond_it_when_the_answer_is_lost(server):
    async def work():
        gateways = Gateways(server, slice_share=LEAST, busy_slice_share=0.5)
        capacity = 6_000  # 100 a second
        async with gateways.open(2) as opened:
            one, other = (Spender(counters, rate, capacity) for counters in opened)
            await pass_steps(gateways, [one, other], 60, [80, 1])
            gateways.clock.now_s += 55.0  # it is nearly forgotten, and its part falls
            one.line.lose_next_answer()
            await upkeep(one.counters)
            spent_before = one.spent + other.spent
            began_s = gateways.clock.now_s
            for _ in range(60):
                gateways.clock.now_s += 1.0
                for spender in (one, other):
                    while await spender.spend(20):
                        pass
                await upkeep(other.counters)
            spent = one.spent + other.spent - spent_before
            assert spent <= capacity + 100.0 * (gateways.clock.now_s - began_s) + 2

    asyncio.run(work())
