"""Who is asked to leave a queue: by tenant, by what the caches hold, and as far as it helps."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from maitred.core.errors import DeadlineUnmeetable
from maitred.core.flow import PriorityClass
from maitred.dispatch.dispatcher import OverflowRequested
from maitred.dispatch.policy.credits import Cost
from tests.support.dispatchers import DispatchSetup, make_dispatch_request

OBJECTIVE_S = 4.5


class Held:
    """Stands for what caches hold: by the id of a request, the share of its prompt."""

    def __init__(self, **shares):
        self.shares = shares

    def __call__(self, make_dispatch_request):
        return int(
            make_dispatch_request.prompt_tokens * self.shares.get(make_dispatch_request.id.removeprefix("req-"), 0.0)
        )


def overloaded_setup(held=None, **settings):
    """A replica with four places, all taken, whose answers come at a known rate: one request takes one second."""
    setup = DispatchSetup(**settings)
    setup.dispatcher.overflow_planner._cached_tokens = held or Held()
    setup.core.predictor.per_s = lambda endpoint_states: 80.0  # prompt 16, and 2 * 32 of output
    setup.core.predictor.is_rate_known = lambda endpoint_states: True
    setup.core.predictor.steps_per_s = lambda *_: None
    setup.core.predictor.turn_s = lambda *_: None
    return setup


def movable(number, org="acme", *, within_s=OBJECTIVE_S, may=True, **fields):
    return make_dispatch_request(number, org, movable=may, ttft_deadline_s=1_000_000.0 + within_s, **fields)


async def fill(setup, stack, org="other"):
    for number in range(100, 104):
        await stack.enter_async_context(setup.dispatcher.enqueue(make_dispatch_request(number, org)))
    setup.dispatcher.refresh_and_dispatch()
    assert setup.core.running == 4


async def waiting(setup, stack, *dispatch_requests):
    entries = {}
    for dispatch_request in dispatch_requests:
        entries[dispatch_request.id] = await stack.enter_async_context(setup.dispatcher.enqueue(dispatch_request))
    return entries


def asked(entries):
    return [name for name, entry in entries.items() if entry.overflow_answer is not None]


def leaving_for(setup, dispatch_request):
    now_s = setup.clock.monotonic_s()
    return [queued.request.id for queued in setup.dispatcher.overflow_planner.select_for(dispatch_request, now_s)]


@pytest.fixture
async def stack():
    from contextlib import AsyncExitStack

    async with AsyncExitStack() as each:
        yield each


async def test_the_waiting_request_with_least_cached_tokens_is_moved(stack):
    setup = overloaded_setup(Held(**{"1": 0.9, "2": 0.1, "3": 0.5}))
    await fill(setup, stack)
    await waiting(setup, stack, *(movable(number) for number in (1, 2, 3)))
    new = movable(4)
    setup.dispatcher.overflow_planner._cached_tokens.shares["4"] = 0.95
    with pytest.raises(DeadlineUnmeetable):
        setup.dispatcher.load_shedder.check(new, setup.clock.monotonic_s())
    assert leaving_for(setup, new) == ["req-2"]


async def test_a_new_request_with_least_cached_tokens_is_moved_itself(stack):
    setup = overloaded_setup(Held(**{"1": 0.9, "2": 0.2, "3": 0.5}))
    await fill(setup, stack)
    await waiting(setup, stack, *(movable(number) for number in (1, 2, 3)))
    assert leaving_for(setup, movable(4)) == []


async def test_others_are_moved_for_a_request_that_may_not_move(stack):
    setup = overloaded_setup(Held(**{"1": 0.9, "2": 0.2, "3": 0.5}))
    await fill(setup, stack)
    await waiting(setup, stack, *(movable(number) for number in (1, 2, 3)))
    assert leaving_for(setup, movable(4, may=False)) == ["req-2"]


async def test_a_request_that_may_not_move_is_never_asked(stack):
    setup = overloaded_setup()
    await fill(setup, stack)
    await waiting(setup, stack, *(movable(number, may=False) for number in (1, 2, 3)))
    assert leaving_for(setup, movable(4, may=False)) == []
    assert setup.dispatcher.overflow_planner.select_late(setup.clock.monotonic_s()) == []


async def test_requests_of_other_tenants_and_classes_are_not_moved(stack):
    setup = overloaded_setup()
    await fill(setup, stack)
    await waiting(
        setup,
        stack,
        *(movable(number, "light") for number in (1, 2)),
        *(movable(number, priority=PriorityClass.INTERACTIVE) for number in (3, 4)),
    )
    assert leaving_for(setup, movable(5, may=False)) == []


async def test_a_check_moves_requests_that_would_miss_their_objective_and_then_stops(stack):
    setup = overloaded_setup(Held(**{str(number): number / 10 for number in range(1, 9)}))
    await fill(setup, stack)
    entries = await waiting(setup, stack, *(movable(number, within_s=60.0) for number in range(1, 9)))
    setup.dispatcher.check_overflow()
    assert asked(entries) == [], "all of them will be served in time"
    setup.core.predictor.per_s = lambda endpoint_states: 8.0  # ten times slower than was thought
    setup.dispatcher.check_overflow()
    gone = asked(entries)
    assert gone == [f"req-{number}" for number in range(1, 1 + len(gone))], "least reuse first"
    assert 0 < len(gone) < 8
    for name in gone:
        with pytest.raises(OverflowRequested):
            await entries[name].wait_dispatched()
        assert entries[name].accept_overflow()
        await entries[name].__aexit__(None, None, None)
    assert setup.core.counters.moved == len(gone)
    setup.dispatcher.check_overflow()
    assert len(asked(entries)) <= len(gone) + 1, "what remains makes it"


async def test_pressure_lasts_until_predictions_have_been_low_for_a_while(stack):
    setup = overloaded_setup()
    await fill(setup, stack)
    entries = await waiting(setup, stack, movable(1, within_s=10.0))
    planner, queued = setup.dispatcher.overflow_planner, entries["req-1"].queued
    shares = iter([1.2, 0.8, 0.6, 0.6, 0.8])
    planner._predict_lateness = lambda *_: (lambda share: ((share - 1) * 10.0, 5.0, share))(next(shares))

    def look():
        setup.clock.now_s += 3.0
        return planner.select_late(setup.clock.monotonic_s()) == [queued]

    assert look(), "it would miss its objective"
    assert look(), "it would not, but it is more than 0.7 of it"
    assert not look()
    assert not look(), "for three seconds"
    setup.clock.now_s += 3.0
    planner._states[planner._group_of(queued)].observe(0.6, setup.clock.monotonic_s())
    assert not look(), "it has been calm for long enough: requests stay again"


async def test_a_request_that_declines_keeps_its_position_and_is_not_asked_again(stack):
    setup = overloaded_setup()
    await fill(setup, stack)
    entries = await waiting(setup, stack, *(movable(number) for number in (1, 2)))
    new = movable(3, within_s=2.0, may=False)
    relieving = asyncio.create_task(setup.dispatcher.overflow_others(new))
    await asyncio.sleep(0)
    entry = next(entry for entry in entries.values() if entry.overflow_answer is not None)
    with pytest.raises(OverflowRequested):
        await entry.wait_dispatched()
    entry.decline_overflow()
    for other in entries.values():
        other.decline_overflow()
    assert await relieving
    assert entry.queued.request.id not in leaving_for(setup, new)
    granted = asyncio.create_task(entry.wait_dispatched())
    await asyncio.sleep(0)
    assert not granted.done(), "it waits on"
    granted.cancel()


async def test_no_more_requests_are_asked_than_are_needed(stack):
    setup = overloaded_setup(Held(**{"1": 0.9, "2": 0.2, "3": 0.5, "4": 0.95, "5": 0.95}))
    await fill(setup, stack)
    entries = await waiting(setup, stack, *(movable(number) for number in (1, 2, 3)))
    relieving = [asyncio.create_task(setup.dispatcher.overflow_others(movable(number))) for number in (4, 5)]
    await asyncio.sleep(0)
    assert asked(entries) == ["req-2"], "one is enough, and the second new request waits for its answer too"
    assert not any(task.done() for task in relieving)
    await entries["req-2"].__aexit__(None, None, None)
    assert await asyncio.gather(*relieving) == [True, True]
    assert setup.dispatcher.overflow_planner._requested_by_group == {}


async def test_a_request_that_was_dispatched_meanwhile_does_not_move(stack):
    setup = overloaded_setup()
    async with AsyncExitStack() as others:
        await fill(setup, others)
        entries = await waiting(setup, stack, movable(1))
        entries["req-1"].request_overflow()
    setup.dispatcher.refresh_and_dispatch()
    assert entries["req-1"].overflow_answer.done()
    assert not entries["req-1"].accept_overflow()
    assert (await entries["req-1"].wait_dispatched()).name == "replica-0"
    assert setup.core.running == 1
    assert setup.core.endpoint_states[0].credits.request_count == 1
    assert entries["req-1"].queued.cost == Cost(1, 3, 16)
