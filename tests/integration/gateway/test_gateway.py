"""The gateway over real HTTP, against a scripted engine: answers, streams, and what happens when somebody leaves."""

import asyncio
import json
import random
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from maitred.core.context import Outcome
from maitred.core.errors import DeadlineUnmeetable
from maitred.testing.script import AnswerFault, ScriptedAnswer
from maitred.wire.sse import SSEDecoder
from tests.support.gateway import MODEL, Gateway, gateway, tokens_of
from tests.support.openai_schemas import validate

EOS = 2
HELLO = tokens_of("Hello there, my friend. How are you?")


def events_of(text: str) -> list[dict]:
    assert text.endswith("data: [DONE]\n\n")
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(line) for line in lines[:-1]]


async def broken_stream(system: Gateway) -> AsyncIterator[bytes]:
    """The pieces of a chat stream that must not end as if it were complete."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with system.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        try:
            async for data in response.aiter_raw():
                yield data
        except httpx.RemoteProtocolError:
            return
        raise AssertionError("The stream ended like a whole one.")


async def test_a_whole_chat_answer_and_a_streamed_one_say_the_same():
    async with gateway([ScriptedAnswer(tokens=[*HELLO, EOS])]) as system:
        whole = await system.chat(max_tokens=100)
        streamed = await system.chat(max_tokens=100, stream=True, stream_options={"include_usage": True})
        assert whole.status_code == streamed.status_code == 200
        body = whole.json()
        validate("CreateChatCompletionResponse", body)
        choice = body["choices"][0]
        assert choice["message"]["content"] == "Hello there, my friend. How are you?"
        assert choice["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len(HELLO) + 1
        chunks = events_of(streamed.text)
        for chunk in chunks:
            validate("CreateChatCompletionStreamResponse", chunk)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        assert text == choice["message"]["content"]
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "stop"
        assert all(c["usage"] is None for c in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == body["usage"]
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["cache-control"] == "no-cache"
        assert streamed.headers["x-accel-buffering"] == "no"


async def test_several_prompts_and_choices_are_indexed_prompt_first():
    async with gateway() as system:
        body = {"model": MODEL, "prompt": ["Hello", "Goodbye"], "n": 2, "max_tokens": 3, "echo": True}
        response = await system.client.post("/v1/completions", json=body)
        validate("CreateCompletionResponse", response.json())
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["text"][:4] for choice in choices] == ["Hell", "Hell", "Good", "Good"]
        assert response.json()["usage"]["completion_tokens"] == 12
        await system.wait_until(lambda: bool(system.contexts))
        assert system.contexts[0].outcome is Outcome.FINISHED


async def test_a_stop_string_ends_the_choice_at_the_replica_too():
    async with gateway(
        [ScriptedAnswer(tokens=tokens_of("Hello there, my friend. How are you?") * 20)], step_s=0.01
    ) as system:
        response = await system.chat(max_tokens=300, stop=[" friend"])
        choice = response.json()["choices"][0]
        assert choice["message"]["content"] == "Hello there, my"
        assert choice["finish_reason"] == "stop"
        upto = len(tokens_of("Hello there, my friend"))
        assert response.json()["usage"]["completion_tokens"] == upto
        await system.engine.wait_until(lambda: len(system.engine.cancelled) == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_everything_at_once(stream):
    async with gateway([ScriptedAnswer(tokens=HELLO * 30)], step_s=0.02) as system:
        # The connection closes with the task, after some tokens have gone out.
        request = asyncio.create_task(system.chat(max_tokens=400, stream=stream))
        await system.wait_until(lambda: system.engine.load().output_tokens >= 10)
        request.cancel()
        await asyncio.wait([request])
        await system.engine.wait_until(lambda: len(system.engine.cancelled) == 1)
        await system.wait_until(lambda: bool(system.contexts))
        assert system.link.open_streams == 0
        assert system.gate.count == 0
        assert system.contexts[0].outcome is Outcome.CANCELLED
        assert system.contexts[0].completion_tokens > 0


async def test_a_long_wait_for_the_first_token_is_filled_with_comments():
    async with gateway([ScriptedAnswer(tokens=[*HELLO, EOS], wait_steps=10)], step_s=0.05, heartbeat_s=0.1) as system:
        response = await system.chat(stream=True, max_tokens=100)
        assert response.text.startswith(": waiting for the first token\n\n: waiting")
        texts = [event.data for event in SSEDecoder().feed(response.content)]
        assert texts[-1] == "[DONE]"
        assert json.loads(texts[0])["choices"][0]["delta"]["role"] == "assistant"


async def test_an_engine_that_dies_before_the_first_token_is_an_honest_502():
    async with gateway([ScriptedAnswer(fault=AnswerFault.DROP)]) as system:
        response = await system.chat(stream=True)
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "replica_lost"
        assert system.contexts[0].outcome is Outcome.FAILED


async def test_an_engine_that_dies_in_the_middle_breaks_the_stream_off():
    async with gateway([ScriptedAnswer(tokens=HELLO, fault=AnswerFault.DROP, fault_after=4)]) as system:
        received = b"".join([data async for data in broken_stream(system)])
        last = json.loads(received.decode().strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "replica_lost"
        assert b"[DONE]" not in received
        await system.wait_until(lambda: bool(system.contexts))
        assert system.contexts[0].outcome is Outcome.FAILED
        assert system.contexts[0].completion_tokens == 4
        # And then: the engine is gone, and the next request gets Retry-After.
        response = await system.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "replica_unavailable"
        assert int(response.headers["retry-after"]) >= 1
        assert (await system.client.get("/health")).status_code == 503
        assert (await system.client.get("/health/live")).status_code == 200


async def test_a_slow_reader_holds_up_nobody_else():
    many = ScriptedAnswer(tokens=(HELLO * 60)[:480], tokens_per_step=4)
    async with gateway(lambda request: many, stall_grace_s=3600) as system:
        host, port = system.url.removeprefix("http://").split(":")
        body = json.dumps(
            {"model": MODEL, "prompt": ["x"] * 12, "max_tokens": 480, "stream": True, "n": 8, "logprobs": 5}
        ).encode()
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        # 12 x 8 x 480 tokens are far more bytes than all buffers on the way hold; nobody reads them.
        await system.wait_until(lambda: system.gate.count == 1)
        await system.wait_until(lambda: system.engine.load().paused == 12 * 8)
        for _ in range(5):
            async with asyncio.timeout(300):
                response = await system.chat(max_tokens=20)
            assert response.status_code == 200
        assert system.gate.count == 1
        writer.close()
        await system.wait_until(lambda: system.gate.count == 0)
        await system.wait_until(lambda: len(system.contexts) == 6)
        assert system.contexts[-1].outcome is Outcome.CANCELLED


async def test_a_full_gateway_rejects_with_retry_after():
    async with gateway([ScriptedAnswer(tokens=HELLO * 30)], step_s=0.05, max_in_flight=1) as system:
        first = asyncio.create_task(system.chat(max_tokens=400))
        await system.wait_until(lambda: system.gate.count == 1)
        response = await system.chat()
        assert response.status_code == 429
        assert response.json()["error"] == {
            "message": "The server has as many requests as it can hold. Try again after the time in Retry-After.",
            "type": "rate_limit_error",
            "param": None,
            "code": "saturated",
        }
        # Nobody has left yet: it is the time for which that has been so, at least a second, and a tenth for the jitter.
        assert response.headers["retry-after"] == "2"
        assert 1000 < int(response.headers["retry-after-ms"]) <= 1100
        first.cancel()
        await asyncio.wait([first])


async def test_a_draining_gateway_finishes_what_it_began():
    async with gateway([ScriptedAnswer(tokens=HELLO)], step_s=0.05) as system:
        first = asyncio.create_task(system.chat(max_tokens=400))
        await system.wait_until(lambda: system.gate.count == 1)
        draining = asyncio.create_task(system.gate.drain(10))
        await asyncio.sleep(0)
        refused = await system.chat()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert "retry-after" in refused.headers
        ready = await system.client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
        assert (await first).status_code == 200
        assert await draining == 0


async def test_a_stream_that_outlives_the_grace_period_is_broken_off():
    async with gateway([ScriptedAnswer(tokens=HELLO * 30)], step_s=0.05) as system:
        chunks = []
        draining = None
        async for data in broken_stream(system):
            draining = draining or asyncio.create_task(system.gate.drain(0.2))
            chunks.append(data)
        assert draining is not None
        assert await draining == 1
        assert b'"code":"draining"' in chunks[-1]
        assert system.link.open_streams == 0
        await system.engine.wait_until(lambda: len(system.engine.cancelled) == 1)


async def test_every_request_has_exactly_one_outcome_in_the_metrics():
    async with gateway([ScriptedAnswer(tokens=HELLO, cached_tokens=3)]) as system:
        await system.chat(max_tokens=400)
        await system.chat(model="other")
        await system.client.get("/nowhere")
        text = (await system.client.get("/metrics")).text
        assert 'maitred_requests_total{outcome="finished",route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'maitred_requests_total{outcome="refused",route="/v1/chat/completions",status="404"} 1.0' in text
        assert 'maitred_requests_total{outcome="refused",route="unmatched",status="404"} 1.0' in text
        assert f'maitred_output_tokens_total{{model="tiny"}} {len(HELLO)}.0' in text
        assert 'maitred_cached_tokens_total{model="tiny"} 3.0' in text
        assert 'maitred_engine_up{model="tiny",replica="local"} 1.0' in text
        assert "maitred_in_flight 0.0" in text


async def test_every_request_ends_once_and_leaves_nothing_behind():
    chance = random.Random(7)

    def answer(request):
        fault = chance.choice([None] * 6 + [AnswerFault.REJECT])
        return ScriptedAnswer(tokens=HELLO[: chance.randint(1, 9)] * chance.randint(1, 9), fault=fault)

    async def client(system):
        body = {"model": chance.choice([MODEL] * 9 + ["other"]), "prompt": ["x"] * chance.randint(1, 3)}
        body |= {"n": chance.randint(1, 3), "stream": chance.random() < 0.5, "max_tokens": chance.randint(1, 90)}
        body |= {"stop": [" friend"]} if chance.random() < 0.3 else {}
        try:
            async with asyncio.timeout(chance.choice([0.4, 0.8, 300])):
                await system.client.post("/v1/completions", json=body)
        except (TimeoutError, httpx.RemoteProtocolError):
            pass

    async def leave(system):
        body = {"model": MODEL, "prompt": ["x"] * 3, "stream": True, "max_tokens": 90}
        async with system.client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_raw())

    async with gateway(answer, step_s=0.02, max_in_flight=40) as system:
        await asyncio.gather(*(client(system) for _ in range(80)))
        await asyncio.gather(*(leave(system) for _ in range(8)))
        await system.wait_until(lambda: system.gate.count == 0)
        await system.wait_until(lambda: system.engine.load().running == 0)
        assert system.link.open_streams == 0
        assert {context.outcome for context in system.contexts} >= {
            Outcome.FINISHED,
            Outcome.REFUSED,
            Outcome.CANCELLED,
        }
        counted = sum(
            sample.value
            for family in text_string_to_metric_families(system.metrics.render()[0].decode())
            if family.name == "maitred_requests"
            for sample in family.samples
        )
        assert counted == len(system.contexts)


async def test_tokenize_and_detokenize_are_inverse():
    async with gateway() as system:
        text = "Füße und 日本 <|end|> 🙂"
        tokens = (await system.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
        assert tokens["count"] == len(tokens["tokens"])
        back = await system.client.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert back.json() == {"prompt": text}


async def test_a_body_that_does_not_arrive_gives_its_place_back():
    statuses = set()
    for body_timeout_s in (0.2, 2.0, 20.0):  # a busy machine asks the second time when the first has been given up
        async with gateway(max_in_flight=1, body_timeout_s=body_timeout_s) as system:
            host, _, port = system.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
            await system.wait_until(lambda: system.gate.count == 1)
            statuses.add((await system.chat()).status_code)
            answer = (await reader.read()).decode()  # to the end: the connection closes
            assert answer.startswith("HTTP/1.1 408 ")
            assert '"code":"request_timeout"' in answer
            assert (await system.chat()).status_code == 200
            writer.close()
            await writer.wait_closed()
        if 429 in statuses:
            break
    assert statuses <= {429, 200}
    assert 429 in statuses


async def test_a_stream_that_falls_silent_in_the_middle_shows_that_it_lives():
    silent = ScriptedAnswer(tokens=HELLO * 2, fault=AnswerFault.STALL, fault_after=3)
    async with gateway([silent], heartbeat_s=0.1) as system:
        body = {"model": MODEL, "prompt": "Hi", "stream": True, "max_tokens": 50}
        received = ""
        async with system.client.stream("POST", "/v1/completions", json=body) as response:
            async for piece in response.aiter_text():
                received += piece
                if received.count(": waiting for the next token\n\n") == 2:
                    break
        assert received.startswith("data: ")
        await system.engine.wait_until(lambda: len(system.engine.cancelled) == 1)


async def test_a_stream_that_talks_has_no_comments():
    texts = []
    for heartbeat_s in (0.2, 1.0, 5.0):  # on a busy machine a stream may really be silent for some of these
        step_s = heartbeat_s / 10
        async with gateway([ScriptedAnswer(tokens=HELLO * 4)], step_s=step_s, heartbeat_s=heartbeat_s) as system:
            texts.append((await system.chat(stream=True, max_tokens=100)).text)
        assert len(HELLO) * 4 * step_s > 2 * heartbeat_s
        if ": waiting" not in texts[-1]:
            break
    assert ": waiting" not in texts[-1]


async def test_a_refusal_waits_for_no_turn_of_the_event_loop():
    """Under load a turn takes as long as serving every stream: whoever is refused waits for one, not for six."""

    def refuse(dispatch_request, now_s):
        raise DeadlineUnmeetable

    body = msgspec.json.encode({"model": MODEL, "prompt": "Hello", "max_tokens": 8, "stream": True})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    sent = []

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    async with gateway() as system:
        system.dispatcher.load_shedder.check = refuse
        answering = asyncio.create_task(system.server.config.app(scope, receive, send))
        await asyncio.sleep(0)
        assert answering.done()
    assert sent[0]["status"] == 429
