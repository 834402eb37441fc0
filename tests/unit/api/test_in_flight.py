"""Who may come in, and how those inside are shown out."""
# ruff: noqa: PT012 - the block is what is tested

import asyncio
import random
from contextlib import ExitStack, suppress

import pytest

from maitred.api.in_flight import CancelScope, ClientDisconnected, InFlightLimiter
from maitred.core.errors import Draining, Saturated, Unauthenticated
from maitred.core.tenancy import ANONYMOUS, Principal, Scope
from tests.support.clock import FakeClock


async def inside(gate, until, principal=None):
    with gate.acquire(principal):
        await until.wait()


def principal(tenant, key="one"):
    return Principal(key=key, tenants=(tenant,), scopes=frozenset({Scope.INFERENCE}))


async def test_no_more_than_its_capacity():
    gate = InFlightLimiter(2)
    with gate.acquire(), gate.acquire():
        assert gate.count == 2
        with pytest.raises(Saturated) as refusal, gate.acquire():
            pass
        assert refusal.value.retry_after_s
    assert gate.count == 0


async def test_the_time_to_come_back_is_the_pace_at_which_places_come_free():
    clock = FakeClock()
    gate = InFlightLimiter(2, clock, draw=lambda: 0.5)

    async def refused_s(tenant):
        with pytest.raises(Saturated) as refusal, gate.acquire(principal(tenant)):
            pass
        return refusal.value.retry_after_s

    with gate.acquire(), ExitStack() as other:
        other.enter_context(gate.acquire())
        assert await refused_s("a") == pytest.approx(1.05), "a guess, until somebody has left"
        for _ in range(4):
            clock.now_s += 5.0
            other.close()
            other.enter_context(gate.acquire())
        assert await refused_s("b") == pytest.approx(5.25)
        assert await refused_s("b") == pytest.approx(10.5), "one behind the other"
        assert await refused_s("c") == pytest.approx(5.25), "and not behind those of others"


async def test_some_come_in_even_if_it_is_full_but_not_when_it_closes():
    gate = InFlightLimiter(1)
    with gate.acquire(), gate.acquire(even_if_full=True):
        assert gate.count == 2
    gate.close()
    with pytest.raises(Draining), gate.acquire(even_if_full=True):
        pass


async def test_an_empty_gateway_drains_at_once():
    gate = InFlightLimiter(1)
    assert await gate.drain(1000) == 0
    with pytest.raises(Draining), gate.acquire():
        pass


async def test_those_inside_may_finish():
    gate, door = InFlightLimiter(9), asyncio.Event()
    request = asyncio.create_task(inside(gate, door))
    await asyncio.sleep(0)
    draining = asyncio.create_task(gate.drain(1000))
    await asyncio.sleep(0)
    assert not draining.done()
    door.set()
    assert await draining == 0
    await request


async def test_requests_that_outlast_the_grace_period_are_cancelled_with_the_reason():
    gate, door = InFlightLimiter(9), asyncio.Event()
    requests = [asyncio.create_task(inside(gate, door)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await gate.drain(0) == 3
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(result) for result in results] == [Draining] * 3
    assert gate.count == 0


async def test_whose_key_is_no_longer_valid_is_shown_out_and_nobody_else():
    gate, door, asked = InFlightLimiter(9), asyncio.Event(), []
    keys = [principal("a", "good"), principal("a", "revoked"), principal("a", "revoked"), None]
    requests = [asyncio.create_task(inside(gate, door, key)) for key in keys]
    await asyncio.sleep(0)

    def holds(one):
        asked.append(one.key)
        return one.key != "revoked"

    assert gate.cancel_revoked(holds) == 2
    assert asked == ["good", "revoked"]
    await asyncio.wait(requests[1:3])
    door.set()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), Unauthenticated, Unauthenticated, type(None)]


async def test_an_interruption_leaves_with_its_reason_and_only_the_first():
    async with asyncio.timeout(300):
        with pytest.raises(ClientDisconnected), CancelScope() as block:
            asyncio.get_running_loop().call_soon(block.cancel, ClientDisconnected())
            asyncio.get_running_loop().call_soon(block.cancel, Draining())
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_an_interruption_after_the_end_does_nothing():
    with CancelScope() as block:
        pass
    block.cancel(ClientDisconnected())
    await asyncio.sleep(0)


async def test_a_cancellation_from_outside_stays_one():
    async def work(blocks):
        with CancelScope() as block:
            blocks.append(block)
            await asyncio.Event().wait()

    blocks = []
    task = asyncio.create_task(work(blocks))
    await asyncio.sleep(0)
    task.cancel()
    blocks[0].cancel(ClientDisconnected())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_organisation_leaves_slots_for_others():
    gate = InFlightLimiter(64)
    with ExitStack() as slots:

        def enter_all(tenant):
            count = 0
            with pytest.raises(Saturated, match="share"):
                while True:
                    slots.enter_context(gate.acquire(principal(tenant)))
                    count += 1
            return count

        assert enter_all("greedy") == 57
        with gate.acquire(principal("victim")):
            assert gate.count == 58
        assert gate.count == 57
        # An operator comes in even so, and so does whoever has no organisation of its own.
        with gate.acquire(None), gate.acquire(None, even_if_full=True):
            assert enter_all("greedy") == 0
    assert gate.count == 0
    assert not gate._held


async def test_anonymous_requests_may_take_all_slots():
    gate = InFlightLimiter(64)
    with ExitStack() as slots:
        for _ in range(64):
            slots.enter_context(gate.acquire(ANONYMOUS))
        with pytest.raises(Saturated):
            gate.acquire(ANONYMOUS)


def member(organisation, team, key):
    return Principal(key=key, tenants=(team, organisation), scopes=frozenset({Scope.INFERENCE}))


@pytest.mark.parametrize(
    ("greedy", "sibling", "owner"),
    [
        (member("acme", "team", "one"), member("acme", "team", "two"), "key"),
        (member("acme", "team", "one"), member("acme", "other", "one"), "key"),
        (principal("acme", "one"), principal("acme", "two"), "key"),
    ],
)
async def test_one_key_leaves_slots_for_others_of_its_organisation(greedy, sibling, owner):
    gate = InFlightLimiter(1000)
    with ExitStack() as slots:
        with pytest.raises(Saturated, match=f"Your {owner} has"):
            while True:
                slots.enter_context(gate.acquire(greedy))
        assert 870 < gate.count < 889
        slots.enter_context(gate.acquire(sibling))
        for _ in range(50):
            slots.enter_context(gate.acquire(principal("stranger")))
        # What it had becomes free to others first.
        with pytest.raises(Saturated):
            gate.acquire(greedy)
    assert gate.count == 0
    assert not gate._held


async def test_keys_of_an_organisation_and_organisations_end_with_equal_shares():
    gate, held, draw = InFlightLimiter(1000), [], random.Random(1)
    callers = [member("a", "a1", "x"), member("a", "a1", "y"), member("a", "a2", "z"), member("b", "b1", "x")]
    for _ in range(6_000):
        for caller in callers:
            with suppress(Saturated):
                held.append((caller, gate.acquire(caller).__enter__()))
        held.pop(draw.randrange(len(held)))[1].__exit__(None, None, None)
    x, y, z, b = (sum(one is caller for one, _ in held) for caller in callers)
    assert x + y + z == pytest.approx(b, rel=0.25)
    assert x + y == pytest.approx(z, rel=0.25)
    assert x == pytest.approx(y, rel=0.25)
    for _, slot in held:
        slot.__exit__(None, None, None)
    assert not gate._held
