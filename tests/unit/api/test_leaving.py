"""What becomes of a request whose client leaves."""

import asyncio

import pytest

from maitred.api.call import Call, Progress
from maitred.api.connection import EXTENSION, Unknown
from maitred.api.interrupt import ClientLeft, Interruptible


def call(connection):
    return Call({"path": "/", "method": "POST", "headers": [], "extensions": {EXTENSION: connection}}, None, None, 0.0)


async def watched(one):
    with Interruptible() as block, one.watched(block):
        await asyncio.Event().wait()


async def test_a_client_that_leaves_ends_what_is_waited_for():
    connection = Unknown()
    waiting = asyncio.create_task(watched(call(connection)))
    await asyncio.sleep(0)
    connection.on_lost()
    with pytest.raises(ClientLeft):
        await waiting
    assert connection.on_lost is None


async def test_a_client_that_has_left_before_is_noticed():
    connection = Unknown()
    connection.lost = True
    with pytest.raises(ClientLeft):
        await watched(call(connection))


async def test_a_client_that_has_its_answer_may_leave():
    connection = Unknown()
    answered = call(connection)
    with Interruptible() as block, answered.watched(block):
        answered.progress = Progress.COMPLETE
        connection.on_lost()
        await asyncio.sleep(0)


async def test_work_that_goes_on_without_its_client_is_told_of_its_leaving():
    connection, left = Unknown(), []
    recorded = call(connection)
    recorded.on_left = lambda: left.append(True)
    with Interruptible() as block, recorded.watched(block):
        connection.on_lost()
        await asyncio.sleep(0)
    assert left == [True]


async def test_the_end_of_one_request_leaves_the_next_watched():
    connection = Unknown()
    with call(connection).watched(Interruptible()):
        following = call(connection).watched(Interruptible())
        following.__enter__()
    assert connection.on_lost is not None
    following.__exit__()
    assert connection.on_lost is None
