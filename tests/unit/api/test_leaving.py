"""What becomes of a request whose client leaves."""

import asyncio

import pytest

from maitred.api.exchange import HttpExchange, ResponseState
from maitred.api.http.connection import EXTENSION, PlainAsgiConnection
from maitred.api.in_flight import CancelScope, ClientDisconnected


def call(connection):
    return HttpExchange(
        {"path": "/", "method": "POST", "headers": [], "extensions": {EXTENSION: connection}}, None, None, 0.0
    )


async def watched(one):
    with CancelScope() as block, one.cancel_on_disconnect(block):
        await asyncio.Event().wait()


async def test_a_client_that_leaves_ends_what_is_waited_for():
    connection = PlainAsgiConnection()
    waiting = asyncio.create_task(watched(call(connection)))
    await asyncio.sleep(0)
    connection.on_lost()
    with pytest.raises(ClientDisconnected):
        await waiting
    assert connection.on_lost is None


async def test_a_client_that_has_left_before_is_noticed():
    connection = PlainAsgiConnection()
    connection.lost = True
    with pytest.raises(ClientDisconnected):
        await watched(call(connection))


async def test_a_client_that_has_its_answer_may_leave():
    connection = PlainAsgiConnection()
    answered = call(connection)
    with CancelScope() as block, answered.cancel_on_disconnect(block):
        answered.state = ResponseState.COMPLETE
        connection.on_lost()
        await asyncio.sleep(0)


async def test_work_that_goes_on_without_its_client_notices_that_it_left():
    connection, left = PlainAsgiConnection(), []
    recorded = call(connection)
    recorded.on_disconnect = lambda: left.append(True)
    with CancelScope() as block, recorded.cancel_on_disconnect(block):
        connection.on_lost()
        await asyncio.sleep(0)
    assert left == [True]


async def test_the_end_of_one_request_leaves_the_next_watched():
    connection = PlainAsgiConnection()
    with call(connection).cancel_on_disconnect(CancelScope()):
        following = call(connection).cancel_on_disconnect(CancelScope())
        following.__enter__()
    assert connection.on_lost is not None
    following.__exit__()
    assert connection.on_lost is None
