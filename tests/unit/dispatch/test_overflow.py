"""Who is asked to leave a queue: by tenant, by what the caches hold, and as far as it helps."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from maitred.core.errors import DeadlineUnmeetable
from maitred.core.flow import PriorityClass
from maitred.dispatch.dispatcher import OverflowRequested
from maitred.dispatch.policy.credits import Cost
from tests.support.dispatchers import Desk, errand

OBJECTIVE_S = 4.5


class Held:
    """Stands for what caches hold: by the id of a request, the share of its prompt."""

    def __init__(self, **shares):
        self.shares = shares

    def __call__(self, errand):
        return int(errand.prompt_tokens * self.shares.get(errand.id.removeprefix("req-"), 0.0))


def pressed_desk(held=None, **settings):
    """A replica with four places, all taken, whose answers come at a known rate: one request takes one second."""
    desk = Desk(**settings)
    desk.dispatcher.overflow_planner._cached_tokens = held or Held()
    desk.floor.predictor.per_s = lambda stations: 80.0  # prompt 16, and 2 * 32 of output
    desk.floor.predictor.is_sure = lambda stations: True
    desk.floor.predictor.steps_per_s = lambda *_: None
    desk.floor.predictor.turn_s = lambda *_: None
    return desk


def movable(number, org="acme", *, within_s=OBJECTIVE_S, may=True, **fields):
    return errand(number, org, movable=may, deadline_s=1_000_000.0 + within_s, **fields)


async def fill(desk, stack, org="other"):
    for number in range(100, 104):
        await stack.enter_async_context(desk.dispatcher.enqueue(errand(number, org)))
    desk.dispatcher.dispatch_ready()
    assert desk.floor.running == 4


async def waiting(desk, stack, *errands):
    seats = {}
    for one in errands:
        seats[one.id] = await stack.enter_async_context(desk.dispatcher.enqueue(one))
    return seats


def asked(seats):
    return [name for name, seat in seats.items() if seat.overflow_answer is not None]


def left_of(desk, errand_):
    now_s = desk.clock.monotonic_s()
    return [ticket.request.id for ticket in desk.dispatcher.overflow_planner.select_for(errand_, now_s)]


@pytest.fixture
async def stack():
    from contextlib import AsyncExitStack

    async with AsyncExitStack() as each:
        yield each


async def test_of_those_that_wait_the_one_with_least_reuse_leaves(stack):
    desk = pressed_desk(Held(**{"1": 0.9, "2": 0.1, "3": 0.5}))
    await fill(desk, stack)
    await waiting(desk, stack, *(movable(number) for number in (1, 2, 3)))
    new = movable(4)
    desk.dispatcher.overflow_planner._cached_tokens.shares["4"] = 0.95
    with pytest.raises(DeadlineUnmeetable):
        desk.dispatcher.admission.check(new, desk.clock.monotonic_s())
    assert left_of(desk, new) == ["req-2"]


async def test_a_new_request_of_which_least_is_held_leaves_itself(stack):
    desk = pressed_desk(Held(**{"1": 0.9, "2": 0.2, "3": 0.5}))
    await fill(desk, stack)
    await waiting(desk, stack, *(movable(number) for number in (1, 2, 3)))
    assert left_of(desk, movable(4)) == []


async def test_a_request_that_may_not_leave_has_others_make_room(stack):
    desk = pressed_desk(Held(**{"1": 0.9, "2": 0.2, "3": 0.5}))
    await fill(desk, stack)
    await waiting(desk, stack, *(movable(number) for number in (1, 2, 3)))
    assert left_of(desk, movable(4, may=False)) == ["req-2"]


async def test_who_may_not_leave_is_never_asked(stack):
    desk = pressed_desk()
    await fill(desk, stack)
    await waiting(desk, stack, *(movable(number, may=False) for number in (1, 2, 3)))
    assert left_of(desk, movable(4, may=False)) == []
    assert desk.dispatcher.overflow_planner.select_leaving(desk.clock.monotonic_s()) == []


async def test_other_tenants_and_other_classes_do_not_leave_for_it(stack):
    desk = pressed_desk()
    await fill(desk, stack)
    await waiting(
        desk,
        stack,
        *(movable(number, "light") for number in (1, 2)),
        *(movable(number, priority=PriorityClass.INTERACTIVE) for number in (3, 4)),
    )
    assert left_of(desk, movable(5, may=False)) == []


async def test_a_look_sends_those_away_who_would_miss_and_then_stops(stack):
    desk = pressed_desk(Held(**{str(number): number / 10 for number in range(1, 9)}))
    await fill(desk, stack)
    seats = await waiting(desk, stack, *(movable(number, within_s=60.0) for number in range(1, 9)))
    desk.dispatcher.check_overflow()
    assert asked(seats) == [], "all of them will be served in time"
    desk.floor.predictor.per_s = lambda stations: 8.0  # ten times slower than was thought
    desk.dispatcher.check_overflow()
    gone = asked(seats)
    assert gone == [f"req-{number}" for number in range(1, 1 + len(gone))], "least reuse first"
    assert 0 < len(gone) < 8
    for name in gone:
        with pytest.raises(OverflowRequested):
            await seats[name].wait_dispatched()
        assert seats[name].accept_overflow()
        await seats[name].__aexit__(None, None, None)
    assert desk.floor.counters.moved == len(gone)
    desk.dispatcher.check_overflow()
    assert len(asked(seats)) <= len(gone) + 1, "what remains makes it"


async def test_pressure_lasts_until_predictions_have_been_low_for_a_while(stack):
    desk = pressed_desk()
    await fill(desk, stack)
    seats = await waiting(desk, stack, movable(1, within_s=10.0))
    relief, ticket = desk.dispatcher.overflow_planner, seats["req-1"].queued
    shares = iter([1.2, 0.8, 0.6, 0.6, 0.8])
    relief._predict_lateness = lambda *_: (lambda share: ((share - 1) * 10.0, 5.0, share))(next(shares))

    def look():
        desk.clock.now_s += 3.0
        return relief.select_leaving(desk.clock.monotonic_s()) == [ticket]

    assert look(), "it would miss its objective"
    assert look(), "it would not, but it is more than 0.7 of it"
    assert not look()
    assert not look(), "for three seconds"
    desk.clock.now_s += 3.0
    relief._states[relief._group_of(ticket)].observe(0.6, desk.clock.monotonic_s())
    assert not look(), "it has been calm for long enough: requests stay again"


async def test_who_says_no_keeps_its_place_and_is_not_asked_again(stack):
    desk = pressed_desk()
    await fill(desk, stack)
    seats = await waiting(desk, stack, *(movable(number) for number in (1, 2)))
    new = movable(3, within_s=2.0, may=False)
    relieving = asyncio.create_task(desk.dispatcher.overflow_others(new))
    await asyncio.sleep(0)
    seat = next(seat for seat in seats.values() if seat.overflow_answer is not None)
    with pytest.raises(OverflowRequested):
        await seat.wait_dispatched()
    seat.decline_overflow()
    for other in seats.values():
        other.decline_overflow()
    assert await relieving
    assert seat.queued.request.id not in left_of(desk, new)
    granted = asyncio.create_task(seat.wait_dispatched())
    await asyncio.sleep(0)
    assert not granted.done(), "it waits on"
    granted.cancel()


async def test_nobody_is_asked_for_what_others_leave_for_already(stack):
    desk = pressed_desk(Held(**{"1": 0.9, "2": 0.2, "3": 0.5, "4": 0.95, "5": 0.95}))
    await fill(desk, stack)
    seats = await waiting(desk, stack, *(movable(number) for number in (1, 2, 3)))
    relieving = [asyncio.create_task(desk.dispatcher.overflow_others(movable(number))) for number in (4, 5)]
    await asyncio.sleep(0)
    assert asked(seats) == ["req-2"], "one is enough, and the second new request waits for its answer too"
    assert not any(task.done() for task in relieving)
    await seats["req-2"].__aexit__(None, None, None)
    assert await asyncio.gather(*relieving) == [True, True]
    assert desk.dispatcher.overflow_planner._requested_by_group == {}


async def test_who_is_granted_meanwhile_does_not_move(stack):
    desk = pressed_desk()
    async with AsyncExitStack() as others:
        await fill(desk, others)
        seats = await waiting(desk, stack, movable(1))
        seats["req-1"].request_overflow()
    desk.dispatcher.dispatch_ready()
    assert seats["req-1"].overflow_answer.done()
    assert not seats["req-1"].accept_overflow()
    assert (await seats["req-1"].wait_dispatched()).name == "post-0"
    assert desk.floor.running == 1
    assert desk.floor.endpoint_states[0].credits.held == 1
    assert seats["req-1"].queued.cost == Cost(1, 3, 16)
