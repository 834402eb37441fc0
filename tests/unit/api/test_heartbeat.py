"""Signs of life on a silent stream."""

import asyncio

from maitred.api.exchange import HttpExchange
from maitred.api.http.connection import EXTENSION, PlainAsgiConnection
from maitred.api.streaming import StreamHeartbeat
from maitred.core.flow import QueuePosition


class Client:
    """One who reads a stream, and what it has got so far."""

    def __init__(self, *, writable=True):
        self.connection = PlainAsgiConnection()
        self.connection.writable = writable
        scope = {"path": "/", "method": "POST", "headers": [], "extensions": {EXTENSION: self.connection}}
        self.call = HttpExchange(scope, None, self.send, 0.0)
        self.messages = []
        self.news = asyncio.Event()

    async def send(self, message):
        self.messages.append(message)
        self.news.set()

    async def has(self, pieces):
        async with asyncio.timeout(300):
            while len(self.pieces) < pieces:
                self.news.clear()
                await self.news.wait()
        return self.pieces

    @property
    def pieces(self):
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


async def test_the_first_comment_begins_the_stream_and_tells_the_place():
    client = Client()
    client.call.context.position = lambda: QueuePosition(12, 3.4, 3.6)
    async with StreamHeartbeat(client.call, 0.01):
        assert await client.has(2) == [b": queue position 12, predicted wait 3400 ms\n\n"] * 2
    assert client.messages[0]["type"] == "http.response.start"
    assert client.call.status == 200


async def test_it_says_what_is_waited_for():
    client = Client()
    client.call.context.position = lambda: None
    async with StreamHeartbeat(client.call, 0.01):
        await client.has(1)
        client.call.context.first_token_s = 1.0
        await client.has(3)
    assert client.pieces[0] == b": waiting for the first token\n\n"
    assert client.pieces[-1] == b": waiting for the next token\n\n"


async def test_a_stream_that_talks_gets_none():
    client = Client()
    async with StreamHeartbeat(client.call, 1.0):
        async with asyncio.timeout(300):
            loop = asyncio.get_running_loop()
            end_s = loop.time() + 2.2
            while loop.time() < end_s:
                await client.call.stream(b"x")
                await asyncio.sleep(0.005)
        assert set(client.pieces) == {b"x"}


async def test_a_client_that_does_not_read_what_there_is_gets_none():
    client = Client(writable=False)
    async with StreamHeartbeat(client.call, 0.001):
        # Only when it has read what there is.
        asyncio.get_running_loop().call_later(0.02, setattr, client.connection, "writable", True)
        await client.has(1)
    assert len(client.pieces) == 1


async def test_there_are_none_after_its_end():
    client = Client()
    async with StreamHeartbeat(client.call, 0.001):
        await client.has(1)
    got = len(client.messages)
    await asyncio.sleep(0.01)
    assert len(client.messages) == got
    assert len(asyncio.all_tasks()) == 1
