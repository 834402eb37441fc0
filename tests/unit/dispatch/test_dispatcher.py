"""Seats: who gets one when, and that leaving at any moment gives everything back."""

import asyncio
from contextlib import AsyncExitStack, suppress

import pytest

from maitred.core.errors import DeadlineExceeded, DeadlineUnmeetable, QueueFull, ReplicaLost, ReplicaUnavailable
from maitred.core.flow import PriorityClass
from maitred.core.replica import StepTimes
from maitred.dispatch.config import TenantPoolConfig
from maitred.fairness.config import QueueOrderConfig
from tests.support.dispatchers import Desk, errand, leave


async def turn():
    """Lets everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Guest:
    """A task that sits until it is told to go."""

    def __init__(self, desk, *args, **fields):
        self.seat = desk.seat(*args, **fields)
        self.post = None
        self.error = None
        self._go = asyncio.Event()
        self.task = asyncio.create_task(self._sit())

    async def _sit(self):
        try:
            async with self.seat:
                self.post = await self.seat.wait_dispatched()
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


async def test_what_fits_is_granted_at_once():
    desk = Desk()
    async with desk.seat() as seat:
        assert (await seat.wait_dispatched()).name == "post-0"
        assert seat.position() is None
        assert seat.expected_tokens == 32
        assert seat.waited_ms == {}
        assert desk.floor.running == 1
    desk.assert_empty()


async def test_what_ran_before_this_process_has_its_place_and_others_wait():
    desk = Desk()
    desk.replica.say(free_sequences=0, running=4, free_blocks=80)
    seats = [desk.dispatcher.resume(errand(number), "post-0") for number in range(4)]
    assert desk.dispatcher.resume(errand(9), "post-9") is None
    async with AsyncExitStack() as running:
        for seat in seats:
            await running.enter_async_context(seat)
            assert (await seat.wait_dispatched()).name == "post-0"
            seat.charge_tokens(prompt_tokens=16)  # the engine counts it
        guest = Guest(desk, 5)
        await turn()
        assert guest.post is None
        assert desk.floor.running == 4
    desk.replica.say(free_sequences=4, running=0, free_blocks=100)
    await turn()
    assert guest.post is not None
    await guest.go()
    desk.assert_empty()


async def test_the_rest_waits_until_the_report_says_that_there_is_room():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(6)]
    await turn()
    assert [guest.post is not None for guest in guests] == [True] * 4 + [False] * 2
    assert guests[5].seat.position().position == 1
    for guest in guests[:4]:
        desk.replica.submit()
        guest.seat.on_submitted()
    desk.replica.say(free_sequences=0, running=4, free_blocks=80)
    await turn()
    assert guests[4].post is None
    desk.replica.say(free_sequences=1, running=3, free_blocks=85)
    await turn()
    assert guests[4].post is not None
    assert guests[5].post is None
    for guest in guests:
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_who_leaves_before_the_engine_heard_of_it_makes_room():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(5)]
    await turn()
    await guests[0].go()
    await turn()
    assert guests[4].post is not None
    for guest in guests:
        await guest.go()
    desk.assert_empty()


async def test_kv_blocks_are_credits_too():
    desk = Desk()
    big = [Guest(desk, number, tokens=500, max_tokens=300) for number in range(3)]  # 50 blocks each
    await turn()
    assert [guest.post is not None for guest in big] == [True, True, False]
    desk.clock.now_s += 2.0
    await big[0].go()
    await turn()
    assert big[2].post is not None
    assert big[2].seat.waited_ms == {"kv_full": pytest.approx(2000.0)}
    for guest in big:
        await guest.go()
    desk.assert_empty()


async def test_what_is_larger_than_the_replica_is_granted_when_it_is_empty():
    desk = Desk()
    small = Guest(desk, 1)
    await turn()
    large = Guest(desk, 2, tokens=4000, max_tokens=90, choices=9)
    await turn()
    assert large.post is None
    await small.go()
    await turn()
    assert large.post is not None
    await large.go()
    desk.assert_empty()


async def test_cancelled_while_it_waits():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(5)]
    await turn()
    await guests[4].cancel()
    assert desk.floor.waiting == 0
    assert desk.floor.counters.left_waiting == 1
    for guest in guests[:4]:
        await guest.cancel()
    desk.assert_empty()


async def test_cancelled_in_the_moment_of_its_grant():
    desk = Desk()
    first = [Guest(desk, number) for number in range(4)]
    await turn()
    second, third = Guest(desk, 5), Guest(desk, 6)
    await turn()
    leave(first[0].seat)
    desk.dispatcher.dispatch_ready()
    assert desk.floor.running == 4, "the second was granted, and its task has not run yet"
    second.task.cancel()
    await turn()
    assert second.post is None
    assert third.post is not None
    for guest in (*first, third):
        await guest.go()
    desk.assert_empty()


async def test_leaving_twice_gives_back_once():
    desk = Desk()
    async with desk.seat() as seat:
        await seat.wait_dispatched()
        leave(seat)
    desk.assert_empty()


async def test_who_finds_room_has_it_when_it_has_joined():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(5)]
    await asyncio.sleep(0)
    assert [guest.post is not None for guest in guests] == [True, True, True, True, False]
    for guest in guests:
        await guest.go()


async def test_several_places_that_come_free_take_one_turn():
    desk = Desk()
    leaving = [Guest(desk, number) for number in range(4)]
    waiting = [Guest(desk, number) for number in range(4, 8)]
    await turn()
    turns = []
    decide = desk.floor.dispatch_ready
    desk.floor.dispatch_ready = lambda *moment: turns.append(1) or decide(*moment)
    await asyncio.gather(*(guest.go() for guest in leaving))
    await turn()
    assert all(guest.post for guest in waiting)
    assert len(turns) == 1
    for guest in waiting:
        await guest.go()


async def test_the_deadline_passes_while_it_waits():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(4)]
    await turn()
    late = Guest(desk, 9, deadline_s=desk.clock.now_s + 5)
    await turn()
    desk.clock.now_s += 4.9
    desk.dispatcher.dispatch_ready()
    await turn()
    assert late.error is None
    desk.clock.now_s += 0.2
    desk.dispatcher.dispatch_ready()
    await turn()
    assert isinstance(late.error, DeadlineExceeded)
    for guest in guests:
        await guest.go()
    desk.assert_empty()


async def test_without_a_replica_new_ones_are_refused_and_old_ones_wait():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(6)]
    await turn()
    for guest in guests[:4]:
        guest.seat.on_submitted()
    desk.replica.set_up(False)
    with pytest.raises(ReplicaUnavailable) as refused:
        desk.check(7)
    assert refused.value.retry_after_s == 3.0
    for guest in guests[:4]:
        await guest.cancel()
    await turn()
    assert guests[4].post is None
    desk.clock.now_s += 3.0
    desk.replica.set_up(True)
    await turn()
    assert guests[4].post is not None
    assert guests[4].seat.waited_ms["cold_start"] == pytest.approx(3000.0)
    for guest in guests[4:]:
        await guest.go()
    desk.assert_empty()


async def test_nobody_waits_for_ever_for_a_replica():
    desk = Desk(max_wait_s={PriorityClass.STANDARD: 10.0})
    desk.replica.set_up(False)
    guest = Guest(desk)
    await turn()
    desk.clock.now_s += 9.0
    desk.dispatcher.dispatch_ready()
    await turn()
    assert guest.error is None
    desk.clock.now_s += 2.0
    desk.dispatcher.dispatch_ready()
    await turn()
    assert isinstance(guest.error, ReplicaUnavailable)
    desk.assert_empty()


async def test_the_replica_is_lost_while_it_runs():
    desk = Desk()
    with suppress(ReplicaLost):
        async with desk.seat() as seat:
            await seat.wait_dispatched()
            seat.on_submitted()
            desk.replica.set_up(False)
            raise ReplicaLost
    desk.replica.set_up(True)
    desk.floor.refresh(desk.clock.now_s)
    assert desk.floor.endpoint_states[0].free[:2] == (4, 100)
    desk.assert_empty()


async def test_who_comes_back_from_a_lost_replica_goes_first_and_elsewhere_and_is_charged_once():
    desk = Desk(replicas=2)
    async with AsyncExitStack() as stack:
        seats = [await stack.enter_async_context(desk.seat(number)) for number in range(10)]
        await turn()
        posts = [(await seat.wait_dispatched()).name for seat in seats[:8]]
        for seat in seats[:8]:
            seat.on_submitted()
            seat.charge_tokens(prompt_tokens=16, output_tokens=3)
        desk.replicas[1].say(free_sequences=0, running=4)
        charged = desk.floor.predictor.served
        lost = [seat for seat, post in zip(seats, posts, strict=False) if post == "post-0"]
        desk.replica.set_up(False)
        assert all(seat.requeue(prompts=[0]) for seat in lost)
        await turn()
        assert [seat.position() is None for seat in lost] == [False] * 4, "the other replica is full"
        stays = [seat for seat in seats[:8] if seat not in lost]
        for seat in stays[:2]:
            leave(seat)
        desk.replicas[1].say(free_sequences=2, running=2)
        await turn()
        assert [seat.position() is None for seat in lost] == [True, True, False, False]
        assert seats[8].position() is not None
        assert (await lost[0].wait_dispatched()).name == "post-1"
        assert desk.floor.predictor.served == charged
        desk.replica.set_up(True)
        await turn()
        assert [(await seat.wait_dispatched()).name for seat in lost] == ["post-1", "post-1", "post-0", "post-0"]
    desk.assert_empty()


async def test_a_replica_that_fails_though_it_is_ready_rests_while_the_other_serves():
    desk = Desk(replicas=2)
    desk.dispatcher.draw = lambda: 1.0
    async with desk.seat() as seat:
        first = (await seat.wait_dispatched()).name
        assert seat.requeue(prompts=[0])
        await turn()
        second = (await seat.wait_dispatched()).name
        assert {first, second} == {"post-0", "post-1"}
        assert seat.requeue(prompts=[0])
        await turn()
        assert seat.position() is not None, "both rest"
        desk.clock.now_s += 0.06
        desk.dispatcher.dispatch_ready()
        assert seat.position() is None
    desk.assert_empty()


async def test_nobody_goes_on_for_ever():
    desk = Desk(recoveries=2)
    async with desk.seat() as seat:
        for _ in range(2):
            await seat.wait_dispatched()
            assert seat.requeue(prompts=[0])
        await seat.wait_dispatched()
        assert not seat.requeue(prompts=[0])
        assert desk.floor.running == 1
    desk.assert_empty()


async def test_who_has_begun_waits_for_a_replica_as_long_as_its_class_does_and_no_longer_than_its_answer():
    desk = Desk(max_wait_s={PriorityClass.STANDARD: 10.0})
    async with desk.seat(1, deadline_s=1_000_001.0) as seat, desk.seat(2) as other:
        for begun in (seat, other):
            await begun.wait_dispatched()
            begun.charge_tokens(prompt_tokens=16, output_tokens=1)
        desk.replica.set_up(False)
        assert seat.requeue(prompts=[0], answer_by_s=desk.clock.now_s + 5.0)
        assert other.requeue(prompts=[0])
        desk.clock.now_s += 4.0  # past the deadline of its first token, which has come
        desk.dispatcher.dispatch_ready()
        assert seat.position() is not None
        desk.clock.now_s += 2.0
        desk.dispatcher.dispatch_ready()
        with pytest.raises(DeadlineExceeded):
            await seat.wait_dispatched()
        desk.clock.now_s += 5.0
        desk.dispatcher.dispatch_ready()
        with pytest.raises(ReplicaUnavailable):
            await other.wait_dispatched()
    desk.assert_empty()


async def test_who_is_lost_again_and_again_waits_no_longer_in_all_than_its_class_does():
    desk = Desk(max_wait_s={PriorityClass.STANDARD: 10.0})
    async with desk.seat(1) as seat:
        for _ in range(2):
            await seat.wait_dispatched()
            desk.replica.set_up(False)
            assert seat.requeue(prompts=[0])
            desk.dispatcher.dispatch_ready()
            desk.clock.now_s += 4.0
            desk.dispatcher.dispatch_ready()
            desk.replica.set_up(True)
            desk.dispatcher.dispatch_ready()
        await seat.wait_dispatched()
        desk.replica.set_up(False)
        assert seat.requeue(prompts=[0])
        desk.dispatcher.dispatch_ready()
        desk.clock.now_s += 3.0
        desk.dispatcher.dispatch_ready()
        with pytest.raises(ReplicaUnavailable):
            await seat.wait_dispatched()
    desk.assert_empty()


async def test_the_emptier_of_two_replicas_is_chosen():
    desk = Desk(replicas=2)
    async with AsyncExitStack() as stack:
        posts = []
        for number in range(4):
            seat = await stack.enter_async_context(desk.seat(number))
            posts.append((await seat.wait_dispatched()).name)
    assert sorted(posts) == ["post-0", "post-0", "post-1", "post-1"]
    desk.assert_empty()


async def test_a_queue_has_a_length():
    desk = Desk(max_waiting={PriorityClass.STANDARD: 2})
    guests = [Guest(desk, number) for number in range(6)]
    await turn()
    with pytest.raises(QueueFull, match="2 requests of class standard wait already") as refused:
        desk.check(7)
    assert refused.value.retry_after_s > 0
    assert desk.check(8, priority=PriorityClass.BATCH).position < 6, "other classes have room"
    for guest in guests:
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    desk = Desk()
    desk.replica.say(times=StepTimes(fixed_s=0.1, token_s=0.001))
    now_s = desk.clock.now_s
    guests = [Guest(desk, number, deadline_s=now_s + 1000) for number in range(12)]
    await turn()
    place = desk.check(20, deadline_s=now_s + 2000)
    assert place.position == 8
    assert place.wait_s > 1
    assert place.ttft_s > place.wait_s
    urgent = desk.check(21, deadline_s=now_s + 10)
    assert urgent.position == 0, "in a key the most pressing goes first"
    assert desk.check(21, deadline_s=now_s + urgent.ttft_s + 0.01) == urgent
    with pytest.raises(DeadlineUnmeetable) as refused:
        desk.check(22, deadline_s=now_s + urgent.ttft_s - 0.01)
    assert refused.value.retry_after_s == pytest.approx(urgent.wait_s)
    with pytest.raises(DeadlineUnmeetable) as again:
        desk.check(23, deadline_s=now_s + urgent.ttft_s - 0.01)
    assert again.value.retry_after_s > refused.value.retry_after_s, "each gets a turn of its own"
    for guest in guests:
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_a_pool_is_for_its_tenants_alone():
    desk = Desk(pools={"gold": TenantPoolConfig(tenants=["rich"], share=0.5)})
    common = [Guest(desk, number) for number in range(3)]
    await turn()
    assert [guest.post is not None for guest in common] == [True, True, False]
    rich = [Guest(desk, number, "rich") for number in range(10, 13)]
    await turn()
    assert [guest.post is not None for guest in rich] == [True, True, False]
    await common[0].go()
    await turn()
    assert common[2].post is not None
    assert rich[2].post is None
    for guest in (*common, *rich):
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_a_reserved_share_is_held_back_and_may_overflow():
    desk = Desk(reserved={"rich": 0.25})
    common = [Guest(desk, number) for number in range(4)]
    await turn()
    assert [guest.post is not None for guest in common] == [True] * 3 + [False]
    rich = [Guest(desk, number, "rich") for number in range(10, 12)]
    await turn()
    assert [guest.post is not None for guest in rich] == [True, False]
    await common[0].go()
    await turn()
    assert common[3].post is not None, "in the common part those who have nothing else go first"
    await common[1].go()
    await turn()
    assert rich[1].post is not None
    for guest in (*common, *rich):
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_headroom_is_kept_for_those_below_their_share():
    desk = Desk(headroom=0.25)
    async with desk.seat(0, "light") as seat:
        await seat.wait_dispatched()
    flood = [Guest(desk, number, "flood") for number in range(1, 6)]
    await turn()
    assert [guest.post is not None for guest in flood] == [True] * 3 + [False] * 2
    light = Guest(desk, 10, "light")
    await turn()
    assert light.post is not None
    for guest in (*flood, light):
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_alone_one_tenant_may_use_the_headroom():
    desk = Desk(headroom=0.25)
    flood = [Guest(desk, number, "flood") for number in range(1, 6)]
    await turn()
    assert [guest.post is not None for guest in flood] == [True] * 4 + [False]
    for guest in flood:
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_who_holds_few_places_is_sent_as_a_guest_when_all_are_taken():
    desk = Desk(headroom=0.25)
    desk.replica.say(guest_places=1)
    flood = [Guest(desk, number, "flood") for number in range(1, 6)]
    await turn()
    assert [guest.post is not None for guest in flood] == [True] * 4 + [False]  # no place is kept for guests
    for guest in flood[:4]:
        desk.replica.submit()
        guest.seat.on_submitted()
    desk.replica.say(running=4, free_sequences=0)
    assert desk.check(10, "light").wait_s == 0
    lights = [Guest(desk, 10, "light"), Guest(desk, 11, "other")]
    await turn()
    assert [guest.post is not None for guest in lights] == [True, False]
    desk.replica.submit()
    lights[0].seat.on_submitted()
    desk.replica.say(running=5, guests=1, guest_places=0)
    await turn()
    assert lights[1].post is None
    assert desk.floor.endpoint_states[0].total.slots == 4
    desk.replica.say(running=4, guests=0, guest_places=1)
    await turn()
    assert lights[1].post is not None
    assert flood[4].post is None
    for guest in (*flood[:4], *lights):
        await guest.go()
    desk.replica.say(running=0, free_sequences=4)
    await turn()
    await flood[4].go()
    await turn()
    desk.assert_empty()


async def test_a_burst_beyond_its_share_of_places_comes_as_guests_while_another_holds_more():
    desk = Desk(headroom=0.25)
    desk.replica.say(guest_places=4)
    await Guest(desk, 0, "third").go()
    flood = [Guest(desk, number, "flood") for number in range(1, 7)]
    await turn()
    assert [guest.post is not None for guest in flood] == [True] * 4 + [False] * 2
    for guest in flood[:4]:
        desk.replica.submit()
        guest.seat.on_submitted()
    desk.replica.say(running=4, free_sequences=0)
    burst = []
    for number in range(10, 14):
        burst.append(Guest(desk, number, "light"))
        await turn()
    # Its share is a third of four places; but with one fewer the flood has as many as it with its third.
    assert [guest.post is not None for guest in burst] == [True, True, True, False]
    for guest in (*flood[:4], *burst[:3]):
        await guest.go()
    desk.replica.say(running=0, free_sequences=4)
    await turn()
    for guest in (*flood[4:], burst[3]):
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_who_begins_to_wait_is_not_held_up_by_one_whose_only_request_runs_long():
    desk = Desk(headroom=0.25)
    desk.replica.say(guest_places=2)
    slow = Guest(desk, 0, "slow")
    await turn()
    flood = [Guest(desk, number, "flood") for number in range(1, 6)]
    await turn()
    for guest in (slow, *flood[:3]):
        desk.replica.submit()
        guest.seat.on_submitted()
        guest.seat.charge_tokens(output_tokens=1 if guest is slow else 100_000)
    desk.replica.say(running=4, free_sequences=0)
    light = Guest(desk, 10, "light")
    await turn()
    assert light.post is not None
    for guest in (slow, *flood[:3], light):
        await guest.go()
    desk.replica.say(running=0, free_sequences=4)
    await turn()
    for guest in flood[3:]:
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_nobody_is_a_guest_of_those_who_hold_no_more():
    desk = Desk(headroom=0.25)
    desk.replica.say(guest_places=2)
    guests = [Guest(desk, number, f"org-{number}") for number in range(5)]
    await turn()
    assert [guest.post is not None for guest in guests] == [True] * 4 + [False]
    for guest in guests:
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_its_place_can_be_asked_for_by_its_organisation_alone():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(5)]
    await turn()
    assert desk.dispatcher.position_of("req-4", "acme").position == 0
    assert desk.dispatcher.position_of("req-4", "other") is None
    assert desk.dispatcher.position_of("req-1", "acme") is None
    for guest in guests:
        await guest.go()
        await turn()
    assert desk.dispatcher.position_of("req-4", "acme") is None


async def test_what_others_were_owed_is_no_lack_of_places():
    desk = Desk(line=QueueOrderConfig(policy="fifo"))
    running = [Guest(desk, number, "acme") for number in range(4)]
    await turn()
    others = [Guest(desk, number, "other") for number in range(10, 12)]
    mine = Guest(desk, 20, "acme")
    await turn()
    desk.clock.now_s += 1.0
    await running[0].go()
    await turn()
    desk.clock.now_s += 1.0
    await running[1].go()
    await turn()
    assert all(guest.post for guest in others)
    desk.clock.now_s += 1.0
    await running[2].go()
    await turn()
    assert others[0].seat.waited_ms == {"slots": pytest.approx(1000.0)}
    assert mine.seat.waited_ms == {"slots": pytest.approx(1000.0), "tenant_share": pytest.approx(2000.0)}
    for guest in (*running, *others, mine):
        await guest.go()
        await turn()
    desk.assert_empty()


async def test_real_tokens_are_charged_and_the_rest_is_given_back():
    desk = Desk()
    charged = []
    line = desk.floor.queues[0].fair_queue
    charge = line.charge
    line.charge = lambda flow, service: charged.append(service) or charge(flow, service)
    async with desk.seat(tokens=100) as seat:
        await seat.wait_dispatched()
        seat.charge_tokens(prompt_tokens=100, cached_tokens=80, output_tokens=1)
        seat.charge_tokens(output_tokens=3)
    assert sum(charged) == pytest.approx(20 + 0.1 * 80 + 2 * 4)
    charged.clear()
    with suppress(RuntimeError):
        async with desk.seat(tokens=100) as seat:
            await seat.wait_dispatched()
            raise RuntimeError
    assert sum(charged) == 0
    assert desk.floor.counters.wasted_tokens == 0


async def test_a_replica_without_reports_gets_as_many_as_its_window():
    desk = Desk(exact=False)
    guests = [Guest(desk, number) for number in range(12)]
    await turn()
    assert sum(guest.post is not None for guest in guests) == 8
    guests[0].seat.on_first_token()
    for guest in guests[:4]:
        await guest.go()
    await turn()
    assert all(guest.post is not None for guest in guests)
    for guest in guests[4:]:
        await guest.go()
    desk.assert_empty()


async def test_granted_can_be_asked_again_after_it_was_cancelled():
    desk = Desk()
    first = [Guest(desk, number) for number in range(4)]
    await turn()
    async with desk.seat(9) as seat:
        asking = asyncio.create_task(seat.wait_dispatched())
        await turn()
        asking.cancel()
        await turn()
        assert asking.cancelled()
        await first[0].go()
        assert (await seat.wait_dispatched()).name == "post-0"
    for guest in first:
        await guest.go()
    desk.assert_empty()


async def test_a_seat_is_for_one_task_and_one_entering():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(5)]
    await turn()
    with pytest.raises(RuntimeError, match="Another task"):
        await guests[4].seat.wait_dispatched()
    with pytest.raises(RuntimeError, match="entered once"):
        await guests[0].seat.__aenter__()
    for guest in guests:
        await guest.go()
        await turn()
    with pytest.raises(RuntimeError, match="outside its context"):
        await guests[0].seat.wait_dispatched()
    desk.assert_empty()


async def test_what_is_due_does_not_pile_up():
    desk = Desk()
    for number in range(1000):
        async with desk.seat(number, deadline_s=desk.clock.now_s + 3600) as seat:
            await seat.wait_dispatched()
    assert len(desk.floor._deadline_heap) < 100
    desk.assert_empty()


async def test_the_background_notices_deadlines(monkeypatch):
    desk = Desk()
    guests = [Guest(desk, number) for number in range(4)]
    await turn()
    late = Guest(desk, 9, deadline_s=desk.clock.now_s + 5)
    await turn()
    monkeypatch.setattr("maitred.dispatch.dispatcher._POLL_INTERVAL_S", 0)
    running = asyncio.create_task(desk.dispatcher.run())
    desk.clock.now_s += 6
    await late.task
    assert isinstance(late.error, DeadlineExceeded)
    running.cancel()
    for guest in guests:
        await guest.go()
    desk.assert_empty()


async def test_nothing_is_learnt_from_an_outage():
    desk = Desk()
    desk.replica.say(times=StepTimes(fixed_s=0.1, token_s=0.001))
    guests = [Guest(desk, number) for number in range(5)]
    await turn()
    assert guests[4].seat.queued.predicted_position.wait_s > 0
    desk.replica.set_up(False)
    for guest in guests[:4]:
        await guest.cancel()
    desk.clock.now_s += 50.0
    desk.replica.set_up(True)
    await turn()
    guests[4].seat.on_first_token()
    assert desk.floor.predictor.caution.factor == 1.0
    assert desk.floor.predictor.calibration.compared == 0
    await guests[4].go()
    desk.assert_empty()


async def granted(seats, running):
    """Has all of them released, and their first tokens asked for."""
    for seat in seats:
        await running.enter_async_context(seat)
        await seat.wait_dispatched()


def first_tokens(desk, seats, after_s=0.0):
    desk.clock.now_s += after_s
    for seat in seats:
        seat.on_first_token()


async def test_what_the_event_loop_was_late_by_is_no_queue_in_a_server():
    desk = Desk(exact=False)
    station = desk.floor.endpoint_states[0]
    async with AsyncExitStack() as running:
        quick, busy = ([desk.seat(4 * number + one) for one in range(4)] for number in range(2))
        await granted(quick, running)
        first_tokens(desk, quick, 0.05)
        await granted(busy, running)
        desk.clock.now_s += 0.5  # and nothing else ran in that time
        beaten = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, beaten.set)  # after the beat
        await beaten.wait()
        assert desk.floor.stalled_s == pytest.approx(0.05 + 0.5 - 0.01)  # but for a beat
        first_tokens(desk, busy, 0.05)
        assert station.widened_in_s(8) is not None
    desk.assert_empty()


async def test_who_waits_for_a_server_that_takes_ever_more_is_not_refused_for_what_it_takes_now():
    desk = Desk(exact=False, max_wait_s={PriorityClass.STANDARD: 1.0})
    async with AsyncExitStack() as running:
        seats = [desk.seat(number) for number in range(8)]
        await granted(seats, running)
        first = desk.seat(8)
        await running.enter_async_context(first)
        for _ in range(50):
            desk.clock.now_s += 0.1
            for seat in seats:
                seat.charge_tokens(output_tokens=1)
            desk.dispatcher.dispatch_ready()
        assert desk.check(9).wait_s < 1.0
        first_tokens(desk, seats[:1])
        assert desk.floor.endpoint_states[0].widened_in_s(1) is not None
        desk.floor.endpoint_states[0].on_failure()
        with pytest.raises(QueueFull):
            desk.check(10)
    desk.assert_empty()
