"""The official `anthropic` client takes us for Anthropic: whole and streamed, and in what goes wrong."""
# ruff: noqa: PT012, SIM117 - nested contexts say who lives within whom

import asyncio

import anthropic
import pytest

from maitred.core.limits import Limit, LimitKind
from maitred.testing.script import AnswerFault, ScriptedAnswer
from tests.support.gateway import MODEL, TOKENIZER, gateway, tokens_of

EOS = 2
TEXT = "Hello there, my friend. How are you?"
ANSWER = ScriptedAnswer(tokens=[*tokens_of(TEXT), EOS], cached_tokens=2)
USER = [{"role": "user", "content": "Hi"}]
ASKED = {"model": MODEL, "messages": USER, "max_tokens": 100}


def async_client(system, **options):
    return anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0, **options)


async def test_a_whole_answer():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        message = await client.messages.create(**ASKED)
        assert message.role == "assistant"
        assert message.model == MODEL
        assert [(block.type, block.text) for block in message.content] == [("text", TEXT)]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        usage = message.usage
        await system.wait_until(lambda: system.contexts)
        assert usage.output_tokens == len(ANSWER.tokens)
        assert usage.cache_read_input_tokens == 2
        assert usage.cache_creation_input_tokens == 0
        assert usage.input_tokens + 2 == system.contexts[0].prompt_tokens
        assert message._request_id == system.contexts[0].request_id


async def test_the_clients_stream_helper_gets_the_same():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        whole = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            streamed = await stream.get_final_message()
        assert text == TEXT
        assert streamed.content[0].text == whole.content[0].text == TEXT
        assert (streamed.model, streamed.stop_reason) == (whole.model, whole.stop_reason)
        assert streamed.usage.model_dump() == whole.usage.model_dump()


async def test_an_answer_that_was_begun_is_continued():
    begun = [*USER, {"role": "assistant", "content": "The answer is"}]
    async with gateway([ANSWER]) as system, async_client(system) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=begun)
        whole = await client.messages.create(**{**ASKED, "messages": begun})
        async with client.messages.stream(**{**ASKED, "messages": begun}) as stream:
            assert "".join([piece async for piece in stream.text_stream]) == TEXT
        await system.wait_until(lambda: len(system.contexts) == 3)
    prompt = len(TOKENIZER.encode_conversation(USER)) + len(tokens_of("The answer is"))
    assert whole.content[0].text == TEXT
    assert counted.input_tokens == prompt
    assert [context.prompt_tokens for context in system.contexts if context.prompt_tokens] == [prompt] * 2


async def test_the_events_come_in_their_order():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        events = [event async for event in await client.messages.create(**ASKED, stream=True)]
        kinds = [event.type for event in events]
        deltas = kinds.count("content_block_delta")
        assert deltas >= 2
        assert kinds == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * deltas,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert events[0].message.usage.cache_read_input_tokens == 2
        assert events[-2].usage.output_tokens == len(ANSWER.tokens)


async def test_models_are_listed_by_pages_in_the_words_of_the_api():
    async with gateway([ANSWER]) as system, async_client(system, _strict_response_validation=True) as client:
        (model,) = [each async for each in await client.models.list(limit=1)]
        assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
        assert model.max_input_tokens > 0
        assert (await client.models.retrieve(MODEL)).model_dump() == model.model_dump()
        assert (await client.models.list(after_id=MODEL)).data == (await client.models.list(before_id=MODEL)).data == []
        for query in ({"limit": 0}, {"after_id": "another"}):
            with pytest.raises(anthropic.BadRequestError):
                await client.models.list(**query)


async def test_a_stream_ends_with_the_event_of_its_api_only():
    async with gateway([ANSWER]) as system:
        headers = {"anthropic-version": "2023-06-01"}
        answer = await system.client.post("/v1/messages", json={**ASKED, "stream": True}, headers=headers)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
        assert "[DONE]" not in answer.text


@pytest.mark.parametrize("streams", [False, True])
async def test_why_an_answer_ended(streams):
    async with gateway([ANSWER]) as system, async_client(system) as client:

        async def ending(**fields):
            if not streams:
                return await client.messages.create(**ASKED | fields)
            async with client.messages.stream(**ASKED | fields) as stream:
                return await stream.get_final_message()

        stopped = await ending(stop_sequences=["nothing", "friend"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "friend")
        assert stopped.content[0].text == "Hello there, my "
        cut = await ending(max_tokens=3)
        assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)


async def test_what_is_asked_reaches_the_model():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        await client.messages.create(
            model=MODEL,
            max_tokens=7,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {"role": "user", "content": "One."},
                {"role": "user", "content": [{"type": "text", "text": "Two."}]},
                {"role": "assistant", "content": "Three."},
                {"role": "user", "content": "Four."},
                {"role": "system", "content": "Be kind."},
            ],
            extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
            metadata={"user_id": "u1"},
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        as_chat = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One.\nTwo."},
            {"role": "assistant", "content": "Three."},
            {"role": "user", "content": "Four."},
            {"role": "system", "content": "Be kind."},
        ]
        await system.chat(messages=as_chat, max_tokens=7, temperature=0.5, top_k=5, top_p=0.9)
        ours, theirs = system.engine.submitted
        assert ours.prompt == theirs.prompt
        assert ours.sampling.max_tokens == 7
        assert (ours.sampling.temperature, ours.sampling.top_k, ours.sampling.top_p) == (0.5, 5, 0.9)


async def test_counted_tokens_are_those_that_are_billed():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=USER, system="Be brief.")
        message = await client.messages.create(**ASKED, system="Be brief.")
        assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
        assert len(system.engine.submitted) == 1


async def test_the_sync_client():
    async with gateway([ANSWER]) as system:

        def use():
            with anthropic.Anthropic(base_url=system.url, api_key="none", max_retries=0) as client:
                whole = client.messages.create(**ASKED)
                with client.messages.stream(**ASKED) as stream:
                    return whole.content[0].text, stream.get_final_text()

        assert await asyncio.to_thread(use) == (TEXT, TEXT)


@pytest.mark.parametrize(
    ("fields", "kind", "named"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "other"),
        ({"extra_body": {"temperature": 1.5}}, anthropic.BadRequestError, "temperature must be at most 1"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens must be at least 1"),
        ({"messages": []}, anthropic.BadRequestError, "messages must hold"),
        (
            {"messages": [{"role": "user", "content": "word " * 600}]},
            *(anthropic.BadRequestError, r"prompt is too long: \d+ tokens > \d+ maximum\. The prompt has"),
        ),
        (
            {"max_tokens": 5000},
            anthropic.BadRequestError,
            r"input length and `max_tokens` exceed context limit: \d+ \+ 5000 > \d+\. The prompt has",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": "I "}]}, anthropic.BadRequestError, "white space"),
        ({"messages": [{"role": "tool", "content": "x"}]}, anthropic.BadRequestError, "one of user, assistant"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences"),
        (
            {"tools": [{"name": "look", "input_schema": {"type": "object"}}]},
            anthropic.BadRequestError,
            "knows no tools",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            "runs at Anthropic",
        ),
        ({"extra_body": {"max_tokens": "many"}}, anthropic.BadRequestError, "max_tokens must be an integer"),
    ],
)
async def test_errors_become_the_clients_exceptions(fields, kind, named):
    async with gateway([ANSWER]) as system, async_client(system) as client:
        with pytest.raises(kind, match=named) as caught:
            await client.messages.create(**ASKED | fields)
        body = caught.value.body
        await system.wait_until(lambda: system.contexts)
        assert body["type"] == "error"
        assert body["error"]["type"] == ("not_found_error" if fields == {"model": "other"} else "invalid_request_error")
        codes = ("invalid_value", "model_not_found", "context_length_exceeded")
        assert body["error"]["details"]["error_code"] in codes
        assert body["request_id"] == caught.value.request_id == system.contexts[0].request_id
        assert not system.engine.submitted


@pytest.mark.parametrize("version", [None, "2020-01-01"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_the_version_must_be_the_one_that_is_spoken(version, path):
    async with gateway([ANSWER]) as system:
        headers = {} if version is None else {"anthropic-version": version}
        answer = await system.client.post(path, json=ASKED, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "anthropic-version" in answer.json()["error"]["message"]


async def test_a_full_gateway_answers_overloaded_and_the_sdk_retries():
    async with gateway([ScriptedAnswer(tokens=tokens_of(TEXT) * 4)], step_s=0.02, max_in_flight=1) as system:
        async with async_client(system) as client:
            first = asyncio.create_task(client.messages.create(**ASKED))
            await system.wait_until(lambda: system.gate.count == 1)
            with pytest.raises(anthropic.APIStatusError) as caught:
                await client.messages.create(**ASKED)
            assert caught.value.status_code == 529
            assert caught.value.type == "overloaded_error"
            # The client's own retry follows Retry-After, and then there is room.
            again = await client.with_options(max_retries=3).messages.create(**ASKED)
            assert again.content[0].text == TEXT * 4
            await first


async def test_a_reached_limit_says_when_to_come_back():
    once = Limit(id="l", subject="*", kind=LimitKind.REQUESTS_PER_MINUTE, value=1)
    async with gateway([ANSWER], limited=[once]) as system, async_client(system) as client:
        raw = await client.messages.with_raw_response.create(**ASKED)
        assert raw.headers["anthropic-ratelimit-requests-limit"] == "1"
        assert raw.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert raw.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**ASKED)
        assert caught.value.type == "rate_limit_error"
        assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_a_lost_replica_is_never_a_whole_answer():
    faulty = ScriptedAnswer(tokens=tokens_of(TEXT), fault=AnswerFault.DROP, fault_after=3)
    async with gateway([faulty]) as system, async_client(system) as client:
        received = []
        with pytest.raises(anthropic.APIError, match="failed before the answer was complete"):
            async for event in await client.messages.create(**ASKED, stream=True):
                received.append(event.type)  # noqa: PERF401 - what came before the error counts
        assert "content_block_delta" in received
        assert not {"message_delta", "message_stop"} & set(received)
        # The engine is gone for good now.
        with pytest.raises(anthropic.InternalServerError) as unavailable:
            await client.messages.create(**ASKED)
        assert unavailable.value.status_code == 503
        assert unavailable.value.type == "api_error"


async def test_a_key_makes_a_repeat_safe():
    async with gateway([ANSWER]) as system, async_client(system) as client:
        once = {"extra_headers": {"Idempotency-Key": "k"}}
        first = [event.model_dump() async for event in await client.messages.create(**ASKED, stream=True, **once)]
        again = [event.model_dump() async for event in await client.messages.create(**ASKED, stream=True, **once)]
        assert first == again
        assert first[-1]["type"] == "message_stop"
        assert len(system.engine.submitted) == 1
