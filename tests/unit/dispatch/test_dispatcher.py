"""Dispatch entries: when they are dispatched, and that leaving at any moment frees all credits."""

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest

from maitred.core.errors import DeadlineExceeded, DeadlineUnmeetable, QueueFull, ReplicaLost, ReplicaUnavailable
from maitred.core.flow import PriorityClass
from maitred.core.replica import StepTimes
from maitred.dispatch.config import TenantPoolConfig
from maitred.fairness.config import QueueOrderConfig
from tests.support.dispatchers import DispatchSetup, leave, make_dispatch_request


async def turn():
    """Lets everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


class QueuedCaller:
    """A task that enters the queue and holds its allocation until `go`."""

    def __init__(self, setup, *args, **fields):
        self.entry = setup.enqueue(*args, **fields)
        self.endpoint = None
        self.error = None
        self._go = asyncio.Event()
        self.task = asyncio.create_task(self._sit())

    async def _sit(self):
        try:
            async with self.entry:
                self.endpoint = await self.entry.wait_dispatched()
                await self._go.wait()
        except Exception as error:
            self.error = error

    async def go(self):
        self._go.set()
        await self.task

    async def cancel(self):
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def test_a_request_that_fits_is_dispatched_at_once():
    setup = DispatchSetup()
    async with setup.enqueue() as entry:
        assert (await entry.wait_dispatched()).name == "replica-0"
        assert entry.position() is None
        assert entry.expected_tokens == 32
        assert entry.waited_ms == {}
        assert setup.core.running == 1
    setup.assert_empty()


async def test_a_resumed_request_keeps_its_credits_and_others_wait():
    setup = DispatchSetup()
    setup.replica.say(free_sequences=0, running=4, free_blocks=80)
    entries = [setup.dispatcher.reattach(make_dispatch_request(number), "replica-0") for number in range(4)]
    assert setup.dispatcher.reattach(make_dispatch_request(9), "replica-9") is None
    async with AsyncExitStack() as running:
        for entry in entries:
            await running.enter_async_context(entry)
            assert (await entry.wait_dispatched()).name == "replica-0"
            entry.charge_tokens(prompt_tokens=16)  # the engine counts it
        caller = QueuedCaller(setup, 5)
        await turn()
        assert caller.endpoint is None
        assert setup.core.running == 4
    setup.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turn()
    assert caller.endpoint is not None
    await caller.go()
    setup.assert_empty()


async def test_the_rest_waits_until_a_report_shows_free_slots():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(6)]
    await turn()
    assert [caller.endpoint is not None for caller in callers] == [True] * 4 + [False] * 2
    assert callers[5].entry.position().position == 1
    for caller in callers[:4]:
        setup.replica.submit()
        caller.entry.on_submitted()
    setup.replica.say(free_sequences=0, running=4, free_blocks=80)
    await turn()
    assert callers[4].endpoint is None
    setup.replica.say(free_sequences=1, running=3, free_blocks=85)
    await turn()
    assert callers[4].endpoint is not None
    assert callers[5].endpoint is None
    for caller in callers:
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_a_request_that_leaves_before_it_was_submitted_frees_its_credits():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(5)]
    await turn()
    await callers[0].go()
    await turn()
    assert callers[4].endpoint is not None
    for caller in callers:
        await caller.go()
    setup.assert_empty()


async def test_kv_blocks_are_credits_too():
    setup = DispatchSetup()
    big = [QueuedCaller(setup, number, tokens=500, max_tokens=300) for number in range(3)]  # 50 blocks each
    await turn()
    assert [caller.endpoint is not None for caller in big] == [True, True, False]
    setup.clock.now_s += 2.0
    await big[0].go()
    await turn()
    assert big[2].endpoint is not None
    assert big[2].entry.waited_ms == {"kv_full": pytest.approx(2000.0)}
    for caller in big:
        await caller.go()
    setup.assert_empty()


async def test_a_request_larger_than_the_replica_is_dispatched_when_the_replica_is_empty():
    setup = DispatchSetup()
    small = QueuedCaller(setup, 1)
    await turn()
    large = QueuedCaller(setup, 2, tokens=4000, max_tokens=90, choices=9)
    await turn()
    assert large.endpoint is None
    await small.go()
    await turn()
    assert large.endpoint is not None
    await large.go()
    setup.assert_empty()


async def test_a_request_with_more_sequences_than_slots_is_dispatched_when_a_quarter_of_them_is_free():
    setup = DispatchSetup(headroom=0.0)
    small = [QueuedCaller(setup, number) for number in range(4)]
    await turn()
    large = QueuedCaller(setup, 5, choices=64, max_tokens=8)
    after = QueuedCaller(setup, 6)
    await turn()
    assert large.endpoint is None
    await small[0].go()
    await turn()
    assert large.endpoint is not None
    for caller in (*small[1:], large):
        setup.replica.submit()
        caller.entry.on_submitted()
    # The replica has taken its sequences, which run by turns; others wait for what it reports as free.
    setup.replica.say(running=4, waiting=63, free_sequences=0)
    await turn()
    assert after.endpoint is None
    setup.replica.say(running=3, waiting=0, free_sequences=1)
    await turn()
    assert after.endpoint is not None
    for caller in (*small[1:], large, after):
        await caller.go()
    setup.assert_empty()


async def test_the_moment_before_a_large_request_is_reported_is_not_foreseen_as_the_whole_of_it():
    setup = DispatchSetup()
    large = QueuedCaller(setup, 1, "flood", choices=2048, max_tokens=8)
    await turn()
    assert large.endpoint is not None
    assert setup.core.endpoint_states[0].free.slots == -1
    assert setup.check(2, "light") is not None
    setup.replica.submit()
    large.entry.on_submitted()
    setup.replica.say(running=4, waiting=2044, free_sequences=1)
    assert setup.core.endpoint_states[0].free.slots == 1
    await large.go()
    setup.assert_empty()


async def test_large_requests_take_turns_one_after_the_other_and_hold_up_nobody_meanwhile():
    setup = DispatchSetup()
    first, second, third = (QueuedCaller(setup, number, "flood", choices=64, max_tokens=8) for number in range(3))
    await turn()
    setup.replica.submit()
    first.entry.on_submitted()
    # Beside the one that takes turns, a quarter of the slots is reported as free. It is for smaller requests.
    setup.replica.say(running=4, waiting=60, free_sequences=1)
    await turn()
    assert [caller.endpoint is not None for caller in (first, second, third)] == [True, False, False]
    for number in range(3, 8):
        light = QueuedCaller(setup, number, "flood" if number % 2 else "light")
        await turn()
        assert light.endpoint is not None
        await light.go()
    await third.cancel()
    setup.replica.say(running=4, waiting=0, free_sequences=0)
    assert setup.core.queues[0].waiting_in(PriorityClass.STANDARD) == 1
    setup.replica.say(running=3, waiting=0, free_sequences=1)
    await turn()
    assert second.endpoint is not None
    for caller in (first, second):
        await caller.go()
    setup.assert_empty()


async def test_a_large_request_charges_its_quota_for_no_more_than_its_size():
    setup = DispatchSetup(headroom=0.25, pools={"gold": TenantPoolConfig(tenants=["gold"], share=0.25)})
    setup.replica.say(guest_places=2)
    large = QueuedCaller(setup, 1, "flood", choices=64, max_tokens=8)
    await turn()
    assert large.endpoint is not None
    setup.replica.submit()
    large.entry.on_submitted()
    setup.replica.say(running=3, waiting=61, free_sequences=1, guest_places=2)
    light, gold = QueuedCaller(setup, 2, "light"), QueuedCaller(setup, 3, "gold")
    await turn()
    assert (light.endpoint is not None, gold.endpoint is not None) == (True, True)
    for caller in (large, light, gold):
        await caller.go()
    assert all(queue.quota.used.slots == 0 for queue in setup.core.queues)
    setup.assert_empty()


async def test_a_request_larger_than_a_learnt_window_leaves_its_headroom_to_others():
    setup = DispatchSetup(headroom=0.25, reports_capacity=False)
    slots = setup.core.endpoint_states[0]
    setup.check(9, "light")
    large = QueuedCaller(setup, 1, "flood", choices=4096, max_tokens=8)
    await turn()
    assert large.endpoint is not None
    assert 0 < slots.free.slots < slots.total.slots
    light = QueuedCaller(setup, 2, "light")
    await turn()
    assert light.endpoint is not None
    for caller in (large, light):
        await caller.go()
    setup.assert_empty()


async def test_a_request_can_be_cancelled_while_it_waits():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(5)]
    await turn()
    await callers[4].cancel()
    assert setup.core.waiting == 0
    assert setup.core.counters.left_waiting == 1
    for caller in callers[:4]:
        await caller.cancel()
    setup.assert_empty()


async def test_a_request_can_be_cancelled_in_the_moment_of_its_dispatch():
    setup = DispatchSetup()
    first = [QueuedCaller(setup, number) for number in range(4)]
    await turn()
    second, third = QueuedCaller(setup, 5), QueuedCaller(setup, 6)
    await turn()
    leave(first[0].entry)
    setup.dispatcher.refresh_and_dispatch()
    assert setup.core.running == 4, "the second was granted, and its task has not run yet"
    second.task.cancel()
    await turn()
    assert second.endpoint is None
    assert third.endpoint is not None
    for caller in (*first, third):
        await caller.go()
    setup.assert_empty()


async def test_leaving_twice_frees_credits_once():
    setup = DispatchSetup()
    async with setup.enqueue() as entry:
        await entry.wait_dispatched()
        leave(entry)
    setup.assert_empty()


async def test_a_request_that_finds_credits_has_them_as_soon_as_it_has_joined():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(5)]
    await asyncio.sleep(0)
    assert [caller.endpoint is not None for caller in callers] == [True, True, True, True, False]
    for caller in callers:
        await caller.go()


async def test_several_slots_that_come_free_take_one_dispatch_pass():
    setup = DispatchSetup()
    leaving = [QueuedCaller(setup, number) for number in range(4)]
    waiting = [QueuedCaller(setup, number) for number in range(4, 8)]
    await turn()
    turns = []
    decide = setup.core.run_dispatch_pass
    setup.core.run_dispatch_pass = lambda *moment: turns.append(1) or decide(*moment)
    await asyncio.gather(*(caller.go() for caller in leaving))
    await turn()
    assert all(caller.endpoint for caller in waiting)
    assert len(turns) == 1
    for caller in waiting:
        await caller.go()


async def test_a_deadline_that_passes_while_a_request_waits_fails_it():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(4)]
    await turn()
    late = QueuedCaller(setup, 9, ttft_deadline_s=setup.clock.now_s + 5)
    await turn()
    setup.clock.now_s += 4.9
    setup.dispatcher.refresh_and_dispatch()
    await turn()
    assert late.error is None
    setup.clock.now_s += 0.2
    setup.dispatcher.refresh_and_dispatch()
    await turn()
    assert isinstance(late.error, DeadlineExceeded)
    for caller in callers:
        await caller.go()
    setup.assert_empty()


async def test_without_a_replica_new_requests_are_rejected_and_old_ones_wait():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(6)]
    await turn()
    for caller in callers[:4]:
        caller.entry.on_submitted()
    setup.replica.set_up(False)
    with pytest.raises(ReplicaUnavailable) as refused:
        setup.check(7)
    assert refused.value.retry_after_s == 3.0
    for caller in callers[:4]:
        await caller.cancel()
    await turn()
    assert callers[4].endpoint is None
    setup.clock.now_s += 3.0
    setup.replica.set_up(True)
    await turn()
    assert callers[4].endpoint is not None
    assert callers[4].entry.waited_ms["cold_start"] == pytest.approx(3000.0)
    for caller in callers[4:]:
        await caller.go()
    setup.assert_empty()


async def test_no_request_waits_for_ever_for_a_replica():
    setup = DispatchSetup(max_wait_s={PriorityClass.STANDARD: 10.0})
    setup.replica.set_up(False)
    caller = QueuedCaller(setup)
    await turn()
    setup.clock.now_s += 9.0
    setup.dispatcher.refresh_and_dispatch()
    await turn()
    assert caller.error is None
    setup.clock.now_s += 2.0
    setup.dispatcher.refresh_and_dispatch()
    await turn()
    assert isinstance(caller.error, ReplicaUnavailable)
    setup.assert_empty()


async def test_a_lost_replica_has_all_its_credits_when_it_is_back():
    setup = DispatchSetup()
    with suppress(ReplicaLost):
        async with setup.enqueue() as entry:
            await entry.wait_dispatched()
            entry.on_submitted()
            setup.replica.set_up(False)
            raise ReplicaLost
    setup.replica.set_up(True)
    setup.core.refresh(setup.clock.now_s)
    assert setup.core.endpoint_states[0].free[:2] == (4, 100)
    setup.assert_empty()


async def test_a_requeued_request_goes_first_and_to_another_replica_and_is_charged_once():
    setup = DispatchSetup(replicas=2)
    async with AsyncExitStack() as stack:
        entries = [await stack.enter_async_context(setup.enqueue(number)) for number in range(10)]
        await turn()
        endpoints = [(await entry.wait_dispatched()).name for entry in entries[:8]]
        for entry in entries[:8]:
            entry.on_submitted()
            entry.charge_tokens(prompt_tokens=16, output_tokens=3)
        setup.replicas[1].say(free_sequences=0, running=4)
        charged = setup.core.predictor.served
        lost = [entry for entry, endpoint in zip(entries, endpoints, strict=False) if endpoint == "replica-0"]
        setup.replica.set_up(False)
        assert all(entry.requeue(prompts=[0]) for entry in lost)
        await turn()
        assert [entry.position() is None for entry in lost] == [False] * 4, "the other replica is full"
        stays = [entry for entry in entries[:8] if entry not in lost]
        for entry in stays[:2]:
            leave(entry)
        setup.replicas[1].say(free_sequences=2, running=2)
        await turn()
        assert [entry.position() is None for entry in lost] == [True, True, False, False]
        assert entries[8].position() is not None
        assert (await lost[0].wait_dispatched()).name == "replica-1"
        assert setup.core.predictor.served == charged
        setup.replica.set_up(True)
        await turn()
        assert [(await entry.wait_dispatched()).name for entry in lost] == [
            "replica-1",
            "replica-1",
            "replica-0",
            "replica-0",
        ]
    setup.assert_empty()


async def test_a_replica_that_fails_though_it_is_ready_rests_while_the_other_works():
    setup = DispatchSetup(replicas=2)
    setup.dispatcher.draw = lambda: 1.0
    async with setup.enqueue() as entry:
        first = (await entry.wait_dispatched()).name
        assert entry.requeue(prompts=[0])
        await turn()
        second = (await entry.wait_dispatched()).name
        assert {first, second} == {"replica-0", "replica-1"}
        assert entry.requeue(prompts=[0])
        await turn()
        assert entry.position() is not None, "both rest"
        setup.clock.now_s += 0.06
        setup.dispatcher.refresh_and_dispatch()
        assert entry.position() is None
    setup.assert_empty()


async def test_a_request_is_requeued_a_limited_number_of_times():
    setup = DispatchSetup(recoveries=2)
    async with setup.enqueue() as entry:
        for _ in range(2):
            await entry.wait_dispatched()
            assert entry.requeue(prompts=[0])
        await entry.wait_dispatched()
        assert not entry.requeue(prompts=[0])
        assert setup.core.running == 1
    setup.assert_empty()


async def test_a_requeued_request_waits_as_long_as_its_class_does_and_no_longer_than_its_answer_may_take():
    setup = DispatchSetup(max_wait_s={PriorityClass.STANDARD: 10.0})
    async with setup.enqueue(1, ttft_deadline_s=1_000_001.0) as entry, setup.enqueue(2) as other:
        for begun in (entry, other):
            await begun.wait_dispatched()
            begun.charge_tokens(prompt_tokens=16, output_tokens=1)
        setup.replica.set_up(False)
        assert entry.requeue(prompts=[0], answer_by_s=setup.clock.now_s + 5.0)
        assert other.requeue(prompts=[0])
        setup.clock.now_s += 4.0  # past the deadline of its first token, which has come
        setup.dispatcher.refresh_and_dispatch()
        assert entry.position() is not None
        setup.clock.now_s += 2.0
        setup.dispatcher.refresh_and_dispatch()
        with pytest.raises(DeadlineExceeded):
            await entry.wait_dispatched()
        setup.clock.now_s += 5.0
        setup.dispatcher.refresh_and_dispatch()
        with pytest.raises(ReplicaUnavailable):
            await other.wait_dispatched()
    setup.assert_empty()


async def test_all_waits_of_a_request_that_is_requeued_repeatedly_are_bounded_by_its_class():
    setup = DispatchSetup(max_wait_s={PriorityClass.STANDARD: 10.0})
    async with setup.enqueue(1) as entry:
        for _ in range(2):
            await entry.wait_dispatched()
            setup.replica.set_up(False)
            assert entry.requeue(prompts=[0])
            setup.dispatcher.refresh_and_dispatch()
            setup.clock.now_s += 4.0
            setup.dispatcher.refresh_and_dispatch()
            setup.replica.set_up(True)
            setup.dispatcher.refresh_and_dispatch()
        await entry.wait_dispatched()
        setup.replica.set_up(False)
        assert entry.requeue(prompts=[0])
        setup.dispatcher.refresh_and_dispatch()
        setup.clock.now_s += 3.0
        setup.dispatcher.refresh_and_dispatch()
        with pytest.raises(ReplicaUnavailable):
            await entry.wait_dispatched()
    setup.assert_empty()


async def test_the_emptier_of_two_replicas_is_chosen():
    setup = DispatchSetup(replicas=2)
    async with AsyncExitStack() as stack:
        endpoints = []
        for number in range(4):
            entry = await stack.enter_async_context(setup.enqueue(number))
            endpoints.append((await entry.wait_dispatched()).name)
    assert sorted(endpoints) == ["replica-0", "replica-0", "replica-1", "replica-1"]
    setup.assert_empty()


async def test_a_full_queue_rejects_requests():
    setup = DispatchSetup(max_waiting={PriorityClass.STANDARD: 2})
    callers = [QueuedCaller(setup, number) for number in range(6)]
    await turn()
    with pytest.raises(QueueFull, match="2 requests of class standard wait already") as refused:
        setup.check(7)
    assert refused.value.retry_after_s > 0
    assert setup.check(8, priority=PriorityClass.BATCH).position < 6, "other classes have room"
    for caller in callers:
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_one_organisation_leaves_places_to_wait_for_others():
    most = 64
    setup = DispatchSetup(max_waiting={PriorityClass.STANDARD: most})
    callers = []
    while setup.dispatcher.core.waiting < 57:
        setup.check(len(callers))
        callers.append(QueuedCaller(setup, len(callers)))
        await turn()
    with pytest.raises(QueueFull, match="57 requests of class standard of acme wait already, as many as its share"):
        setup.check(100)
    setup.check(101, "stranger")
    setup.check(102, priority=PriorityClass.BATCH)
    for caller in callers:
        await caller.go()
        await turn()
    assert not any(queue.waiting_by_flow for queue in setup.dispatcher.core.queues)
    setup.assert_empty()


async def test_a_deadline_that_cannot_be_met_is_rejected_at_once():
    setup = DispatchSetup()
    setup.replica.say(times=StepTimes(fixed_s=0.1, token_s=0.001))
    now_s = setup.clock.now_s
    callers = [QueuedCaller(setup, number, ttft_deadline_s=now_s + 1000) for number in range(12)]
    await turn()
    place = setup.check(20, ttft_deadline_s=now_s + 2000)
    assert place.position == 8
    assert place.wait_s > 1
    assert place.ttft_s > place.wait_s
    urgent = setup.check(21, ttft_deadline_s=now_s + 10)
    assert urgent.position == 0, "in a key the most pressing goes first"
    assert setup.check(21, ttft_deadline_s=now_s + urgent.ttft_s + 0.01) == urgent
    with pytest.raises(DeadlineUnmeetable) as refused:
        setup.check(22, ttft_deadline_s=now_s + urgent.ttft_s - 0.01)
    assert refused.value.retry_after_s == pytest.approx(urgent.wait_s)
    with pytest.raises(DeadlineUnmeetable) as again:
        setup.check(23, ttft_deadline_s=now_s + urgent.ttft_s - 0.01)
    assert again.value.retry_after_s > refused.value.retry_after_s, "each gets a turn of its own"
    for caller in callers:
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_a_pool_is_for_its_tenants_alone():
    setup = DispatchSetup(pools={"gold": TenantPoolConfig(tenants=["rich"], share=0.5)})
    common = [QueuedCaller(setup, number) for number in range(3)]
    await turn()
    assert [caller.endpoint is not None for caller in common] == [True, True, False]
    rich = [QueuedCaller(setup, number, "rich") for number in range(10, 13)]
    await turn()
    assert [caller.endpoint is not None for caller in rich] == [True, True, False]
    await common[0].go()
    await turn()
    assert common[2].endpoint is not None
    assert rich[2].endpoint is None
    for caller in (*common, *rich):
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_a_reserved_share_is_held_back_and_may_overflow():
    setup = DispatchSetup(reserved={"rich": 0.25})
    common = [QueuedCaller(setup, number) for number in range(4)]
    await turn()
    assert [caller.endpoint is not None for caller in common] == [True] * 3 + [False]
    rich = [QueuedCaller(setup, number, "rich") for number in range(10, 12)]
    await turn()
    assert [caller.endpoint is not None for caller in rich] == [True, False]
    await common[0].go()
    await turn()
    assert common[3].endpoint is not None, "in the common part those who have nothing else go first"
    await common[1].go()
    await turn()
    assert rich[1].endpoint is not None
    for caller in (*common, *rich):
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_headroom_is_kept_for_those_below_their_share():
    setup = DispatchSetup(headroom=0.25)
    async with setup.enqueue(0, "light") as entry:
        await entry.wait_dispatched()
    flood = [QueuedCaller(setup, number, "flood") for number in range(1, 6)]
    await turn()
    assert [caller.endpoint is not None for caller in flood] == [True] * 3 + [False] * 2
    light = QueuedCaller(setup, 10, "light")
    await turn()
    assert light.endpoint is not None
    for caller in (*flood, light):
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_a_tenant_that_is_alone_may_use_the_headroom():
    setup = DispatchSetup(headroom=0.25)
    flood = [QueuedCaller(setup, number, "flood") for number in range(1, 6)]
    await turn()
    assert [caller.endpoint is not None for caller in flood] == [True] * 4 + [False]
    for caller in flood:
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_a_tenant_that_holds_few_slots_gets_an_overcommit_slot_when_all_slots_are_taken():
    setup = DispatchSetup(headroom=0.25)
    setup.replica.say(guest_places=1)
    flood = [QueuedCaller(setup, number, "flood") for number in range(1, 6)]
    await turn()
    assert [caller.endpoint is not None for caller in flood] == [True] * 4 + [False]  # no overcommit slot is kept free
    for caller in flood[:4]:
        setup.replica.submit()
        caller.entry.on_submitted()
    setup.replica.say(running=4, free_sequences=0)
    assert setup.check(10, "light").wait_s == 0
    lights = [QueuedCaller(setup, 10, "light"), QueuedCaller(setup, 11, "other")]
    await turn()
    assert [caller.endpoint is not None for caller in lights] == [True, False]
    setup.replica.submit()
    lights[0].entry.on_submitted()
    setup.replica.say(running=5, guests=1, guest_places=0)
    await turn()
    assert lights[1].endpoint is None
    assert setup.core.endpoint_states[0].total.slots == 4
    setup.replica.say(running=4, guests=0, guest_places=1)
    await turn()
    assert lights[1].endpoint is not None
    assert flood[4].endpoint is None
    for caller in (*flood[:4], *lights):
        await caller.go()
    setup.replica.say(running=0, free_sequences=4)
    await turn()
    await flood[4].go()
    await turn()
    setup.assert_empty()


async def test_a_burst_beyond_its_share_takes_overcommit_slots_while_another_tenant_holds_more():
    setup = DispatchSetup(headroom=0.25)
    setup.replica.say(guest_places=4)
    await QueuedCaller(setup, 0, "third").go()
    flood = [QueuedCaller(setup, number, "flood") for number in range(1, 7)]
    await turn()
    assert [caller.endpoint is not None for caller in flood] == [True] * 4 + [False] * 2
    for caller in flood[:4]:
        setup.replica.submit()
        caller.entry.on_submitted()
    setup.replica.say(running=4, free_sequences=0)
    burst = []
    for number in range(10, 14):
        burst.append(QueuedCaller(setup, number, "light"))
        await turn()
    # Its share is a third of four places; but with one fewer the flood has as many as it with its third.
    assert [caller.endpoint is not None for caller in burst] == [True, True, True, False]
    for caller in (*flood[:4], *burst[:3]):
        await caller.go()
    setup.replica.say(running=0, free_sequences=4)
    await turn()
    for caller in (*flood[4:], burst[3]):
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_a_new_tenant_is_not_held_up_by_another_whose_only_request_runs_long():
    setup = DispatchSetup(headroom=0.25)
    setup.replica.say(guest_places=2)
    slow = QueuedCaller(setup, 0, "slow")
    await turn()
    flood = [QueuedCaller(setup, number, "flood") for number in range(1, 6)]
    await turn()
    for caller in (slow, *flood[:3]):
        setup.replica.submit()
        caller.entry.on_submitted()
        caller.entry.charge_tokens(output_tokens=1 if caller is slow else 100_000)
    setup.replica.say(running=4, free_sequences=0)
    light = QueuedCaller(setup, 10, "light")
    await turn()
    assert light.endpoint is not None
    for caller in (slow, *flood[:3], light):
        await caller.go()
    setup.replica.say(running=0, free_sequences=4)
    await turn()
    for caller in flood[3:]:
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_nobody_gets_an_overcommit_slot_where_no_tenant_holds_more():
    setup = DispatchSetup(headroom=0.25)
    setup.replica.say(guest_places=2)
    callers = [QueuedCaller(setup, number, f"org-{number}") for number in range(5)]
    await turn()
    assert [caller.endpoint is not None for caller in callers] == [True] * 4 + [False]
    for caller in callers:
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_only_its_organisation_can_ask_for_the_position_of_a_request():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(5)]
    await turn()
    assert setup.dispatcher.position_of("req-4", "acme").position == 0
    assert setup.dispatcher.position_of("req-4", "other") is None
    assert setup.dispatcher.position_of("req-1", "acme") is None
    for caller in callers:
        await caller.go()
        await turn()
    assert setup.dispatcher.position_of("req-4", "acme") is None


async def test_a_wait_for_the_turn_of_others_is_not_counted_as_a_lack_of_slots():
    setup = DispatchSetup(line=QueueOrderConfig(policy="fifo"))
    running = [QueuedCaller(setup, number, "acme") for number in range(4)]
    await turn()
    others = [QueuedCaller(setup, number, "other") for number in range(10, 12)]
    mine = QueuedCaller(setup, 20, "acme")
    await turn()
    setup.clock.now_s += 1.0
    await running[0].go()
    await turn()
    setup.clock.now_s += 1.0
    await running[1].go()
    await turn()
    assert all(caller.endpoint for caller in others)
    setup.clock.now_s += 1.0
    await running[2].go()
    await turn()
    assert others[0].entry.waited_ms == {"slots": pytest.approx(1000.0)}
    assert mine.entry.waited_ms == {"slots": pytest.approx(1000.0), "tenant_share": pytest.approx(2000.0)}
    for caller in (*running, *others, mine):
        await caller.go()
        await turn()
    setup.assert_empty()


async def test_real_tokens_are_charged_and_the_rest_is_given_back():
    setup = DispatchSetup()
    charged = []
    fair_queue = setup.core.queues[0].fair_queue
    charge = fair_queue.charge
    fair_queue.charge = lambda flow, service: charged.append(service) or charge(flow, service)
    async with setup.enqueue(tokens=100) as entry:
        await entry.wait_dispatched()
        entry.charge_tokens(prompt_tokens=100, cached_tokens=80, output_tokens=1)
        entry.charge_tokens(output_tokens=3)
    assert sum(charged) == pytest.approx(20 + 0.1 * 80 + 2 * 4)
    charged.clear()
    with suppress(RuntimeError):
        async with setup.enqueue(tokens=100) as entry:
            await entry.wait_dispatched()
            raise RuntimeError
    assert sum(charged) == 0
    assert setup.core.counters.wasted_tokens == 0


async def test_a_replica_without_reports_gets_as_many_as_its_window():
    setup = DispatchSetup(reports_capacity=False)
    callers = [QueuedCaller(setup, number) for number in range(12)]
    await turn()
    assert sum(caller.endpoint is not None for caller in callers) == 8
    callers[0].entry.on_first_token()
    for caller in callers[:4]:
        await caller.go()
    await turn()
    assert all(caller.endpoint is not None for caller in callers)
    for caller in callers[4:]:
        await caller.go()
    setup.assert_empty()


async def test_wait_dispatched_can_be_called_again_after_it_was_cancelled():
    setup = DispatchSetup()
    first = [QueuedCaller(setup, number) for number in range(4)]
    await turn()
    async with setup.enqueue(9) as entry:
        asking = asyncio.create_task(entry.wait_dispatched())
        await turn()
        asking.cancel()
        await turn()
        assert asking.cancelled()
        await first[0].go()
        assert (await entry.wait_dispatched()).name == "replica-0"
    for caller in first:
        await caller.go()
    setup.assert_empty()


async def test_an_entry_has_one_waiting_task_and_is_entered_once():
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(5)]
    await turn()
    with pytest.raises(RuntimeError, match="Another task"):
        await callers[4].entry.wait_dispatched()
    with pytest.raises(RuntimeError, match="entered once"):
        await callers[0].entry.__aenter__()
    for caller in callers:
        await caller.go()
        await turn()
    with pytest.raises(RuntimeError, match="outside its context"):
        await callers[0].entry.wait_dispatched()
    setup.assert_empty()


async def test_deadlines_of_ended_requests_do_not_pile_up():
    setup = DispatchSetup()
    for number in range(1000):
        async with setup.enqueue(number, ttft_deadline_s=setup.clock.now_s + 3600) as entry:
            await entry.wait_dispatched()
    assert len(setup.core._deadline_heap) < 100
    setup.assert_empty()


async def test_the_background_task_notices_deadlines(monkeypatch):
    setup = DispatchSetup()
    callers = [QueuedCaller(setup, number) for number in range(4)]
    await turn()
    late = QueuedCaller(setup, 9, ttft_deadline_s=setup.clock.now_s + 5)
    await turn()
    monkeypatch.setattr("maitred.dispatch.dispatcher._POLL_INTERVAL_S", 0)
    running = asyncio.create_task(setup.dispatcher.run())
    setup.clock.now_s += 6
    await late.task
    assert isinstance(late.error, DeadlineExceeded)
    running.cancel()
    for caller in callers:
        await caller.go()
    setup.assert_empty()


async def test_nothing_is_learnt_from_an_outage():
    setup = DispatchSetup()
    setup.replica.say(times=StepTimes(fixed_s=0.1, token_s=0.001))
    callers = [QueuedCaller(setup, number) for number in range(5)]
    await turn()
    assert callers[4].entry.queued.predicted_position.wait_s > 0
    setup.replica.set_up(False)
    for caller in callers[:4]:
        await caller.cancel()
    setup.clock.now_s += 50.0
    setup.replica.set_up(True)
    await turn()
    callers[4].entry.on_first_token()
    assert setup.core.predictor.safety_margin.factor == 1.0
    assert setup.core.predictor.calibration.compared == 0
    await callers[4].go()
    setup.assert_empty()


async def dispatch_all(entries, running):
    """Has all of them released, and their first tokens asked for."""
    for entry in entries:
        await running.enter_async_context(entry)
        await entry.wait_dispatched()


def record_first_tokens(setup, entries, after_s=0.0):
    setup.clock.now_s += after_s
    for entry in entries:
        entry.on_first_token()


async def test_lag_of_the_event_loop_does_not_narrow_the_window_of_a_server():
    setup = DispatchSetup(reports_capacity=False)
    endpoint_state = setup.core.endpoint_states[0]
    async with AsyncExitStack() as running:
        quick, busy = ([setup.enqueue(4 * number + index) for index in range(4)] for number in range(2))
        await dispatch_all(quick, running)
        record_first_tokens(setup, quick, 0.05)
        await dispatch_all(busy, running)
        setup.clock.now_s += 0.5  # and nothing else ran in that time
        beaten = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, beaten.set)  # after the beat
        await beaten.wait()
        assert setup.core.stalled_s == pytest.approx(0.05 + 0.5 - 0.01)  # but for a beat
        record_first_tokens(setup, busy, 0.05)
        assert endpoint_state.widened_in_s(8) is not None
    setup.assert_empty()


async def test_a_request_for_a_server_whose_window_still_grows_is_not_rejected_for_its_present_size():
    setup = DispatchSetup(reports_capacity=False, max_wait_s={PriorityClass.STANDARD: 1.0})
    async with AsyncExitStack() as running:
        entries = [setup.enqueue(number) for number in range(8)]
        await dispatch_all(entries, running)
        first = setup.enqueue(8)
        await running.enter_async_context(first)
        for _ in range(50):
            setup.clock.now_s += 0.1
            for entry in entries:
                entry.charge_tokens(output_tokens=1)
            setup.dispatcher.refresh_and_dispatch()
        assert setup.check(9).wait_s < 1.0
        record_first_tokens(setup, entries[:1])
        assert setup.core.endpoint_states[0].widened_in_s(1) is not None
        setup.core.endpoint_states[0].on_failure()
        with pytest.raises(QueueFull):
            setup.check(10)
    setup.assert_empty()
