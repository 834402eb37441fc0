"""A replica that comes because requests wait for it."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from maitred.core.errors import DeadlineUnmeetable, ModelLoadFailed, ModelLoading, QueueFull
from maitred.core.flow import PriorityClass
from maitred.core.replica import StepTimes
from maitred.core.request import WaitCause
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from tests.support.dispatchers import DispatchSetup, ScriptedReplica, make_dispatch_request

NOW_S = 1_000_000.0


class LoadingReplica(ScriptedReplica):
    """Is not there, and says when it would be; or why it will not."""

    def __init__(self):
        super().__init__()
        self.outage = ModelLoading(retry_after_s=8.0)

    def card(self):
        if self.outage is not None:
            raise self.outage
        return super().card()

    def become(self, outage):
        self.outage = outage
        self.notify()


class ColdSetup(DispatchSetup):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.replica = LoadingReplica()
        self.wanted = 0
        config = self.core._config
        self.dispatcher = Dispatcher(
            *("m", [Endpoint("replica", self.replica)], config, self.clock), draw=lambda: 0.0, on_wanted=self.want
        )
        self.core = self.dispatcher.core

    def want(self):
        self.wanted += 1


async def test_requests_wait_for_a_model_that_loads_and_learn_when_it_is_ready():
    setup = ColdSetup()
    place = setup.check(1)
    assert (place.position, place.wait_s, place.ttft_s) == (0, 8.0, 8.0)
    async with setup.enqueue(make_dispatch_request(1)) as entry:
        waiting = asyncio.create_task(entry.wait_dispatched())
        await asyncio.sleep(0)
        assert entry.position().wait_s == 8.0
        setup.clock.now_s += 5.0
        setup.replica.become(ModelLoading(retry_after_s=3.0))
        assert entry.position().wait_s == 3.0
        setup.clock.now_s += 3.0
        setup.replica.become(None)
        await waiting
        assert entry.waited_ms[WaitCause.COLD_START] == pytest.approx(8000.0)
        assert entry.position() is None
    assert setup.core.predictor.calibration.compared == 0  # nothing is learnt of queues from it
    assert setup.wanted == 0


async def test_requests_ahead_add_to_the_predicted_wait_once_their_size_is_known():
    setup = ColdSetup()
    setup.replica.become(None)
    setup.core.refresh(setup.clock.now_s)
    setup.replica.become(ModelLoading(retry_after_s=8.0))
    entries = [setup.enqueue(make_dispatch_request(number)) for number in range(6)]
    for entry in entries:
        await entry.__aenter__()
    place = setup.check(7)
    assert place.position == 6
    assert place.wait_s >= 8.0
    for entry in entries:
        await entry.__aexit__(None, None, None)
    setup.assert_empty()


async def test_the_next_replica_is_expected_to_be_as_large_and_as_fast_as_the_one_before():
    """A model that is loaded on demand has another endpoint while it is away, and a new one after each load."""

    async def predicted(*, is_replaced):
        setup = ColdSetup()
        setup.replica.become(None)
        setup.replica.say(times=StepTimes(fixed_s=0.1, token_s=0.001))
        assert setup.check(0).wait_s == 0.0
        setup.replica.become(ModelLoading(retry_after_s=8.0))
        if is_replaced:
            setup.dispatcher.reconfigure([Endpoint("next", LoadingReplica())], setup.core._config, None)
        places = []
        async with AsyncExitStack() as stack:
            for number in range(1, 8):
                places.append(setup.check(number))
                await stack.enter_async_context(setup.enqueue(make_dispatch_request(number)))
        return [(place.position, place.wait_s, place.ttft_s) for place in places]

    kept = await predicted(is_replaced=False)
    assert await predicted(is_replaced=True) == kept
    assert kept[0][2] > 8.1, "a first step is part of the wait for the first token"
    assert kept[-1][2] > kept[0][2], "and so is what is ahead"


def test_a_request_that_may_not_wait_so_long_is_rejected_and_the_load_starts_anyway():
    setup = ColdSetup(max_wait_s={PriorityClass.STANDARD: 5.0})
    with pytest.raises(QueueFull) as refusal:
        setup.check(1)
    assert refusal.value.position.wait_s == 8.0
    assert refusal.value.retry_after_s >= 8.0
    assert setup.wanted == 1
    setup = ColdSetup()
    with pytest.raises(DeadlineUnmeetable):
        setup.check(2, ttft_deadline_s=NOW_S + 4.0)
    assert setup.wanted == 1


def test_the_predicted_first_token_includes_the_load():
    setup = ColdSetup()
    assert setup.check(1, ttft_deadline_s=NOW_S + 100.0).ttft_s == 8.0


async def test_a_failed_load_fails_all_waiting_requests_and_rejects_new_ones():
    setup = ColdSetup()
    async with setup.enqueue(make_dispatch_request(1)) as entry:
        waiting = asyncio.create_task(entry.wait_dispatched())
        await asyncio.sleep(0)
        setup.replica.become(ModelLoadFailed(retry_after_s=2.0))
        with pytest.raises(ModelLoadFailed) as failure:
            await waiting
        assert failure.value.retry_after_s == 2.0
    with pytest.raises(ModelLoadFailed):
        setup.check(2)
    assert setup.core.counters.rejections["model_load_failed"] == 2
    setup.assert_empty()


async def test_a_request_that_waited_too_long_learns_that_the_model_still_loads():
    setup = ColdSetup(max_wait_s={PriorityClass.STANDARD: 10.0})
    async with setup.enqueue(make_dispatch_request(1)) as entry:
        waiting = asyncio.create_task(entry.wait_dispatched())
        await asyncio.sleep(0)
        setup.clock.now_s += 11.0
        setup.dispatcher.refresh_and_dispatch()
        with pytest.raises(ModelLoading) as failure:
            await waiting
        assert failure.value.retry_after_s == 8.0


async def test_requests_leave_whose_deadline_ends_before_the_start_that_is_late():
    setup = ColdSetup()
    deadlines_s = {1: 9.0, 2: 20.0, 3: 9.0}
    async with AsyncExitStack() as stack:
        entries = {}
        for number, within_s in deadlines_s.items():
            entry = setup.enqueue(number, movable=number != 3, ttft_deadline_s=setup.clock.now_s + within_s)
            entries[number] = await stack.enter_async_context(entry)
        setup.dispatcher.check_overflow()
        assert [number for number, entry in entries.items() if entry.overflow_answer] == [], "8 s are in time for all"
        setup.clock.now_s += 4.0
        setup.replica.become(ModelLoading(retry_after_s=6.0))
        setup.dispatcher.check_overflow()
        assert [number for number, entry in entries.items() if entry.overflow_answer] == [1]
        setup.replica.become(ModelLoading(retry_after_s=30.0))
        setup.dispatcher.check_overflow()
        assert [number for number, entry in entries.items() if entry.overflow_answer] == [1, 2], "3 may not leave"
