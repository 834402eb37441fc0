"""A rejection is reused for a moment, and only for requests that would be rejected as well."""

import asyncio

import pytest

from maitred.core.errors import DeadlineUnmeetable
from maitred.core.replica import StepTimes
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.queue import QueueState
from tests.support.dispatchers import DispatchSetup, enter, leave

IN_S = 3.0
"""Time limit of the first token; twelve requests for four slots take longer."""


class Overloaded:
    """Twelve requests of one key before a replica of four slots, and one more that was rejected."""

    def __init__(self):
        self.setup = DispatchSetup(replicas=2)
        self.setup.replicas[1].set_up(False)
        self.setup.replica.say(times=StepTimes(fixed_s=0.1, token_s=0.001))
        self.entries = []
        for number in range(12):
            entry = self.setup.enqueue(number, ttft_deadline_s=self.setup.clock.now_s + 2.0)
            enter(entry)
            self.entries.append(entry)
        self.rejection = self.reject()

    def reject(self, **fields):
        """The predicted position of a request that is rejected; None: it is accepted."""
        arrived_s = self.setup.clock.now_s
        fields = {"ttft_deadline_s": arrived_s + IN_S, "arrived_s": arrived_s} | fields
        try:
            self.setup.check(99, **fields)
        except DeadlineUnmeetable as refusal:
            return refusal.position
        return None

    def slow_down(self):
        """Steps take twice as long from now on, which nobody could foresee."""
        self.setup.replica.say(times=StepTimes(fixed_s=0.2, token_s=0.001))


@pytest.fixture
async def overloaded():
    return Overloaded()


async def test_a_rejection_is_repeated_with_a_wait_that_is_shorter_by_the_time_since(overloaded):
    overloaded.slow_down()
    overloaded.setup.clock.now_s += 0.02
    again = overloaded.reject()
    assert again.position == overloaded.rejection.position
    assert again.wait_s == pytest.approx(overloaded.rejection.wait_s - 0.02)
    assert again.ttft_s == pytest.approx(overloaded.rejection.ttft_s - 0.02)
    assert overloaded.reject(tokens=18).ttft_s == again.ttft_s


async def test_a_cached_rejection_expires_after_a_moment(overloaded):
    overloaded.slow_down()
    overloaded.setup.clock.now_s += 0.11
    assert overloaded.reject().ttft_s > overloaded.rejection.ttft_s


@pytest.mark.parametrize("other", [{"tokens": 128}, {"tokens": 8, "max_tokens": 4}, {"prompts": 2}, {"org": "other"}])
async def test_requests_of_another_kind_are_predicted_themselves(overloaded, other):
    overloaded.slow_down()
    assert overloaded.reject(**other).ttft_s != overloaded.rejection.ttft_s


async def test_a_request_that_would_go_before_the_rejected_one_is_predicted_itself(overloaded):
    overloaded.slow_down()
    pressing = overloaded.reject(ttft_deadline_s=overloaded.setup.clock.now_s + 0.1)
    assert pressing.position < overloaded.rejection.position


async def test_no_request_is_rejected_only_for_the_prediction_of_another(overloaded):
    predicted_s = overloaded.rejection.ttft_s
    assert overloaded.reject(ttft_deadline_s=overloaded.setup.clock.now_s + predicted_s + 0.01) is None
    overloaded.setup.clock.now_s += 0.04
    assert overloaded.reject(ttft_deadline_s=overloaded.setup.clock.now_s + predicted_s - 0.02) is None


async def test_a_cached_rejection_is_dropped_when_a_waiting_request_leaves(overloaded):
    other = overloaded.setup.enqueue(20, "other", ttft_deadline_s=overloaded.setup.clock.now_s + 100)
    enter(other)
    overloaded.setup.clock.now_s += 0.11
    rejection = overloaded.reject()
    overloaded.slow_down()
    assert overloaded.reject() == rejection
    overloaded.setup.core.leave(other.queued, overloaded.setup.clock.now_s, finished=False)
    assert overloaded.reject() != rejection


async def test_a_cached_rejection_is_dropped_when_more_of_its_tenant_wait(overloaded):
    enter(overloaded.setup.enqueue(13, ttft_deadline_s=overloaded.setup.clock.now_s + 2.0))
    assert overloaded.reject().position == overloaded.rejection.position + 1


async def test_a_cached_rejection_is_dropped_with_new_settings(overloaded):
    overloaded.slow_down()
    config = DispatchConfig(headroom=0.0, unknown_output_share=1.0)
    overloaded.setup.dispatcher.reconfigure(
        [endpoint_state.endpoint for endpoint_state in overloaded.setup.core.endpoint_states], config, None
    )
    assert overloaded.reject().ttft_s > overloaded.rejection.ttft_s


async def test_a_cached_rejection_is_dropped_when_another_replica_is_ready(overloaded):
    first, second = overloaded.setup.replicas
    second.say(times=first.load().times)
    second.set_up(True)
    assert overloaded.reject() != overloaded.rejection


async def test_cached_rejections_of_many_keys_are_bounded(overloaded):
    last = overloaded.setup.dispatcher.load_shedder._rejections
    for number in range(1100):
        overloaded.setup.clock.now_s += 0.001
        overloaded.reject(org=f"org-{number}", ttft_deadline_s=overloaded.setup.clock.now_s)
    assert len(last._last_by_flow) <= 1024


async def test_a_cached_rejection_is_dropped_when_nobody_waits(overloaded):
    assert overloaded.reject(org="other") is not None
    while overloaded.entries:
        for entry in [entry for entry in overloaded.entries if entry.queued.state is QueueState.DISPATCHED]:
            overloaded.entries.remove(entry)
            leave(entry)
        overloaded.setup.replica.say()
        await asyncio.sleep(0)
    overloaded.setup.assert_empty()
    assert overloaded.reject(org="other") is None
