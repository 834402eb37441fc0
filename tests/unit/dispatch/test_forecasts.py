"""A request is forecast once while nothing changes, and anew when something has."""

import pytest
from msgspec.structs import replace

from maitred.core.replica import StepTimes
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.request import Endpoint
from maitred.fairness.config import QueueOrderConfig
from tests.support.dispatchers import EMPTY, DispatchSetup, ScriptedReplica, make_dispatch_request


@pytest.fixture
def replica():
    return ScriptedReplica()


@pytest.fixture
def core(replica):
    return DispatchCore([Endpoint("local", replica)], DispatchConfig())


def forecast(core, now_s, **fields):
    return core.forecast_cache.forecast_and_store(
        core.new_entry(make_dispatch_request(**fields)), core.refresh(now_s), now_s
    )


def test_a_request_that_asks_and_then_joins_gets_the_same_forecast(core):
    assert forecast(core, 0.001) is forecast(core, 0.002)


def test_another_request_or_a_later_one_gets_its_own_forecast(core):
    first = forecast(core, 0.001)
    assert forecast(core, 0.002, max_tokens=11) is not first
    assert forecast(core, 0.002) is not first
    assert forecast(core, 0.1) is not forecast(core, 0.2)


def test_after_a_report_or_another_join_the_forecast_is_made_anew(core, replica):
    first = forecast(core, 0.001)
    replica._load = replace(EMPTY, free_sequences=1)
    second = forecast(core, 0.001)
    assert second is not first
    core.join(core.new_entry(make_dispatch_request("another")), 0.001)
    third = forecast(core, 0.001)
    assert third is not second
    assert third.ahead.entries == 1


def test_the_forecast_of_a_waiting_request_is_always_made_anew(core, replica):
    replica._load = replace(EMPTY, free_sequences=0)
    waiting = [core.new_entry(make_dispatch_request(name)) for name in ("one", "two")]
    for queued in waiting:
        core.join(queued, 0.0)
    ready = core.refresh(0.0)
    places = [core.forecast_cache.forecast(queued, ready, 0.0).ahead.entries for queued in waiting]
    assert places == [0, 1]


def test_waiting_requests_are_predicted_to_start_with_a_step(replica):
    core = DispatchCore([Endpoint("local", replica)], DispatchConfig(line=QueueOrderConfig(policy="fifo")))
    times = StepTimes(fixed_s=0.1, token_s=0.001)
    replica._load = replace(EMPTY, running=4, free_sequences=4, times=times)
    core.refresh(0.0)
    at_once, later = forecast(core, 0.01), forecast(core, 0.07)
    assert at_once.prefill_s - later.prefill_s == pytest.approx(0.06), "less of the step under way is left"
    replica._load = replace(EMPTY, running=4, free_sequences=0, times=times)
    core.refresh(0.1)
    waits, still = forecast(core, 0.11), forecast(core, 0.17)
    assert not waits.wait.at_once
    assert waits.prefill_s == still.prefill_s > at_once.prefill_s


async def test_a_predicted_wait_counts_running_requests_and_not_ended_ones():
    """Two long answers hold all blocks, where short ones with long prompts came and went, many at a time."""
    setup = DispatchSetup()
    setup.replica.say(free_sequences=100, times=StepTimes(fixed_s=0.01, token_s=0.001))
    outlook = setup.core.predictor
    for number in range(200):
        outlook.on_prompt(400, 0)
        outlook.outputs.observe("others", 4 + number % 2, 4 + number % 2)
    long = {"tokens": 16, "max_tokens": 784}
    async with setup.enqueue("one", "one", **long), setup.enqueue("two", "two", **long):
        setup.dispatcher.refresh_and_dispatch()
        setup.replica.say(running=2, free_sequences=98, free_blocks=0)
        wait = forecast(setup.core, setup.clock.monotonic_s(), number="three", org="three", **long).wait
        assert not wait.at_once
        assert wait.seconds == pytest.approx(785 * (0.01 + 2 * 0.001), rel=0.1)
