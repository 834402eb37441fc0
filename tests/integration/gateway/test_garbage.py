"""However a request ends, nothing of it is left to Python's collector of cyclic garbage."""

import asyncio
import gc

import msgspec
import pytest

from maitred.api.exchange import HttpExchange
from maitred.api.http.protocol import HttpProtocol
from maitred.testing.script import AnswerFault, ScriptedAnswer
from tests.support.gateway import CARD, MODEL, gateway

pytestmark = pytest.mark.usefixtures("uncollected")
NEVER = ScriptedAnswer(fault=AnswerFault.STALL)
ONE_AT_A_TIME = msgspec.structs.replace(CARD, max_sequences=1)


def kept(kind):
    """All that there are, with what else has ended in this process before."""
    return {id(thing) for thing in gc.get_objects() if issubclass(type(thing), kind)}


async def test_who_is_refused():
    async with gateway() as system:
        assert (await system.chat(n=10_000)).status_code == 400
        before = kept(HttpExchange)
        for fields in ({"model": "unknown"}, {"max_tokens": 10_000}, {"n": 10_000}, {"temperature": "high"}):
            assert (await system.chat(**fields)).status_code in (400, 404)
        await system.wait_until(lambda: len(system.contexts) == 5)
        assert len(kept(HttpExchange) - before) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_who_hangs_up(stream):
    """While it runs, and while it waits for a place."""
    body = {"model": MODEL, "prompt": "Hello there", "max_tokens": 100, "stream": stream}
    async with gateway([NEVER], card=ONE_AT_A_TIME) as system:
        before = kept((HttpExchange, HttpProtocol))
        requests = [asyncio.create_task(system.client.post("/v1/completions", json=body)) for _ in range(3)]
        await system.wait_until(lambda: system.dispatcher.core.waiting == 2)
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
        await system.wait_until(lambda: len(system.contexts) == 3)
        await system.wait_until(lambda: not kept((HttpExchange, HttpProtocol)) - before)


async def test_who_gets_an_answer():
    async with gateway() as system:
        before = kept(HttpExchange)
        for stream in (False, True):
            assert (await system.chat(stream=stream)).status_code == 200
        await system.wait_until(lambda: len(system.contexts) == 2)
        await system.wait_until(lambda: not kept(HttpExchange) - before)
