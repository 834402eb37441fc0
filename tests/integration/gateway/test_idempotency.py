"""`Idempotency-Key` over real HTTP: one generation, one bill, and the same bytes for everybody who asks again."""

import asyncio
import json
import random

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from maitred.cache.config import IdempotencyConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.testing.script import AnswerFault, ScriptedAnswer
from tests.support.clock import LaterClock
from tests.support.gateway import MODEL, Gateway, gateway, tokens_of

EOS = 2
HELLO = tokens_of("Hello there, my friend. How are you?")
LONG = ScriptedAnswer(tokens=[*(HELLO * 30)[:100], EOS])
"""At the usual pace of these tests, some two seconds."""
STEP_S = 0.02


async def ask(system: Gateway, key: str, *, content: str = "Hi", stream: bool = True, **fields: object):
    """A chat with a key, read to its end."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 400, **fields}
    return await system.client.post(
        "/v1/chat/completions", json={**body, "stream": stream}, headers={"Idempotency-Key": key}
    )


async def leave_after(system: Gateway, key: str, steps: int, **fields: object) -> None:
    """A client that is gone after about so many steps of the engine."""
    leaving = asyncio.create_task(ask(system, key, **fields))
    await wait_steps(system, steps)
    leaving.cancel()
    await asyncio.wait([leaving])


async def wait_steps(system: Gateway, steps: int) -> None:
    """Returns when the engine has made so many steps of one token for the first request."""
    await system.wait_until(lambda: system.engine.load().output_tokens >= steps)


def replayed(response: httpx.Response) -> bool:
    return response.headers.get("x-maitred-idempotent-replay") == "true"


def counted(system: Gateway, name: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(system.metrics.render()[0].decode())
        if family.name == name
        for sample in family.samples
    )


async def test_twenty_at_once_get_the_same_bytes_of_one_generation():
    async with gateway([LONG], step_s=STEP_S) as system:
        responses = await asyncio.gather(*(ask(system, "k", n=2) for _ in range(20)))
        assert len(system.engine.submitted) == 1
        assert {response.status_code for response in responses} == {200}
        assert len({response.content for response in responses}) == 1
        assert responses[0].text.endswith("data: [DONE]\n\n")
        assert {response.headers["content-type"] for response in responses} == {"text/event-stream; charset=utf-8"}
        # Each is a request of its own, and one of them did the work.
        ids = {response.headers["x-request-id"] for response in responses}
        assert len(ids) == 20
        (worker,) = [response for response in responses if not replayed(response)]
        originals = {response.headers["x-maitred-original-request-id"] for response in responses if replayed(response)}
        assert originals == {worker.headers["x-request-id"]}
        await system.wait_until(lambda: len(system.contexts) == 20)
        assert {context.outcome for context in system.contexts} == {Outcome.FINISHED}
        assert sorted(context.completion_tokens for context in system.contexts) == [0] * 19 + [2 * len(LONG.tokens)]
        (billed,) = system.ledger.events
        assert (billed.request_id, billed.output_tokens) == (worker.headers["x-request-id"], 2 * len(LONG.tokens))
        assert counted(system, "maitred_requests") == 20
        assert counted(system, "maitred_output_tokens") == 2 * len(LONG.tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_after_the_end_gets_the_stored_answer(stream):
    async with gateway([ScriptedAnswer(tokens=[*HELLO, EOS])]) as system:
        first = await ask(system, "k", stream=stream, n=3)
        again = await ask(system, "k", stream=stream, n=3)
        assert first.content == again.content
        assert first.headers["content-type"] == again.headers["content-type"]
        assert (replayed(first), replayed(again)) == (False, True)
        assert len(system.engine.submitted) == 1


async def test_a_repeat_attaches_to_what_runs():
    async with gateway([LONG], step_s=STEP_S) as system:
        first = asyncio.create_task(ask(system, "k"))
        await wait_steps(system, 40)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "stream": True}
        content = json.dumps(body, separators=(",", ":")).encode()
        async with system.client.stream(
            "POST", "/v1/chat/completions", content=content, headers={"Idempotency-Key": "k"}
        ) as repeat:
            pieces = [piece async for piece in repeat.aiter_raw()]
        # What was sent so far came at once, the rest as it was made.
        assert pieces[0].count(b"data: ") >= 5
        assert len(pieces) > 5
        assert b"".join(pieces) == (await first).content
        assert len(system.engine.submitted) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_work_outlives_its_client_and_the_retry_gets_the_whole(stream):
    async with gateway([LONG], step_s=STEP_S) as system:
        await leave_after(system, "k", 10, stream=stream)
        await asyncio.sleep(5 * STEP_S)
        assert not system.contexts
        assert system.gate.count == 1  # the work, whose client has left
        retry = await ask(system, "k", stream=stream)
        assert replayed(retry)
        text = (
            "".join(
                json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
                for line in retry.text.split("\n\n")[:-2]
            )
            if stream
            else retry.json()["choices"][0]["message"]["content"]
        )
        assert tokens_of(text) == LONG.tokens[:-1]
        assert len(system.engine.submitted) == 1
        assert not system.engine.cancelled
        await system.wait_until(lambda: len(system.contexts) == 2)
        worker, reader = sorted(system.contexts, key=lambda context: context.started_s)
        assert (worker.outcome, worker.completion_tokens) == (Outcome.CANCELLED, len(LONG.tokens))
        assert (reader.outcome, reader.completion_tokens) == (Outcome.FINISHED, 0)
        (billed,) = system.ledger.events
        assert (billed.outcome, billed.output_tokens) == (Outcome.FINISHED, len(LONG.tokens))
        assert system.gate.count == 0
        assert (await ask(system, "k", stream=stream)).content == retry.content


async def test_a_client_that_leaves_before_the_first_token_has_its_answer_made_too():
    async with gateway([ScriptedAnswer(tokens=[*HELLO, EOS], wait_steps=10)], step_s=STEP_S) as system:
        leaving = asyncio.create_task(ask(system, "k"))
        await system.engine.wait_until(lambda: len(system.engine.submitted) == 1)
        leaving.cancel()
        await asyncio.wait([leaving])
        await system.wait_until(lambda: bool(system.contexts))
        assert (system.contexts[0].outcome, system.contexts[0].status) == (Outcome.CANCELLED, 499)
        assert system.contexts[0].completion_tokens == len(HELLO) + 1
        assert replayed(await ask(system, "k"))
        assert len(system.engine.submitted) == 1


async def test_a_key_stands_for_one_body_on_one_route():
    async with gateway([ScriptedAnswer(tokens=[*HELLO, EOS])]) as system:
        assert (await ask(system, "k")).status_code == 200
        other = await ask(system, "k", content="Something else")
        assert other.status_code == 409
        assert other.json()["error"]["code"] == "idempotency_conflict"
        assert "another body" in other.json()["error"]["message"]
        assert other.headers["x-should-retry"] == "false"
        await system.wait_until(lambda: len(system.contexts) == 2)
        assert system.contexts[1].outcome is Outcome.REFUSED
        assert len(system.engine.submitted) == 1
        completion = await system.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers={"Idempotency-Key": "k"}
        )
        assert completion.status_code == 200
        assert not replayed(completion)
        assert (await ask(system, "k")).status_code == 200


@pytest.mark.parametrize("value", ["", "x" * 256, "tab\there", "é".encode()])
async def test_a_key_is_short_printable_ascii(value):
    async with gateway() as system:
        response = await ask(system, value)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "Idempotency-Key"
        assert not system.engine.submitted


async def test_an_answer_that_is_too_old_is_made_anew():
    clock, config = LaterClock(), IdempotencyConfig(ttl_s=600)
    async with gateway([ScriptedAnswer(tokens=[*HELLO, EOS])], clock=clock, idempotency=config) as system:
        first = await ask(system, "k")
        assert replayed(await ask(system, "k"))
        clock.passed_s += 601.0
        anew = await ask(system, "k")
        assert not replayed(anew)
        assert anew.content != first.content  # its id, for one
        assert len(system.engine.submitted) == 2


async def test_a_refusal_is_not_kept():
    answers = [ScriptedAnswer(fault=AnswerFault.REJECT, retryable=True), ScriptedAnswer(tokens=[*HELLO, EOS])]
    async with gateway(answers, step_s=STEP_S) as system:
        failed = await asyncio.gather(*(ask(system, "k") for _ in range(3)))
        assert all(response.status_code >= 400 for response in failed)
        # Each got it under its own id.
        assert len({response.headers["x-request-id"] for response in failed}) == 3
        assert len(system.engine.submitted) == 1
        assert len(system.kept) == 0
        assert (await ask(system, "k")).status_code == 200
        assert len(system.engine.submitted) == 2


async def test_a_stream_that_broke_off_is_not_kept():
    answer = ScriptedAnswer(tokens=HELLO, fault=AnswerFault.DROP, fault_after=4)
    async with gateway([answer], step_s=STEP_S) as system:

        async def read() -> bytes:
            received = b""
            async with system.client.stream(
                "POST",
                "/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True},
                headers={"Idempotency-Key": "k"},
            ) as response:
                try:
                    async for piece in response.aiter_raw():
                        received += piece
                except httpx.RemoteProtocolError:
                    return received
            raise AssertionError("The stream ended like a whole one.")

        broken = await asyncio.gather(*(read() for _ in range(3)))
        assert len(set(broken)) == 1
        assert b'"code":"replica_lost"' in broken[0]
        assert b"[DONE]" not in broken[0]
        await system.wait_until(lambda: len(system.contexts) == 3)
        assert {context.outcome for context in system.contexts} == {Outcome.FAILED}
        # The engine is gone. What counts is that the repeat tries.
        assert (await ask(system, "k")).json()["error"]["code"] == "replica_unavailable"


async def test_a_rejection_by_a_full_gateway_is_not_recorded():
    async with gateway([LONG], step_s=STEP_S, max_in_flight=1) as system:
        other = asyncio.create_task(ask(system, "other"))
        await system.wait_until(lambda: system.gate.count == 1)
        assert (await ask(system, "k")).status_code == 429
        await other
        assert (await ask(system, "k")).status_code == 200


async def test_a_drain_waits_for_work_whose_client_left():
    async with gateway([LONG], step_s=STEP_S) as system:
        await leave_after(system, "k", 10)
        assert await system.gate.drain(300) == 0
        assert system.contexts[0].completion_tokens == len(LONG.tokens)


async def test_a_drain_ends_work_whose_client_left_when_the_grace_period_is_over():
    async with gateway([LONG], step_s=STEP_S) as system:
        await leave_after(system, "k", 10)
        attached = asyncio.create_task(ask(system, "k"))
        await system.wait_until(lambda: system.gate.count == 2)
        assert await system.gate.drain(0.1) == 2
        with pytest.raises(httpx.RemoteProtocolError):
            await attached
        await system.wait_until(lambda: len(system.contexts) == 2)
        assert system.link.open_streams == 0
        assert system.gate.count == 0
        assert {context.outcome for context in system.contexts} == {Outcome.FAILED}
        assert (len(system.kept), system.kept.held_bytes) == (0, 0)
        await system.engine.wait_until(lambda: len(system.engine.cancelled) == 1)


async def test_a_slow_reader_holds_up_neither_the_work_nor_the_others():
    many = ScriptedAnswer(tokens=(HELLO * 60)[:480], tokens_per_step=8)
    body = json.dumps(
        {"model": MODEL, "prompt": ["x"] * 12, "max_tokens": 480, "stream": True, "n": 8, "logprobs": 5}
    ).encode()
    config = IdempotencyConfig(max_answer_bytes=1 << 30, max_bytes=1 << 30)
    async with gateway([many], idempotency=config) as system:
        host, port = system.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        writer.write(head + body)
        await system.wait_until(lambda: system.gate.count == 1)
        # It does the work, and reads nothing; the repeat gets all of it.
        async with asyncio.timeout(300):
            repeat = await system.client.post("/v1/completions", content=body, headers={"Idempotency-Key": "k"})
        assert replayed(repeat)
        assert repeat.text.endswith("data: [DONE]\n\n")
        assert len(repeat.content) > 4 << 20
        assert system.engine.load().running == 0
        assert system.gate.count == 1
        writer.close()
        await system.wait_until(lambda: len(system.contexts) == 2)
        worker = system.contexts[1]
        assert (worker.outcome, worker.completion_tokens) == (Outcome.CANCELLED, 12 * 8 * 480)
        assert len(system.engine.submitted) == 12


async def test_an_answer_that_is_too_large_reaches_its_client_and_is_refused_afterwards():
    async with gateway([LONG], step_s=STEP_S, idempotency=IdempotencyConfig(max_answer_bytes=2048)) as system:
        first = asyncio.create_task(ask(system, "k"))
        await wait_steps(system, 40)
        meanwhile = await ask(system, "k")
        whole = await first
        assert whole.text.endswith("data: [DONE]\n\n")
        assert len(whole.content) > 2048
        for refused in (meanwhile, await ask(system, "k")):
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "idempotency_conflict"
            assert "too large to keep" in refused.json()["error"]["message"]
        assert len(system.engine.submitted) == 1
        assert system.kept.held_bytes < 2048


async def test_an_answer_that_is_too_large_ends_with_its_last_reader():
    async with gateway([LONG], step_s=STEP_S, idempotency=IdempotencyConfig(max_answer_bytes=2048)) as system:
        await leave_after(system, "k", 30)
        await system.engine.wait_until(lambda: len(system.engine.cancelled) == 1)
        await system.wait_until(lambda: bool(system.contexts))
        assert system.contexts[0].outcome is Outcome.CANCELLED
        assert 0 < system.contexts[0].completion_tokens < 80
        # What was made is billed, as with every client that leaves; that is why the key is not free again.
        (billed,) = system.ledger.events
        assert (billed.outcome, billed.output_tokens) == (Outcome.CANCELLED, system.contexts[0].completion_tokens)
        assert (await ask(system, "k")).status_code == 409


async def test_a_large_whole_answer_reaches_its_client():
    async with gateway([LONG], idempotency=IdempotencyConfig(max_answer_bytes=1024)) as system:
        first = await ask(system, "k", stream=False, n=4, logprobs=True, top_logprobs=5)
        assert first.status_code == 200
        assert len(first.json()["choices"]) == 4
        assert (await ask(system, "k", stream=False, n=4, logprobs=True, top_logprobs=5)).status_code == 409


async def test_a_repeat_uses_none_of_its_callers_limits_and_says_where_they_stand():
    limit = Limit(id="l", subject="*", kind=LimitKind.REQUESTS_PER_MINUTE, value=2)
    async with gateway([ScriptedAnswer(tokens=[*HELLO, EOS])], limited=[limit]) as system:
        first = await ask(system, "k")
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        for _ in range(5):
            again = await ask(system, "k")
            assert replayed(again)
            assert again.headers["x-ratelimit-remaining-requests"] == "1"
        assert (await ask(system, "other")).status_code == 200
        refused = await ask(system, "third")
        assert refused.status_code == 429
        # A refusal is not what the key stands for.
        assert (await ask(system, "third", content="Something else")).status_code == 429
        assert len(system.ledger.events) == 2


async def test_without_a_key_everything_is_as_ever():
    async with gateway([ScriptedAnswer(tokens=[*HELLO, EOS])]) as system:
        assert not replayed(await system.chat())
        assert not replayed(await system.chat())
        assert len(system.engine.submitted) == 2
        assert len(system.kept) == 0


async def test_many_requests_that_come_and_go_leave_nothing_behind():
    chance = random.Random(11)

    async def client(system: Gateway) -> None:
        for _ in range(4):
            key = chance.randrange(12)
            try:
                async with asyncio.timeout(chance.choice([0.05, 0.2, 0.5, 20])):
                    response = await ask(system, str(key), content=f"Question {key}", stream=bool(key % 2))
                    assert response.status_code == 200
                    whole.setdefault(key, response.content)
                    assert whole[key] == response.content
            except TimeoutError:
                pass

    whole: dict[int, bytes] = {}
    async with gateway([ScriptedAnswer(tokens=[*HELLO * 3, EOS])], step_s=STEP_S) as system:
        await asyncio.gather(*(client(system) for _ in range(20)))
        await system.wait_until(lambda: system.gate.count == 0)
        assert len(system.engine.submitted) == len(system.kept) <= 12
        assert sum(context.completion_tokens for context in system.contexts) == len(system.kept) * (len(HELLO) * 3 + 1)
        assert counted(system, "maitred_requests") == len(system.contexts)
        assert system.link.open_streams == 0


async def test_comments_are_each_readers_own_and_no_part_of_what_is_repeated():
    slow = ScriptedAnswer(tokens=[*HELLO, EOS], wait_steps=15)
    async with gateway([slow], step_s=STEP_S, heartbeat_s=0.05) as system:
        first, again = await asyncio.gather(ask(system, "k"), ask(system, "k"))
        late = await ask(system, "k")
        assert len(system.engine.submitted) == 1
        for live in (first, again):
            assert live.text.startswith(": ")
            assert live.text.endswith("data: [DONE]\n\n")
        assert ": waiting" not in late.text
        events = [[line for line in answer.text.splitlines() if line.startswith("data:")] for answer in (first, late)]
        assert events[0] == events[1]
        assert replayed(late)
