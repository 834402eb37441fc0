"""What an operator says to replicas, and what dispatch makes of it."""

import asyncio

import pytest

from maitred.app.admin.replicas import ReplicaAdmin
from maitred.core.errors import InvalidRequest, ReplicaUnavailable, ResourceNotFound
from tests.support.clock import FakeClock
from tests.support.dispatchers import Desk


def operated(*desks):
    return ReplicaAdmin({f"m{number}": desk.dispatcher for number, desk in enumerate(desks)}, FakeClock())


async def test_a_drained_replica_gets_nothing_new_and_rests_when_it_is_empty():
    desk = Desk(replicas=2)
    replicas = operated(desk)
    async with desk.seat(1) as seat:
        busy = (await seat.wait_dispatched()).name
        told = replicas.drain(busy, None)
        assert (told.state, told.ready, told.requests) == ("draining", False, 1)
        for number in range(2, 5):
            async with desk.seat(number) as another:
                assert (await another.wait_dispatched()).name != busy
    states = {one.replica: (one.state, one.requests) for one in replicas.all()}
    assert states[busy] == ("maintenance", 0)
    assert replicas.resume(busy, None).ready


async def test_who_waits_for_the_only_replica_is_served_when_it_is_back():
    desk = Desk()
    replicas = operated(desk)
    replicas.drain("post-0", "m0")
    with pytest.raises(ReplicaUnavailable, match="out of service for maintenance") as refused:
        desk.check()
    assert refused.value.retry_after_s == 10.0
    assert not desk.dispatcher.serving
    async with desk.seat() as seat:
        granted = asyncio.ensure_future(seat.wait_dispatched())
        await asyncio.sleep(0)
        assert not granted.done()
        replicas.resume("post-0", "m0")
        assert (await granted).name == "post-0"
    assert desk.dispatcher.serving
    desk.assert_empty()


def test_a_name_must_be_that_of_one_replica():
    replicas = operated(Desk(), Desk())
    with pytest.raises(ResourceNotFound, match=r"no replica 'nobody'"):
        replicas.drain("nobody", None)
    with pytest.raises(ResourceNotFound, match="of 'm7'"):
        replicas.drain("post-0", "m7")
    with pytest.raises(InvalidRequest, match="is a replica of m0, m1") as refused:
        replicas.maintain("post-0", None)
    assert refused.value.param == "model"
    assert replicas.maintain("post-0", "m1").state == "maintenance"
    assert [one.state for one in replicas.all()] == ["serving", "maintenance"]
