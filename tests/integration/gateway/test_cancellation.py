"""Clients that leave, on every route and at every moment: nothing goes on for them, and nothing stays."""

import asyncio
import json
import random

import httpx
import pytest

from maitred.core.context import Outcome
from maitred.testing.script import AnswerFault, ScriptedAnswer
from tests.support.gateway import MODEL, Gateway, gateway, tokens_of

HELLO = tokens_of("Hello there, my friend. How are you?")
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello there"}]},
    "/v1/completions": {"prompt": "Hello there"},
}
SEVERAL = {"prompt": ["Hello", "Hello there"], "n": 2}
NEVER = ScriptedAnswer(fault=AnswerFault.STALL)
"""Runs, and says nothing."""


def body_for(path, **fields):
    return {"model": MODEL, "max_tokens": 100, **ROUTES[path], **fields}


async def leave(request):
    """The connection closes with the task."""
    request.cancel()
    await asyncio.wait([request])


async def nothing_is_left(system: Gateway):
    assert system.gate.count == 0
    assert system.link.open_streams == 0
    await system.engine.wait_until(lambda: system.engine.load().running == 0)
    core = system.dispatcher.core
    assert (core.waiting, core.running) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/chat/completions", {}), ("/v1/chat/completions", {"n": 3}), ("/v1/completions", SEVERAL)]
)
async def test_before_the_first_token_and_in_the_middle(path, fields, stream):
    answers = [NEVER, ScriptedAnswer(tokens=HELLO * 10)]
    async with gateway(lambda request: answers[len(system.engine.submitted) > prompts], step_s=0.02) as system:
        prompts = len(fields["prompt"]) if "prompt" in fields else 1
        for time in range(2):
            request = asyncio.create_task(system.client.post(path, json=body_for(path, stream=stream, **fields)))
            await system.engine.wait_until(lambda time=time: len(system.engine.submitted) == prompts * (time + 1))
            if time == 1:
                await system.wait_until(lambda: system.engine.load().output_tokens > 4)
            await leave(request)
            await system.engine.wait_until(lambda time=time: len(system.engine.cancelled) == prompts * (time + 1))
            await system.wait_until(lambda time=time: len(system.contexts) == time + 1)
            await nothing_is_left(system)
        assert [context.outcome for context in system.contexts] == [Outcome.CANCELLED] * 2
        assert (system.contexts[0].completion_tokens, system.contexts[1].completion_tokens > 0) == (0, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_in_the_queue(path, stream):
    """Every sequence is taken, so the request waits; the engine never hears of it."""
    async with gateway([NEVER]) as system:
        running = asyncio.create_task(
            system.client.post("/v1/completions", json=body_for("/v1/completions", prompt=["x"] * 16, n=8))
        )
        await system.engine.wait_until(lambda: len(system.engine.submitted) == 16)
        headers = {"x-request-id": "mine"}
        request = asyncio.create_task(
            system.client.post(path, json=body_for(path, stream=stream), headers=headers, timeout=300)
        )
        await system.wait_until(lambda: system.dispatcher.core.waiting == 1)
        place = await system.client.get("/v1/queue/mine")
        assert place.status_code == 200
        assert place.json()["position"] == 0
        assert place.json()["predicted_ttft_ms"] >= place.json()["predicted_wait_ms"] >= 0
        await leave(request)
        await system.wait_until(lambda: bool(system.contexts) and system.contexts[-1].request_id == "mine")
        assert system.contexts[-1].outcome is Outcome.CANCELLED
        assert system.dispatcher.core.waiting == 0
        assert len(system.engine.submitted) == 16
        assert (await system.client.get("/v1/queue/mine")).status_code == 404
        await leave(running)
        await system.wait_until(lambda: system.gate.count == 0)


async def test_a_stream_that_waits_in_the_queue_gets_its_position():
    async with gateway([NEVER], heartbeat_s=0.05) as system:
        running = asyncio.create_task(
            system.client.post("/v1/completions", json=body_for("/v1/completions", prompt=["x"] * 16, n=8))
        )
        await system.engine.wait_until(lambda: len(system.engine.submitted) == 16)
        body = body_for("/v1/completions", stream=True)
        async with system.client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    assert line.startswith(": queue position 0, predicted wait ")
                    break
        await leave(running)
        await system.wait_until(lambda: system.gate.count == 0)
        assert len(system.engine.submitted) == 16


async def test_while_a_long_prompt_is_read():
    """It is tokenised in a thread, which cannot be stopped; but nothing follows on it."""
    async with gateway() as system:
        body = body_for("/v1/completions", prompt=["word " * 400] * 2000, n=1)
        request = asyncio.create_task(system.client.post("/v1/completions", json=body))
        await system.wait_until(lambda: system.gate.count == 1)
        await leave(request)
        await system.wait_until(lambda: bool(system.contexts))
        assert system.contexts[0].outcome is Outcome.CANCELLED
        assert system.engine.submitted == []


async def test_a_client_that_has_sent_the_next_request_already_is_seen_to_leave():
    async with gateway([NEVER]) as system:
        host, port = system.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(body_for("/v1/completions")).encode()
        request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        writer.write(request)
        await system.engine.wait_until(lambda: bool(system.engine.submitted))
        writer.write(request)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await system.engine.wait_until(lambda: len(system.engine.cancelled) == 1)
        await system.wait_until(lambda: system.gate.count == 0)
        assert {context.outcome for context in system.contexts} == {Outcome.CANCELLED}


async def test_many_at_random_moments():
    chance = random.Random(11)

    def answer(request):
        return ScriptedAnswer(tokens=HELLO * chance.randint(1, 20), wait_steps=chance.randint(0, 3))

    async def client(system):
        path = chance.choice(list(ROUTES))
        body = body_for(path, stream=chance.random() < 0.5, n=chance.randint(1, 4), max_tokens=chance.randint(1, 60))
        if path == "/v1/completions":
            body["prompt"] = ["Hello " * chance.randint(1, 300)] * chance.randint(1, 3)
        headers = {"idempotency-key": f"k{chance.randint(0, 30)}"} if chance.random() < 0.2 else {}
        try:
            async with asyncio.timeout(chance.choice([0.1, 0.3, 0.6, 1.0, 20])):
                await system.client.post(path, json=body, headers=headers)
        except (TimeoutError, httpx.HTTPError):
            pass

    async with gateway(answer, step_s=0.005) as system:
        await asyncio.gather(*(client(system) for _ in range(150)))
        await system.wait_until(lambda: system.gate.count == 0)
        await nothing_is_left(system)
        outcomes = {context.outcome for context in system.contexts}
        # Keys that come again with another body are refused.
        assert {Outcome.FINISHED} < outcomes <= {Outcome.FINISHED, Outcome.CANCELLED, Outcome.REFUSED}
        # All that the replica has is free again.
        response = await system.client.post(
            "/v1/completions", json=body_for("/v1/completions", prompt=["x"] * 16, n=8, max_tokens=2)
        )
        assert len(response.json()["choices"]) == 128
