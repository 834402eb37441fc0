"""Clients that stop reading, over real sockets: nothing is held for them without bound, and not for ever."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import pytest

from maitred.core.context import Outcome
from maitred.testing.script import ScriptedAnswer
from tests.support.charges import listen
from tests.support.gateway import MODEL, gateway, tokens_of

MANY = ScriptedAnswer(tokens=(tokens_of("Hello there, my friend. How are you?") * 60)[:480], tokens_per_step=4)
FAT = {"prompt": ["x"] * 3, "n": 8, "logprobs": 5}
"""3 x 8 x 480 tokens with their scores: far more than all buffers on the way hold."""


@asynccontextmanager
async def asked(system, *, path="/v1/completions", headers=(), **fields):
    """A connection on which something was asked, and of which nothing is read unless the test does."""
    host, port = system.url.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    body = json.dumps({"model": MODEL, "max_tokens": 480, **fields}).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    await asyncio.get_running_loop().sock_sendall(raw, "\r\n".join([*head, "", ""]).encode() + body)
    try:
        yield raw
    finally:
        raw.close()


async def rest_of(raw, *, upto=b""):
    """What the connection has until it ends, or says `upto`."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    async with asyncio.timeout(300):
        while not (upto and upto in data[-64 * 1024 :]) and (piece := await loop.sock_recv(raw, 1 << 16)):
            data += piece
    return bytes(data)


@pytest.mark.parametrize("headers", [(), ("Idempotency-Key: k",)])
async def test_a_stream_that_is_not_read_is_paused_and_then_ended(headers):
    async with gateway(lambda request: MANY, stall_grace_s=0.5, unread_tokens=64) as system:
        async with asked(system, stream=True, headers=headers, **FAT) as raw:
            if not headers:
                # Work that others may ask for again goes on without this reader.
                await system.wait_until(lambda: system.engine.load().paused == 24)
                assert system.engine.load().output_tokens < 24 * 480
            await system.wait_until(lambda: bool(system.contexts))
            assert system.contexts[0].outcome is Outcome.CANCELLED
            assert system.contexts[0].stalled
            assert (system.gate.count, system.link.open_streams) == (0, 0)
            if not headers:
                await system.engine.wait_until(lambda: system.engine.load().running == 0)
            # Nothing waits for it any more, neither here nor in the kernel.
            await system.wait_until(lambda: len(system.server.server_state.connections) == 0)
            with pytest.raises(ConnectionResetError):
                await rest_of(raw)
        assert "maitred_stalled_requests_total 1.0" in (await system.client.get("/metrics")).text


async def test_tokens_that_nobody_has_read_yet_are_charged_as_they_come():
    """A stream that is not read holds its slots like any other, and its tenant is as far behind the others for it."""
    async with gateway(lambda request: MANY, unread_tokens=64) as system:
        charges = []
        listen(system.dispatcher.core.queues[0].fair_queue, lambda flow, service: charges.append(service))
        async with asked(system, stream=True, **FAT | {"prompt": "x"}) as raw:
            await system.wait_until(lambda: system.engine.load().paused == 8)
            weights = system.dispatcher.core.weights
            prompt = charges[0]
            await system.wait_until(
                lambda: sum(charges) == prompt + weights.output * system.engine.load().output_tokens
            )
            await rest_of(raw, upto=b"[DONE]")
        await system.wait_until(lambda: bool(system.contexts))
        assert sum(charges) == prompt + weights.output * 8 * 480


async def test_a_reader_that_comes_back_gets_everything():
    async with gateway(lambda request: MANY, unread_tokens=64) as system:
        async with asked(system, stream=True, **FAT) as raw:
            await system.wait_until(lambda: system.engine.load().paused == 24)
            received = await rest_of(raw, upto=b"[DONE]")
            assert received.count(b'"finish_reason":"') == 24
        await system.wait_until(lambda: bool(system.contexts))
        assert system.contexts[0].outcome is Outcome.FINISHED
        assert system.contexts[0].completion_tokens == 24 * 480
        assert not system.contexts[0].stalled
        assert [pause.paused for pause in system.engine.pauses][-1] is False


async def test_a_slow_reader_is_not_taken_for_one_that_stopped():
    async with gateway(lambda request: MANY, stall_grace_s=0.3, unread_tokens=64) as system:
        async with asked(system, stream=True, **FAT | {"prompt": "x"}) as raw:
            loop = asyncio.get_running_loop()
            received = bytearray()
            async with asyncio.timeout(300):
                while b"[DONE]" not in received[-4096:]:
                    received += await loop.sock_recv(raw, 64 * 1024)
                    await asyncio.sleep(0.01)  # a tenth of what the gateway could send
        await system.wait_until(lambda: bool(system.contexts))
        assert system.contexts[0].outcome is Outcome.FINISHED


async def test_a_whole_answer_that_is_not_read_is_not_kept():
    async with gateway(lambda request: MANY, stall_grace_s=0.3) as system, asked(system, **FAT) as raw:
        await system.wait_until(lambda: bool(system.contexts))
        assert system.contexts[0].outcome is Outcome.CANCELLED
        assert system.contexts[0].stalled
        await system.wait_until(lambda: len(system.server.server_state.connections) == 0)
        with pytest.raises(ConnectionResetError):
            await rest_of(raw)


async def test_a_whole_answer_that_is_read_arrives_whole():
    async with gateway(lambda request: MANY) as system:
        response = await system.client.post("/v1/completions", json={"model": MODEL, "max_tokens": 480, **FAT})
        assert len(response.content) > 500_000
        assert len(response.json()["choices"]) == 24
        assert system.contexts[0].outcome is Outcome.FINISHED


async def test_a_stream_that_is_broken_off_does_not_keep_its_connection():
    """The server shuts down; what its client did not read must not hold it up, nor stay."""
    async with gateway(lambda request: MANY, stall_grace_s=0.5) as system, asked(system, stream=True, **FAT):
        # On a crowded machine the grace may be over before all of its sequences stand still.
        await system.wait_until(lambda: system.engine.load().paused == 24 or bool(system.contexts))
        system.gate.cancel_all()
        await system.wait_until(lambda: bool(system.contexts))
        await system.wait_until(lambda: len(system.server.server_state.connections) == 0)


async def test_those_that_do_not_read_hold_up_nobody():
    async with gateway(lambda request: MANY, unread_tokens=64) as system:
        async with asyncio.TaskGroup() as group:
            stop = asyncio.Event()

            async def stall():
                async with asked(system, stream=True, **FAT | {"prompt": "x"}):
                    await stop.wait()

            for _ in range(10):
                group.create_task(stall())
            await system.wait_until(lambda: system.engine.load().paused == 80)
            for _ in range(5):
                async with asyncio.timeout(300):
                    response = await system.chat(max_tokens=20)
                assert response.status_code == 200
            stop.set()
        await system.wait_until(lambda: system.gate.count == 0)
