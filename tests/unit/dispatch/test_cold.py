"""A replica that comes because requests wait for it."""

import asyncio

import pytest

from maitred.core.errors import DeadlineUnmeetable, ModelLoadFailed, ModelLoading, QueueFull
from maitred.core.flow import PriorityClass
from maitred.core.request import WaitCause
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.request import Endpoint
from tests.support.dispatchers import Desk, SaidReplica, errand

NOW_S = 1_000_000.0


class Coming(SaidReplica):
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
        self.tell()


class ColdDesk(Desk):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.replica = Coming()
        self.wanted = 0
        config = self.floor._config
        self.dispatcher = Dispatcher(
            *("m", [Endpoint("post", self.replica)], config, self.clock), draw=lambda: 0.0, wanted=self.want
        )
        self.floor = self.dispatcher.core

    def want(self):
        self.wanted += 1


async def test_requests_wait_for_it_and_are_told_when_it_comes():
    desk = ColdDesk()
    place = desk.check(1)
    assert (place.position, place.wait_s, place.ttft_s) == (0, 8.0, 8.0)
    async with desk.seat(errand(1)) as seat:
        waiting = asyncio.create_task(seat.wait_dispatched())
        await asyncio.sleep(0)
        assert seat.position().wait_s == 8.0
        desk.clock.now_s += 5.0
        desk.replica.become(ModelLoading(retry_after_s=3.0))
        assert seat.position().wait_s == 3.0
        desk.clock.now_s += 3.0
        desk.replica.become(None)
        await waiting
        assert seat.waited_ms[WaitCause.COLD_START] == pytest.approx(8000.0)
        assert seat.position() is None
    assert desk.floor.predictor.calibration.compared == 0  # nothing is learnt of queues from it
    assert desk.wanted == 0


async def test_what_is_ahead_counts_too_once_its_size_is_known():
    desk = ColdDesk()
    desk.replica.become(None)
    desk.floor.refresh(desk.clock.now_s)
    desk.replica.become(ModelLoading(retry_after_s=8.0))
    seats = [desk.seat(errand(number)) for number in range(6)]
    for seat in seats:
        await seat.__aenter__()
    place = desk.check(7)
    assert place.position == 6
    assert place.wait_s >= 8.0
    for seat in seats:
        await seat.__aexit__(None, None, None)
    desk.assert_empty()


def test_who_may_not_wait_so_long_is_refused_and_it_is_wanted_all_the_same():
    desk = ColdDesk(max_wait_s={PriorityClass.STANDARD: 5.0})
    with pytest.raises(QueueFull) as refusal:
        desk.check(1)
    assert refusal.value.position.wait_s == 8.0
    assert refusal.value.retry_after_s >= 8.0
    assert desk.wanted == 1
    desk = ColdDesk()
    with pytest.raises(DeadlineUnmeetable):
        desk.check(2, deadline_s=NOW_S + 4.0)
    assert desk.wanted == 1


def test_its_deadline_counts_the_load():
    desk = ColdDesk()
    assert desk.check(1, deadline_s=NOW_S + 100.0).ttft_s == 8.0


async def test_a_load_that_failed_fails_all_who_wait_and_refuses_who_comes():
    desk = ColdDesk()
    async with desk.seat(errand(1)) as seat:
        waiting = asyncio.create_task(seat.wait_dispatched())
        await asyncio.sleep(0)
        desk.replica.become(ModelLoadFailed(retry_after_s=2.0))
        with pytest.raises(ModelLoadFailed) as failure:
            await waiting
        assert failure.value.retry_after_s == 2.0
    with pytest.raises(ModelLoadFailed):
        desk.check(2)
    assert desk.floor.counters.rejections["model_load_failed"] == 2
    desk.assert_empty()


async def test_who_outlasts_its_class_is_told_that_it_still_comes():
    desk = ColdDesk(max_wait_s={PriorityClass.STANDARD: 10.0})
    async with desk.seat(errand(1)) as seat:
        waiting = asyncio.create_task(seat.wait_dispatched())
        await asyncio.sleep(0)
        desk.clock.now_s += 11.0
        desk.dispatcher.dispatch_ready()
        with pytest.raises(ModelLoading) as failure:
            await waiting
        assert failure.value.retry_after_s == 8.0
