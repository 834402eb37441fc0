"""The meter of the demand: arrivals with their tokens, and what waits and runs."""

import pytest

from maitred.core.errors import QueueFull
from maitred.core.flow import PriorityClass
from maitred.dispatch.config import DispatchConfig
from tests.support.dispatchers import DispatchSetup, enter, leave, make_dispatch_request


@pytest.fixture
def calls():
    return []


def metered(calls, **settings):
    setup = DispatchSetup(**settings)
    return setup, setup.dispatcher.meter_demand(lambda: calls.append(1))


async def test_what_is_dispatched_at_once_has_arrived_and_runs(calls):
    setup, meter = metered(calls)
    enter(setup.dispatcher.enqueue(make_dispatch_request(1, tokens=16, max_tokens=32)))
    setup.clock.now_s += 2.0
    demand = meter.read(setup.clock.monotonic_s())
    assert (demand.waiting, demand.running) == (0, 1)
    window = demand.window
    assert (window.requests, window.prompt_tokens, window.output_tokens) == (1, 16, 32)
    assert window.length_s == pytest.approx(2.0)
    assert calls == []


async def test_each_arrival_is_in_one_window(calls):
    setup, meter = metered(calls)
    enter(setup.dispatcher.enqueue(make_dispatch_request(1)))
    setup.clock.now_s += 1.0
    first = meter.read(setup.clock.monotonic_s()).window
    setup.clock.now_s += 1.0
    second = meter.read(setup.clock.monotonic_s()).window
    assert (first.requests, second.requests) == (1, 0)
    assert second.start_s == pytest.approx(first.start_s + first.length_s)


async def test_waiting_requests_count_with_their_tokens_and_the_oldest_wait(calls):
    setup, meter = metered(calls)
    for number in range(7):  # four run, three wait
        enter(setup.dispatcher.enqueue(make_dispatch_request(number, tokens=16, max_tokens=32)))
    assert len(calls) == 1, "the first of those that wait, and no other"
    setup.clock.now_s += 3.0
    demand = meter.read(setup.clock.monotonic_s())
    assert (demand.waiting, demand.running, demand.window.requests) == (3, 4, 7)
    assert (demand.waiting_prompt_tokens, demand.waiting_output_tokens) == (48, 96)
    assert demand.oldest_wait_s == pytest.approx(3.0, abs=0.1)


async def test_what_waits_at_a_replica_waits(calls):
    setup, meter = metered(calls)
    for number in range(3):
        enter(setup.dispatcher.enqueue(make_dispatch_request(number)))
    setup.replica.say(waiting=2, running=1, waiting_prompt_tokens=20)
    demand = meter.read(setup.clock.monotonic_s())
    assert (demand.waiting, demand.running, demand.waiting_prompt_tokens) == (2, 1, 20)


async def test_refused_requests_have_arrived_too(calls):
    setup, meter = metered(calls, config=DispatchConfig(max_waiting={PriorityClass.STANDARD: 1}))
    for number in range(5):
        enter(setup.dispatcher.enqueue(make_dispatch_request(number)))
    with pytest.raises(QueueFull):
        setup.dispatcher.load_shedder.check(make_dispatch_request(9), setup.clock.monotonic_s())
    assert meter.read(setup.clock.monotonic_s()).window.requests == 6


async def test_a_refused_request_counts_once_however_often_it_is_tried(calls):
    setup, meter = metered(calls, config=DispatchConfig(max_waiting={PriorityClass.STANDARD: 1}))
    entries = [setup.dispatcher.enqueue(make_dispatch_request(number)) for number in range(5)]
    for entry in entries:
        enter(entry)
    arrived_s = setup.clock.monotonic_s()
    for tokens in (16, 8):  # the second time with less to do
        with pytest.raises(QueueFull):
            setup.dispatcher.load_shedder.check(
                make_dispatch_request(9, tokens=tokens, arrived_s=arrived_s), setup.clock.monotonic_s()
            )
    assert meter.read(setup.clock.monotonic_s()).window.requests == 6
    setup.clock.now_s += 1.0
    leave(entries[0])
    enter(setup.dispatcher.enqueue(make_dispatch_request(9, arrived_s=arrived_s)))
    assert meter.read(setup.clock.monotonic_s()).window.requests == 0
    enter(setup.dispatcher.enqueue(make_dispatch_request(9, arrived_s=setup.clock.monotonic_s())))
    assert meter.read(setup.clock.monotonic_s()).window.requests == 1, "another one with the same id"


async def test_outputs_that_have_ended_count_with_their_lengths(calls):
    setup, meter = metered(calls)
    entries = [setup.dispatcher.enqueue(make_dispatch_request(number, max_tokens=32)) for number in range(2)]
    for entry in entries:
        enter(entry)
    entries[0].charge_tokens(prompt_tokens=16, output_tokens=5)
    leave(entries[0])
    window = meter.read(setup.clock.monotonic_s()).window
    assert window.output_tokens == 5 + 32


async def test_cached_prompt_tokens_are_apart(calls):
    setup, meter = metered(calls)
    for number in range(200):
        entry = setup.dispatcher.enqueue(make_dispatch_request(number, tokens=100))
        enter(entry)
        entry.charge_tokens(prompt_tokens=100, cached_tokens=75, output_tokens=1)
        leave(entry)
    window = meter.read(setup.clock.monotonic_s()).window
    assert window.prompt_tokens == pytest.approx(200 * 25, rel=0.01)
    assert window.cached_tokens == pytest.approx(200 * 75, rel=0.01)


async def test_a_queue_that_is_too_long_to_look_at_is_estimated(calls, monkeypatch):
    monkeypatch.setattr("maitred.dispatch.demand_meter._MOST_EXAMINED", 2)
    setup, meter = metered(calls)
    for number in range(10):
        enter(setup.dispatcher.enqueue(make_dispatch_request(number, tokens=16, max_tokens=32)))
    demand = meter.read(setup.clock.monotonic_s())
    assert (demand.waiting, demand.waiting_prompt_tokens, demand.waiting_output_tokens) == (6, 96, 192)
