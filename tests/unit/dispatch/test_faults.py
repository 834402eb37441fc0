"""A fault in a dispatch pass fails the request that it concerns; all others go on, and nothing stays held."""

import asyncio
from contextlib import suppress

import pytest

from maitred.core.errors import Bug, DeadlineExceeded
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.queue import QuotaQueue, WaitSpan
from tests.support.dispatchers import DispatchSetup


class Planted(Exception):
    """The fault that a test has planted."""


class Caller:
    """A task that waits in the queue, holds its place for a moment, and keeps its error."""

    def __init__(self, setup, number, **fields):
        self.entry = setup.enqueue(number, **fields)
        self.was_served = False
        self.error = None
        self.task = asyncio.create_task(self._sit())

    async def _sit(self):
        try:
            async with self.entry:
                await self.entry.wait_dispatched()
                self.was_served = True
                await asyncio.sleep(0)
        except Exception as error:
            self.error = error


async def turns(count=60):
    for _ in range(count):
        await asyncio.sleep(0)


def plant(monkeypatch, owner, name, *, culprit=None, after=False, times=1):
    """Has a method raise once: for the culprit, or at its first call; before or after it has done its work."""
    real, left = getattr(owner, name), [times]

    def faulty(*args, **fields):
        involves = culprit is None or any(
            argument is culprit or getattr(argument, "queued", None) is culprit for argument in args
        )
        if not left[0] or not involves:
            return real(*args, **fields)
        left[0] -= 1
        if after:
            real(*args, **fields)
        raise Planted

    monkeypatch.setattr(owner, name, faulty)
    return left


def full_setup(**settings):
    """A dispatcher whose only replica is busy, so that all who come wait."""
    setup = DispatchSetup(**settings)
    setup.replica.say(free_sequences=0, running=4, free_blocks=80)
    return setup


STEPS_OF_A_REQUEST = {
    "turns": lambda setup: (setup.core.allocator, "awaits_turns"),
    "share": lambda setup: (setup.core.allocator, "above_share"),
    "endpoint": lambda setup: (setup.core.allocator, "endpoint_for"),
    "deadline": lambda setup: (setup.core, "_would_miss_deadline"),
    "take": lambda setup: (setup.core.queues[-1].fair_queue, "take"),
    "prefill": lambda setup: (setup.core.selector, "prefill_s"),
    "quota": lambda setup: (setup.core.allocator, "allocate"),
    "learning": lambda setup: (setup.core.predictor, "on_dispatch"),
    "start": lambda setup: (setup.core, "_start"),
}


@pytest.mark.parametrize(
    ("step", "after"),
    [(step, False) for step in STEPS_OF_A_REQUEST]
    + [(step, True) for step in STEPS_OF_A_REQUEST if step not in ("take", "quota")],  # sums: done or not
)
async def test_a_fault_in_a_step_for_a_request_fails_that_one_alone(monkeypatch, step, after):
    setup = full_setup()
    callers = [Caller(setup, number, ttft_deadline_s=setup.clock.monotonic_s() + 60.0) for number in range(4)]
    await turns(5)
    culprit = callers[1]
    owner, name = STEPS_OF_A_REQUEST[step](setup)
    left = plant(monkeypatch, owner, name, culprit=culprit.entry.queued, after=after)
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turns()
    assert left == [0]
    assert isinstance(culprit.error, Bug)
    assert "req-1" in culprit.error.message
    assert [caller.was_served for caller in callers] == [True, False, True, True]
    setup.assert_empty()


STEPS_OF_NOBODY = {
    "order": lambda setup: (setup.core.queues[-1].fair_queue, "head"),
    "account": lambda setup: (setup.core.queues[-1].wait_account, "set_blocked_head"),
    "rate": lambda setup: (setup.core.predictor, "on_unsaturated"),
    "report": lambda setup: (setup.replica, "card"),
}


@pytest.mark.parametrize("step", STEPS_OF_NOBODY)
async def test_a_fault_that_no_request_has_caused_fails_nobody(monkeypatch, step):
    setup = full_setup()
    callers = [Caller(setup, number) for number in range(4)]
    await turns(5)
    owner, name = STEPS_OF_NOBODY[step](setup)
    left = plant(monkeypatch, owner, name)
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turns()
    setup.dispatcher.refresh_and_dispatch()
    await turns()
    assert left == [0]
    assert all(caller.was_served for caller in callers)
    setup.assert_empty()


async def test_requests_that_can_be_put_in_no_order_fail_and_nobody_waits_for_ever(monkeypatch):
    setup = full_setup()
    callers = [Caller(setup, number) for number in range(3)]
    await turns(5)
    plant(monkeypatch, setup.core.queues[-1].fair_queue, "head", times=2)
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turns()
    assert [type(caller.error) for caller in callers] == [Bug] * 3
    late = Caller(setup, 9)
    await turns()
    assert late.was_served
    setup.assert_empty()


async def test_an_account_that_always_fails_holds_up_nobody(monkeypatch):
    setup = full_setup()
    callers = [Caller(setup, number) for number in range(3)]
    await turns(5)
    plant(monkeypatch, setup.core.queues[-1].wait_account, "set_blocked_head", times=1_000)
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turns()
    assert all(caller.was_served for caller in callers)
    setup.assert_empty()


async def test_those_that_were_dispatched_before_the_fault_are_woken(monkeypatch):
    setup = full_setup()
    callers = [Caller(setup, number) for number in range(4)]
    await turns(5)
    plant(monkeypatch, setup.core.allocator, "endpoint_for", culprit=callers[3].entry.queued)
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turns()
    assert [caller.was_served for caller in callers] == [True, True, True, False]
    setup.assert_empty()


@pytest.mark.parametrize("name", ["on_waited", "_fail"])
async def test_a_fault_while_a_late_request_fails_lets_the_other_late_ones_fail(monkeypatch, name):
    setup = full_setup()
    callers = [Caller(setup, number, ttft_deadline_s=setup.clock.monotonic_s() + 1.0) for number in range(3)]
    await turns(5)
    owner = setup.core if name == "_fail" else setup.core.predictor
    plant(monkeypatch, owner, name, culprit=callers[1].entry.queued)
    setup.clock.now_s += 2.0
    setup.dispatcher.refresh_and_dispatch()
    await turns()
    assert [type(caller.error) for caller in callers] == [DeadlineExceeded, Bug, DeadlineExceeded]
    setup.assert_empty()


async def test_a_fault_while_requests_without_a_replica_fail_lets_the_others_fail(monkeypatch):
    setup = full_setup(max_wait_s={"standard": 1.0})
    callers = [Caller(setup, number) for number in range(3)]
    await turns(5)
    setup.replica.set_up(False)
    plant(monkeypatch, setup.core, "_fail", culprit=callers[0].entry.queued)
    setup.clock.now_s += 2.0
    setup.dispatcher.refresh_and_dispatch()
    await turns()
    assert [isinstance(caller.error, Bug) for caller in callers] == [True, False, False]
    assert all(caller.error is not None for caller in callers)
    setup.assert_empty()


async def test_a_fault_at_who_overtakes_fails_who_overtakes_and_not_the_head(monkeypatch):
    setup = full_setup(headroom=0.25)
    heads = [Caller(setup, number) for number in range(8)]
    await turns(5)
    small = Caller(setup, 50, org="globex")
    await turns(5)
    plant(monkeypatch, setup.core.allocator, "endpoint_for", culprit=small.entry.queued)
    setup.replica.say(free_sequences=1, running=3, free_blocks=90)
    await turns()
    assert isinstance(small.error, Bug)
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    for _ in range(10):
        await turns(10)
        setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    assert all(head.was_served for head in heads)
    setup.assert_empty()


@pytest.mark.parametrize("step", ["span", "listener"])
async def test_a_fault_after_a_pass_keeps_nobody_asleep(monkeypatch, step):
    setup = full_setup()
    callers = [Caller(setup, number) for number in range(3)]
    await turns(5)
    if step == "span":
        plant(monkeypatch, WaitSpan, "close")
    else:
        listener = type("Listener", (), {"__call__": lambda self: None})
        plant(monkeypatch, listener, "__call__")
        setup.dispatcher.set_dispatch_listener(listener())
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turns()
    faulty = [caller for caller in callers if isinstance(caller.error, Bug)]
    assert len(faulty) == (step == "span")
    assert all(caller.was_served for caller in callers if caller not in faulty)
    setup.dispatcher.set_dispatch_listener(None)
    setup.assert_empty()


@pytest.mark.parametrize(
    ("owner", "name"), [(DispatchCore, "join"), (DispatchCore, "dispatch_now"), (QuotaQueue, "enqueue")]
)
async def test_a_fault_while_a_request_joins_leaves_nothing_behind(monkeypatch, owner, name):
    setup = full_setup()
    waiting = Caller(setup, 1)
    await turns(5)
    plant(monkeypatch, owner, name, after=name != "dispatch_now")
    faulty = Caller(setup, 2)
    await turns(5)
    assert isinstance(faulty.error, Planted)
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turns()
    assert waiting.was_served
    setup.assert_empty()


async def test_a_joiner_gets_no_fault_of_another_that_its_pass_meets(monkeypatch):
    setup = full_setup()
    culprit = Caller(setup, 1)
    await turns(5)
    setup.replica._load = setup.replica._load.__class__(
        free_blocks=100, total_blocks=100, free_sequences=4, step_tokens=256
    )  # nobody is told
    plant(monkeypatch, setup.core.allocator, "endpoint_for", culprit=culprit.entry.queued)
    joiner = Caller(setup, 2)
    await turns()
    assert isinstance(culprit.error, Bug)
    assert joiner.was_served
    setup.assert_empty()


async def test_a_replica_whose_state_cannot_be_read_is_passed_over(monkeypatch):
    setup = DispatchSetup(replicas=2)
    plant(monkeypatch, setup.replicas[0], "card", times=1_000)
    callers = [Caller(setup, number) for number in range(3)]
    await turns()
    assert all(caller.was_served for caller in callers)
    states = setup.core.endpoint_states
    assert [state.ready for state in states] == [False, True]
    setup.assert_empty()


async def test_the_periodic_check_outlives_a_fault_in_overflow(monkeypatch):
    setup = full_setup()
    caller = Caller(setup, 1)
    await turns(5)
    left = plant(monkeypatch, setup.dispatcher, "check_overflow")
    monkeypatch.setattr("maitred.dispatch.dispatcher._POLL_INTERVAL_S", 0.001)
    checks = asyncio.create_task(setup.dispatcher.run())
    async with asyncio.timeout(30):
        while left[0] and not checks.done():  # noqa: ASYNC110 - nobody is told of a check
            await asyncio.sleep(0.001)
    await turns()
    assert not checks.done()
    checks.cancel()
    with suppress(asyncio.CancelledError):
        await checks
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turns()
    assert caller.was_served
