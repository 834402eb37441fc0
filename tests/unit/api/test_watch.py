"""Who is watched while an answer is made, and what watching costs who is answered at once."""

import asyncio

import pytest

from maitred.api.call import Call
from maitred.api.interrupt import ClientLeft, Interruptible
from maitred.core.errors import DeadlineUnmeetable


class Line:
    """A connection whose client leaves when it is told to; notes whether anybody listens."""

    def __init__(self):
        self.left = asyncio.Event()
        self.heard = asyncio.Event()
        self.listeners = 0

    async def receive(self):
        self.listeners += 1
        self.heard.set()
        try:
            await self.left.wait()
        finally:
            self.listeners -= 1
        return {"type": "http.disconnect"}

    async def send(self, message):
        raise AssertionError("Nothing is answered here.")

    def call(self):
        return Call({"path": "/", "method": "POST", "headers": []}, self.receive, self.send, 0.0)


async def turns(ends):
    """Turns of the event loop until it is over, from its first."""
    task = asyncio.create_task(ends)
    for turn in range(100):
        await asyncio.sleep(0)
        if task.done():
            return turn + 1
    raise AssertionError("It never ends.")


async def test_who_is_refused_at_once_waits_for_no_turn_of_the_event_loop():
    line = Line()

    async def refused():
        with pytest.raises(DeadlineUnmeetable):
            async with Interruptible() as block, line.call().watched(block):
                raise DeadlineUnmeetable

    assert await turns(refused()) == 1
    await asyncio.sleep(0)
    assert line.listeners == 0


async def test_a_client_that_leaves_ends_what_is_waited_for():
    line = Line()

    async def wait():
        async with Interruptible() as block, line.call().watched(block):
            asyncio.get_running_loop().call_later(0, line.left.set)
            await asyncio.Event().wait()

    with pytest.raises(ClientLeft):
        await wait()
    assert line.listeners == 0


async def test_nobody_listens_any_more_when_the_answer_is_there():
    line = Line()
    async with Interruptible() as block, line.call().watched(block):
        await line.heard.wait()
        assert line.listeners == 1
    assert line.listeners == 0


async def test_a_client_that_has_left_by_the_first_wait_is_noticed():
    line = Line()
    line.left.set()
    with pytest.raises(ClientLeft):
        async with Interruptible() as block, line.call().watched(block):
            await asyncio.Event().wait()
