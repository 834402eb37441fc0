"""The official `openai` client takes us for OpenAI: whole and streamed, sync and async, and in what goes wrong."""
# ruff: noqa: PT012, SIM117 - nested contexts say who lives within whom

import asyncio

import httpx
import openai
import pytest

from maitred.testing.script import AnswerFault, ScriptedAnswer
from tests.support.gateway import MODEL, gateway, tokens_of

EOS = 2
TEXT = "Hello there, my friend. How are you?"
ANSWER = ScriptedAnswer(tokens=[*tokens_of(TEXT), EOS], cached_tokens=2)
USER = [{"role": "user", "content": "Hi"}]


def async_client(system):
    return openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


async def test_chat_whole():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        completion = await client.chat.completions.create(
            model=MODEL, messages=USER, n=2, logprobs=True, top_logprobs=2
        )
        assert [choice.message.content for choice in completion.choices] == [TEXT, TEXT]
        assert completion.choices[1].finish_reason == "stop"
        assert completion.choices[0].logprobs.content[0].token == "Hello"
        assert len(completion.choices[0].logprobs.content[0].top_logprobs) == 2
        assert completion.usage.prompt_tokens_details.cached_tokens == 2
        assert completion.usage.completion_tokens == 2 * len(ANSWER.tokens)


async def test_chat_streamed():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=USER, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts = ["", ""]
        finishes = []
        usage = None
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    finishes.append(choice.finish_reason)
            usage = chunk.usage or usage
        assert texts == [TEXT, TEXT]
        assert finishes == ["stop", "stop"]
        assert usage.completion_tokens == 2 * len(ANSWER.tokens)


async def test_the_clients_own_stream_helper_agrees():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        async with client.chat.completions.stream(model=MODEL, messages=USER) as stream:
            completion = await stream.get_final_completion()
        assert completion.choices[0].message.content == TEXT


async def test_completions_whole_and_streamed():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        whole = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=50, logprobs=1)
        assert [choice.text for choice in whole.choices] == [TEXT, TEXT]
        assert whole.choices[0].logprobs.tokens[0] == "Hello"
        texts = ["", ""]
        async for chunk in await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=50, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [TEXT, TEXT]


async def test_the_sync_client():
    async with gateway([ANSWER]) as system:

        def use():
            with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
                assert [model.id for model in client.models.list()] == [MODEL]
                assert client.models.retrieve(MODEL).id == MODEL
                whole = client.chat.completions.create(model=MODEL, messages=USER)
                stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
                streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                text = client.completions.create(model=MODEL, prompt="x", max_tokens=50)
                return whole.choices[0].message.content, streamed, text.choices[0].text

        assert await asyncio.to_thread(use) == (TEXT, TEXT, TEXT)


async def test_errors_become_the_clients_exceptions():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=USER)
        assert missing.value.code == "model_not_found"
        assert missing.value.param == "model"
        assert missing.value.request_id
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=USER, temperature=9)
        assert bad.value.param == "temperature"
        assert bad.value.type == "invalid_request_error"


async def test_a_full_gateway_is_a_rate_limit_error_and_the_sdk_retries():
    async with gateway([ScriptedAnswer(tokens=tokens_of(TEXT) * 4)], step_s=0.02, max_in_flight=1) as system:
        async with async_client(system) as client:
            first = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=USER))
            await system.wait_until(lambda: system.gate.count == 1)
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model=MODEL, messages=USER)
            # The client's own retry follows Retry-After, and then there is room.
            again = await client.with_options(max_retries=3).chat.completions.create(model=MODEL, messages=USER)
            assert again.choices[0].message.content == TEXT * 4
            await first


async def test_a_lost_replica_is_never_a_whole_answer():
    faulty = ScriptedAnswer(tokens=tokens_of(TEXT), fault=AnswerFault.DROP, fault_after=3)
    async with gateway([faulty]) as system, async_client(system) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        received = []
        with pytest.raises(openai.APIError, match="failed before the answer was complete"):
            async for chunk in stream:
                received.append(chunk)  # noqa: PERF401 - what came before the error counts
        assert received
        # The engine is gone for good now.
        with pytest.raises(openai.InternalServerError) as unavailable:
            await client.chat.completions.create(model=MODEL, messages=USER)
        assert unavailable.value.status_code == 503


async def test_a_replica_lost_before_the_first_token_is_a_502():
    async with gateway([ScriptedAnswer(fault=AnswerFault.DROP)]) as system, async_client(system) as client:
        with pytest.raises(openai.InternalServerError) as lost:
            await client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        assert lost.value.status_code == 502


async def test_a_key_makes_a_repeat_safe_whole_and_streamed():
    async with gateway([ANSWER]) as system:

        def use():
            with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none") as client:
                once = {"extra_headers": {"Idempotency-Key": "whole"}}
                wholes = [
                    client.chat.completions.create(model=MODEL, messages=USER, n=2, **once).model_dump()
                    for _ in range(2)
                ]
                once = {"extra_headers": {"Idempotency-Key": "streamed"}}
                streams = [
                    [chunk.model_dump() for chunk in client.chat.completions.create(
                        model=MODEL, messages=USER, n=2, stream=True, **once
                    )]
                    for _ in range(2)
                ]  # fmt: skip
                with pytest.raises(openai.ConflictError) as conflict:
                    client.completions.create(model=MODEL, prompt="x", **once)
                    client.completions.create(model=MODEL, prompt="y", **once)
                return wholes, streams, conflict.value

        wholes, streams, conflict = await asyncio.to_thread(use)
        assert wholes[0] == wholes[1]
        assert streams[0] == streams[1]
        assert wholes[0]["choices"][1]["message"]["content"] == TEXT
        assert conflict.code == "idempotency_conflict"
        assert len(system.engine.submitted) == 3
        # The client would have tried again three times, if the response had not said that retrying cannot help.
        await system.wait_until(lambda: len(system.contexts) >= 6)
        assert len(system.contexts) == 6


async def test_an_impatient_client_retries_into_its_own_answer():
    slow = ScriptedAnswer(tokens=ANSWER.tokens, wait_steps=10)

    class Impatient(httpx.AsyncHTTPTransport):
        """Gives its first request up as soon as the engine has it, as a time-out of the client does."""

        async def handle_async_request(self, request):
            answering = asyncio.ensure_future(super().handle_async_request(request))
            if not system.contexts:
                await system.wait_until(lambda: system.engine.submitted)
                answering.cancel()
                await asyncio.wait([answering])
                await system.wait_until(lambda: system.contexts)
                raise httpx.ReadTimeout("It took too long.", request=request)
            return await answering

    async with gateway([slow], step_s=0.05) as system, httpx.AsyncClient(transport=Impatient()) as http:
        patient = async_client(system).with_options(http_client=http, max_retries=5)
        completion = await patient.chat.completions.create(
            model=MODEL, messages=USER, extra_headers={"Idempotency-Key": "k"}
        )
        assert completion.choices[0].message.content == TEXT
        await system.wait_until(lambda: len(system.contexts) > 1)
        assert len(system.engine.submitted) == 1


async def test_priority_headers_of_a_request_and_headers_of_its_response():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=USER,
            service_tier="flex",
            extra_headers={"x-maitred-deadline-ms": "60000", "x-maitred-explain": "true"},
            extra_body={"priority": 6},
        )
        assert raw.headers["x-maitred-priority"] == "standard"
        assert raw.headers["x-maitred-queue-position"] == "0"
        assert int(raw.headers["x-maitred-predicted-ttft-ms"]) >= int(raw.headers["x-maitred-predicted-wait-ms"]) >= 0
        assert "x-maitred-waited" in raw.headers
        assert raw.parse().choices[0].message.content == TEXT
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=USER, service_tier="gold")
        assert caught.value.param == "service_tier"


async def test_the_client_does_not_come_back_beyond_its_budget_of_retries():
    async with gateway([ANSWER], max_in_flight=1, retry_share=0.0, retry_allowance=1) as system:
        async with async_client(system).with_options(max_retries=2) as client:
            with system.gate.acquire(), pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model=MODEL, messages=USER)
        assert caught.value.response.headers["x-should-retry"] == "false"
        # It came, was granted one retry, came back, and then let it be.
        assert [context.status for context in system.contexts] == [429, 429]
