"""A server that says that it runs another model now: its earlier answers are not found any more."""

import asyncio
from contextlib import ExitStack, asynccontextmanager

import pytest

from tests.integration.gateway.test_workers import caller, chat, gateway
from tests.integration.upstream.test_upstream_members import COUNTED, DONE, Bytes, chunk
from tests.integration.upstream.test_upstream_passing import running


def answer(fingerprint):
    return chunk({"content": "Hello"}, "stop", system_fingerprint=fingerprint) + COUNTED + DONE


@asynccontextmanager
async def gateway_of(tmp_path, url):
    """A gateway that starts and stops in a thread, because its server answers in this one."""
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, gateway(tmp_path, url, workers=1))
        await asyncio.to_thread(stack.close)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_not_kept_says_it_too(tmp_path, stream):
    server = Bytes(answer("fp_1"))
    kept = {"temperature": 0, "max_tokens": 5, "stream": stream}
    async with running(server.answer) as url, gateway_of(tmp_path, url) as started, caller(started) as client:

        async def found():
            answers = [await chat(client, **kept) for _ in range(2)]
            return [answer.headers.get("x-maitred-cache") for answer in answers]

        assert await found() == ["miss", "hit"]
        server.body = answer("fp_2")
        assert (await chat(client, temperature=1, max_tokens=5, stream=stream)).status_code == 200
        assert await found() == ["miss", "hit"]
