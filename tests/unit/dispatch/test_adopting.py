"""A queue is told of other settings and other replicas while requests wait and run: nobody is lost, nothing is kept."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from maitred.core.flow import PriorityClass
from maitred.dispatch.config import DispatchConfig, TenantPoolConfig
from maitred.dispatch.request import Endpoint
from maitred.fairness.config import QueueOrderConfig
from tests.support.dispatchers import Desk, SaidReplica
from tests.unit.dispatch.test_dispatcher import Guest, turn

PLAIN = DispatchConfig(headroom=0.0, unknown_output_share=1.0)
ORGS = ("acme", "bolt", "crow")


def adopt(desk, config=PLAIN, posts=None):
    desk.dispatcher.reconfigure(posts or [station.endpoint for station in desk.floor.endpoint_states], config, None)


def in_other_words(post, replica):
    return Endpoint(post.name, replica, post.exact, post.admin_state)


async def test_who_waits_is_served_by_the_new_rules_in_the_order_in_which_it_came():
    desk = Desk()
    async with AsyncExitStack() as running:
        for number in range(4):
            await running.enter_async_context(desk.seat(number))
        guests = [Guest(desk, number, org) for number, org in enumerate(("acme", "acme", "acme", "bolt"))]
        await turn()
        adopt(desk, replace(PLAIN, line=QueueOrderConfig(policy="fifo")))
        await turn()
        assert desk.floor.waiting == 4
        assert [guest.seat.position().position for guest in guests] == [0, 1, 2, 3]
    await turn()
    assert [guest.post.name for guest in guests] == ["post-0"] * 4
    for guest in guests:
        await guest.go()
    desk.assert_empty()


async def test_a_replica_that_is_gone_gets_nothing_new_and_keeps_what_it_has():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(4)]
    await turn()
    other = SaidReplica()
    desk.dispatcher.reconfigure([Endpoint("new", other)], PLAIN, None)
    later = Guest(desk, 9)
    await turn()
    assert {guest.post.name for guest in guests} == {"post-0"}
    assert later.post.name == "new"
    for guest in [*guests, later]:
        await guest.go()
        assert guest.error is None
    desk.assert_empty()
    assert guests[0].post.admin_state.running == 0


async def test_who_waits_for_a_replica_that_is_away_goes_to_the_one_that_comes():
    desk = Desk()
    desk.replica.set_up(False)
    guest = Guest(desk)
    await turn()
    assert guest.post is None
    desk.dispatcher.reconfigure([Endpoint("new", SaidReplica())], PLAIN, None)
    await turn()
    assert guest.post.name == "new"
    await guest.go()


async def test_the_same_replica_in_other_words_keeps_its_account():
    desk = Desk(exact=False)
    guests = [Guest(desk, number) for number in range(3)]
    await turn()
    (station,) = desk.floor.endpoint_states
    held = station.credits.held
    assert held
    desk.dispatcher.reconfigure([in_other_words(station.endpoint, SaidReplica())], PLAIN, None)
    assert desk.floor.endpoint_states == [station]
    assert station.credits.held == held
    for guest in guests:
        await guest.go()
    desk.assert_empty()


async def test_of_the_same_server_news_are_heard_once_however_often_it_is_told():
    desk = Desk()
    for _ in range(3):
        desk.dispatcher.reconfigure([in_other_words(desk.floor.endpoint_states[0].endpoint, desk.replica)], PLAIN, None)
    assert len(desk.replica._listeners) == 1


async def test_a_lower_bound_refuses_who_comes_and_keeps_who_waits():
    desk = Desk()
    guests = [Guest(desk, number) for number in range(8)]
    await turn()
    adopt(desk, replace(PLAIN, max_waiting={PriorityClass.STANDARD: 1}))
    with pytest.raises(Exception, match="1 requests of class standard wait already"):
        desk.check(99)
    assert desk.floor.waiting == 4
    for guest in guests:
        await guest.go()
        assert guest.error is None
    desk.assert_empty()


@pytest.mark.parametrize("seed", range(20))
async def test_after_any_changes_in_any_order_everybody_was_served_once_and_nothing_is_held(seed):
    draw = random.Random(seed)
    desk = Desk(replicas=2)
    posts = [*(station.endpoint for station in desk.floor.endpoint_states), Endpoint("post-2", SaidReplica())]
    guests: list[Guest] = []
    for number in range(120):
        here = [guest for guest in guests if not guest.task.done()]
        match draw.choice(["come", "come", "go", "leave", "reload"]):
            case "come":
                guests.append(Guest(desk, number, draw.choice(ORGS), weight=draw.choice((1.0, 3.0))))
            case "go" if seated := [guest for guest in here if guest.post is not None]:
                await draw.choice(seated).go()
            case "leave" if here:
                await draw.choice(here).cancel()
            case "reload":
                config = replace(
                    PLAIN,
                    line=QueueOrderConfig(policy=draw.choice(("fair", "fifo", "priority", "deficit"))),
                    reserved=draw.choice(({}, {"acme": 0.3})),
                    pools=draw.choice(({}, {"mine": TenantPoolConfig(tenants=["bolt"], share=0.4)})),
                    headroom=draw.choice((0.0, 0.1)),
                )
                adopt(desk, config, draw.sample(posts, draw.randint(1, 3)))
        await turn()
    adopt(desk, posts=posts)
    async with asyncio.timeout(5):
        await asyncio.gather(*(guest.go() for guest in guests if not guest.task.done()))
    assert [guest.error for guest in guests] == [None] * len(guests)
    desk.assert_empty()
