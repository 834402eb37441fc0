"""A refusal stands for a moment, and only for those whom it would have met as well."""

import asyncio

import pytest

from maitred.core.errors import DeadlineUnmeetable
from maitred.core.replica import StepTimes
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.pool_queue import QueueState
from tests.support.dispatchers import Desk, enter, leave

IN_S = 3.0
"""In which the first token must come; twelve requests for four places take longer."""


class Crowd:
    """Twelve requests of one key at a desk of four places, and one more that was refused."""

    def __init__(self):
        self.desk = Desk(replicas=2)
        self.desk.replicas[1].set_up(False)
        self.desk.replica.say(times=StepTimes(fixed_s=0.1, token_s=0.001))
        self.seats = []
        for number in range(12):
            seat = self.desk.seat(number, deadline_s=self.desk.clock.now_s + 2.0)
            enter(seat)
            self.seats.append(seat)
        self.told = self.refused()

    def refused(self, **fields):
        """Where it stands who is refused; None: it is let in."""
        arrived_s = self.desk.clock.now_s
        fields = {"deadline_s": arrived_s + IN_S, "arrived_s": arrived_s} | fields
        try:
            self.desk.check(99, **fields)
        except DeadlineUnmeetable as refusal:
            return refusal.position
        return None

    def slower(self):
        """Steps take twice as long from now on, which nobody could foresee."""
        self.desk.replica.say(times=StepTimes(fixed_s=0.2, token_s=0.001))


@pytest.fixture
async def crowd():
    return Crowd()


async def test_the_same_moment_is_told_from_closer_by(crowd):
    crowd.slower()
    crowd.desk.clock.now_s += 0.02
    again = crowd.refused()
    assert again.position == crowd.told.position
    assert again.wait_s == pytest.approx(crowd.told.wait_s - 0.02)
    assert again.ttft_s == pytest.approx(crowd.told.ttft_s - 0.02)
    assert crowd.refused(tokens=18).ttft_s == again.ttft_s


async def test_it_is_looked_at_anew_after_a_moment(crowd):
    crowd.slower()
    crowd.desk.clock.now_s += 0.11
    assert crowd.refused().ttft_s > crowd.told.ttft_s


@pytest.mark.parametrize("other", [{"tokens": 128}, {"tokens": 8, "max_tokens": 4}, {"prompts": 2}, {"org": "other"}])
async def test_others_are_looked_at_themselves(crowd, other):
    crowd.slower()
    assert crowd.refused(**other).ttft_s != crowd.told.ttft_s


async def test_who_goes_before_the_refused_one_is_looked_at_itself(crowd):
    crowd.slower()
    pressing = crowd.refused(deadline_s=crowd.desk.clock.now_s + 0.1)
    assert pressing.position < crowd.told.position


async def test_nobody_is_refused_for_what_was_told_to_others_alone(crowd):
    told_s = crowd.told.ttft_s
    assert crowd.refused(deadline_s=crowd.desk.clock.now_s + told_s + 0.01) is None
    crowd.desk.clock.now_s += 0.04
    assert crowd.refused(deadline_s=crowd.desk.clock.now_s + told_s - 0.02) is None


async def test_it_falls_when_somebody_gives_up_waiting(crowd):
    other = crowd.desk.seat(20, "other", deadline_s=crowd.desk.clock.now_s + 100)
    enter(other)
    crowd.desk.clock.now_s += 0.11
    told = crowd.refused()
    crowd.slower()
    assert crowd.refused() == told
    crowd.desk.floor.leave(other.queued, crowd.desk.clock.now_s, finished=False)
    assert crowd.refused() != told


async def test_it_falls_when_more_of_its_tenant_wait(crowd):
    enter(crowd.desk.seat(13, deadline_s=crowd.desk.clock.now_s + 2.0))
    assert crowd.refused().position == crowd.told.position + 1


async def test_it_falls_with_the_settings(crowd):
    crowd.slower()
    config = DispatchConfig(headroom=0.0, unknown_output_share=1.0)
    crowd.desk.dispatcher.reconfigure([station.endpoint for station in crowd.desk.floor.endpoint_states], config, None)
    assert crowd.refused().ttft_s > crowd.told.ttft_s


async def test_it_falls_when_another_replica_is_ready(crowd):
    first, second = crowd.desk.replicas
    second.say(times=first.load().times)
    second.set_up(True)
    assert crowd.refused() != crowd.told


async def test_those_of_many_keys_are_forgotten(crowd):
    last = crowd.desk.dispatcher.admission._rejections
    for number in range(1100):
        crowd.desk.clock.now_s += 0.001
        crowd.refused(org=f"org-{number}", deadline_s=crowd.desk.clock.now_s)
    assert len(last) <= 1024


async def test_it_falls_when_nobody_waits_any_more(crowd):
    assert crowd.refused(org="other") is not None
    while crowd.seats:
        for seat in [seat for seat in crowd.seats if seat.queued.state is QueueState.RELEASED]:
            crowd.seats.remove(seat)
            leave(seat)
        crowd.desk.replica.say()
        await asyncio.sleep(0)
    crowd.desk.assert_empty()
    assert crowd.refused(org="other") is None
