"""The official `openai` client takes us for OpenAI's Responses API; state, tools and failures included.

The client checks every object against its types.
"""

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from maitred.api.in_flight import InFlightLimiter
from maitred.api.responses.background import BackgroundResponses
from maitred.api.responses.routes import ResponsesRoutes
from maitred.cache.config import IdempotencyConfig
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.core.clock import SystemClock
from maitred.core.errors import StoreUnavailable
from maitred.store.config import StoreConfig
from maitred.testing.script import AnswerFault, ScriptedAnswer
from tests.support.gateway import CARD, MODEL, TOKENIZER, gateway, tokens_of
from tests.support.stores import DEADLINE_S, open_responses
from tests.support.tool_models import save_tool_tokenizer

EOS = 2
END = 4
"""End of a turn of the models that call tools."""
TEXT = "Hello there, my friend. How are you?"
ANSWER = ScriptedAnswer(tokens=[*tokens_of(TEXT), EOS], cached_tokens=2)
USER = [{"role": "user", "content": "And?"}]
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look at something.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    "strict": False,
}
PATCH = {"type": "custom", "name": "patch", "description": "Change a file."}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {family: save_tool_tokenizer(tmp_path_factory.mktemp(family), family) for family in ("hermes", "thinking")}


@asynccontextmanager
async def serving(folder, answers, tokenizer=None, *, ttl_s=3600.0, **options):
    """A gateway with stored responses, and the client."""
    config = StoreConfig(folder=str(folder), deadline_s=DEADLINE_S)
    if tokenizer is not None:
        card = replace(CARD, vocab_size=tokenizer.vocab_size, eos_token_ids=(END,), context_tokens=4096)
        options = {"tokenizer": tokenizer, "card": card, **options}
        if not callable(answers):
            answers = [
                ScriptedAnswer(tokens=[*tokenizer.encode(answer, add_special_tokens=False), END])
                if isinstance(answer, str)
                else answer
                for answer in answers
            ]
    kept, gate = MemoryIdempotencyStore(IdempotencyConfig(), SystemClock()), InFlightLimiter(1000)
    async with open_responses(config, ttl_s=ttl_s) as (store, _, _):
        background = BackgroundResponses(store, kept, gate, heartbeat_s=15.0)

        def further(pipeline):
            return ResponsesRoutes(pipeline, store, background, strict=False, heartbeat_s=15.0).routes()

        async with gateway(answers, further=further, kept=kept, gate=gate, **options) as system:
            system.responses, system.background = store, background
            async with openai.AsyncOpenAI(
                base_url=f"{system.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
            ) as client:
                yield system, client


def prompts_of(system):
    return [request.prompt for request in system.engine.submitted]


async def test_whole_and_streamed(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (_, client):
        whole = await client.responses.create(model=MODEL, input="Hi", metadata={"a": "b"}, instructions="Be kind.")
        assert (whole.output_text, whole.status, whole.metadata) == (TEXT, "completed", {"a": "b"})
        assert whole.instructions == "Be kind."
        assert whole.usage.input_tokens_details.cached_tokens == 2
        assert whole.usage.output_tokens == len(ANSWER.tokens)
        async with client.responses.stream(model=MODEL, input="Hi") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == TEXT
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
        assert {event.response.id for event in events if hasattr(event, "response")} == {final.id}
        stored = await client.responses.retrieve(final.id)
        assert (stored.id, stored.output_text, stored.usage) == (final.id, TEXT, final.usage)


async def test_a_form_is_held_and_parsed(tmp_path):
    class Friend(BaseModel):
        name: str

    written = ScriptedAnswer(tokens=[*tokens_of('{"name": "Ada"}'), EOS])
    async with serving(tmp_path, [written]) as (system, client):
        parsed = await client.responses.parse(model=MODEL, input="Who?", text_format=Friend)
        assert parsed.output_parsed == Friend(name="Ada")
        assert system.engine.submitted[0].sampling.grammar is not None
        assert parsed.text.format.type == "json_schema"


async def test_a_conversation_goes_on_where_it_was(tmp_path):
    """The model reads what it would read of the whole conversation in a chat."""
    async with serving(tmp_path, [ANSWER]) as (system, client):
        first = await client.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
        second = await client.responses.create(
            model=MODEL, input=[{"role": "user", "content": "And?"}], previous_response_id=first.id
        )
        third = await client.responses.create(model=MODEL, input="So?", previous_response_id=second.id)
        assert third.previous_response_id == second.id
        history = []
        for said in ("Hi", "And?", "So?"):
            history += [{"role": "user", "content": said}, {"role": "assistant", "content": TEXT}]
        await client.chat.completions.create(model=MODEL, messages=history[:-1])
        *_, of_third, of_chat = prompts_of(system)
        assert of_third == of_chat, "instructions are those of each request alone"
        fork = await client.responses.create(model=MODEL, input="Or?", previous_response_id=first.id)
        assert fork.usage.input_tokens < third.usage.input_tokens


async def test_calls_and_their_results(tmp_path, tokenizers):
    written = 'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    async with serving(tmp_path, [written, "A bird."], tokenizers["hermes"]) as (system, client):
        first = await client.responses.create(model=MODEL, input="What is up there?", tools=[LOOK])
        message, call = first.output
        assert message.content[0].text == "Let me see."
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"at": "sky"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "It flies."}
        second = await client.responses.create(model=MODEL, input=[result], tools=[LOOK], previous_response_id=first.id)
        assert second.output_text == "A bird."
        kept_by_client = [
            {"role": "user", "content": "What is up there?"},
            *(item.model_dump(exclude_unset=True) for item in first.output),
            result,
        ]
        third = await client.responses.create(model=MODEL, input=kept_by_client, tools=[LOOK], store=False)
        assert third.store is False
        _, stored, sent = prompts_of(system)
        assert stored == sent
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(third.id)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_custom_tool_is_called_with_a_text(tmp_path, tokenizers, streams):
    written = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** \\"a\\"\\n+b"}}\n</tool_call>'
    async with serving(tmp_path, [written, "Done."], tokenizers["hermes"]) as (system, client):
        asked = {"model": MODEL, "input": "Patch it.", "tools": [PATCH, {"type": "web_search"}]}
        if streams:
            async with client.responses.stream(**asked) as stream:
                response = await stream.get_final_response()
        else:
            asked["include"] = ["reasoning.encrypted_content", "web_search_call.results"]
            raw = await client.responses.with_raw_response.create(**asked)
            assert raw.headers["x-maitred-ignored"] == "tools[1] (web_search), include[1] (web_search_call.results)"
            response = raw.parse()
        (call,) = response.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", '*** "a"\n+b')
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        second = await client.responses.create(
            model=MODEL, input=[result], tools=[PATCH], previous_response_id=response.id
        )
        assert second.output_text == "Done."
        read = tokenizers["hermes"].decode(system.engine.submitted[1].prompt, skip_special_tokens=False)
        assert "Change a file." in read
        assert read.index("patch") < read.index("+b") < read.rindex("ok")


@pytest.mark.parametrize("streams", [False, True])
async def test_thoughts_are_items_and_come_back(tmp_path, tokenizers, streams):
    text = "Is it a bird?\n</think>\n\nA bird."
    async with serving(tmp_path, [text], tokenizers["thinking"]) as (system, client):
        asked = {"model": MODEL, "input": "What?", "include": ["reasoning.encrypted_content"], "store": False}
        if streams:
            async with client.responses.stream(**asked) as stream:
                response = await stream.get_final_response()
        else:
            response = await client.responses.create(**asked)
        reasoning, message = response.output
        assert (reasoning.content[0].text, message.content[0].text) == ("Is it a bird?", "A bird.")
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        # A client may keep the encoded thoughts alone.
        kept = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
        spelled = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Is it a bird?"}]}
        for thought in (kept, spelled):
            await client.responses.create(
                model=MODEL,
                store=False,
                input=[
                    {"role": "user", "content": "What?"},
                    thought,
                    {"role": "assistant", "content": "A bird."},
                    {"role": "user", "content": "Sure?"},
                ],
            )
        *_, first, second = prompts_of(system)
        assert first == second


async def test_parts_can_be_had_when_a_stored_response_is_read(tmp_path, tokenizers):
    text = "Is it a bird?\n</think>\n\nA bird."
    async with serving(tmp_path, [text], tokenizers["thinking"]) as (_, client):
        made = await client.responses.create(model=MODEL, input="What?", include=["reasoning.encrypted_content"])
        response = await client.responses.create(model=MODEL, input="What?")
        assert response.output[0].encrypted_content is None
        wanted = ["reasoning.encrypted_content", "message.output_text.logprobs", "file_search_call.results"]
        reading = client.responses.with_raw_response
        raw = await reading.retrieve(response.id, include=wanted)
        assert raw.parse().output[0].encrypted_content == made.output[0].encrypted_content
        ignored = raw.headers["x-maitred-ignored"]
        assert ignored == "include[2] (file_search_call.results), include (message.output_text.logprobs)"
        streamed = await reading.retrieve(response.id, stream=True, include=wanted[:1])
        assert streamed.headers["x-maitred-ignored"] == f"include ({wanted[0]})"
        listing = client.responses.input_items.with_raw_response
        listed = await listing.list(response.id, include=["message.input_image.image_url", wanted[2]])
        assert listed.headers["x-maitred-ignored"] == f"include[1] ({wanted[2]})"
        conversation = await client.conversations.create()
        for reads in (
            client.responses.retrieve(response.id, include=["all"]),
            client.responses.create(model=MODEL, input="What?", include=["all"]),
            client.responses.input_items.list(response.id, include=["all"]),
            client.conversations.items.list(conversation.id, include=["all"]),
            client.conversations.items.create(conversation.id, items=USER, include=["all"]),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await reads
            assert caught.value.param == "include[0]"


async def test_items_of_stored_responses_can_be_sent_by_reference(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (system, client):
        first = await client.responses.create(model=MODEL, input="Hi")
        (said,) = (await client.responses.input_items.list(first.id)).data
        referred = [
            {"type": "item_reference", "id": said.id},
            {"type": "item_reference", "id": first.output[0].id},
            {"role": "user", "content": "And?"},
        ]
        await client.responses.create(model=MODEL, input=referred)
        await client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        *_, by_reference, by_id = prompts_of(system)
        assert by_reference == by_id
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_unknown_0"}])
        assert caught.value.param == "input[0]"


async def test_stored_responses_are_listed_and_deleted(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (_, client):
        several = [{"role": "user", "content": str(number)} for number in range(30)]
        response = await client.responses.create(model=MODEL, input=several)
        page = await client.responses.input_items.list(response.id, order="asc", limit=20)
        assert [item.content[0].text for item in page.data] == [str(number) for number in range(20)]
        assert [item.content[0].text async for item in page] == [str(number) for number in range(30)]
        newest = await client.responses.input_items.list(response.id)
        assert newest.data[0].content[0].text == "29"
        for query in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "msg_1"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.input_items.list(response.id, extra_query=query)
            assert caught.value.param == next(iter(query))
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(response.id)
        await client.responses.delete(response.id)
        for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await use(response.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
        assert caught.value.code == "previous_response_not_found"


async def test_a_conversation_is_kept_by_the_server(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (system, client):
        said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
        conversation = await client.conversations.create(metadata={"a": "b"}, items=said)
        assert (conversation.object, conversation.metadata) == ("conversation", {"a": "b"})
        first = await client.responses.create(model=MODEL, input="And?", conversation=conversation.id)
        assert first.conversation.id == conversation.id
        async with client.responses.stream(model=MODEL, input="So?", conversation={"id": conversation.id}) as stream:
            second = await stream.get_final_response()
        history = [
            *said,
            *({"role": "user", "content": "And?"}, {"role": "assistant", "content": TEXT}),
            {"role": "user", "content": "So?"},
        ]
        await client.chat.completions.create(model=MODEL, messages=history)
        *_, of_conversation, of_chat = prompts_of(system)
        assert of_conversation == of_chat
        page = await client.conversations.items.list(conversation.id, order="asc", limit=4)
        texts = [item.content[0].text async for item in page]
        assert texts == ["Hi", "Yes?", "And?", TEXT, "So?", TEXT]
        counted = await client.responses.input_tokens.count(model=MODEL, input="So?", conversation=conversation.id)
        assert counted.input_tokens > second.usage.input_tokens


@pytest.mark.parametrize("odd", [7, {"a": 1}, "", "x" * 64, "a b", "a\0", None])
async def test_an_id_that_does_not_fit_is_replaced(tmp_path, odd):
    """A record of a provider can have any, and those of one client must not stop what others store beside it."""
    record = {"type": "web_search_call", "id": odd, "status": "completed"}
    async with serving(tmp_path, [ANSWER]) as (system, client):
        conversation = await client.conversations.create(items=[record, {"role": "user", "content": "Hi"}])
        await client.responses.create(model=MODEL, input=[record, *USER], conversation=conversation.id)
        items = await system.client.get(f"/v1/conversations/{conversation.id}/items?order=asc")
        ids = [item["id"] for item in items.json()["data"]]
        assert len({*ids}) == 5
        assert all(0 < len(item_id) <= 63 for item_id in ids)


async def test_conversations_are_changed_and_deleted(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (_, client):
        conversation = await client.conversations.create()
        assert (await client.conversations.retrieve(conversation.id)).metadata == {}
        changed = await client.conversations.update(conversation.id, metadata={"c": "d"})
        assert changed.metadata == {"c": "d"}
        call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
        added = await client.conversations.items.create(
            conversation.id, items=[{"role": "user", "content": "Hi"}, call, result]
        )
        assert [item.type for item in added.data] == ["message", "function_call", "function_call_output"]
        one = await client.conversations.items.retrieve(added.data[1].id, conversation_id=conversation.id)
        assert (one.type, one.name) == ("function_call", "f")
        await client.conversations.items.delete(added.data[1].id, conversation_id=conversation.id)
        left = await client.conversations.items.list(conversation.id)
        assert [item.id for item in left.data] == [added.data[2].id, added.data[0].id]
        for use in (client.conversations.items.retrieve, client.conversations.items.delete):
            with pytest.raises(openai.NotFoundError):
                await use(added.data[1].id, conversation_id=conversation.id)
        assert (await client.conversations.delete(conversation.id)).deleted
        for use in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
            with pytest.raises(openai.NotFoundError):
                await use(conversation.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model=MODEL, input="And?", conversation=conversation.id)
        assert caught.value.param == "conversation"
        for wrong in ({"type": "text"}, {"role": "nobody", "content": "a"}, {"type": "item_reference", "id": "msg_1"}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.conversations.create(items=[wrong])
            assert caught.value.param.startswith("items[0]")
        with pytest.raises(openai.BadRequestError, match="at most 20"):
            await client.conversations.create(items=[{"role": "user", "content": "Hi"}] * 21)


async def test_tokens_are_counted_as_they_are_billed(tmp_path, tokenizers):
    async with serving(tmp_path, ["Yes."], tokenizers["hermes"]) as (_, client):
        first = await client.responses.create(model=MODEL, input="Hi", tools=[LOOK, PATCH])
        assert (
            first.usage.input_tokens
            == (await client.responses.input_tokens.count(model=MODEL, input="Hi", tools=[LOOK, PATCH])).input_tokens
        )
        second = await client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        counted = await client.responses.input_tokens.count(model=MODEL, input="And?", previous_response_id=first.id)
        assert second.usage.input_tokens == counted.input_tokens


async def test_log_probabilities(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (_, client):
        asked = {"model": MODEL, "input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
        whole = await client.responses.create(**asked)
        entries = whole.output[0].content[0].logprobs
        assert (entries[0].token, len(entries[0].top_logprobs)) == ("Hello", 2)
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()
        assert final.output[0].content[0].logprobs == entries


async def test_a_broken_stream_ends_with_a_failed_response(tmp_path):
    broken = ScriptedAnswer(tokens=ANSWER.tokens, fault=AnswerFault.DIE, fault_after=3)
    async with serving(tmp_path, [broken]) as (_, client):
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        events = []

        async def read():
            async for event in stream:
                events.append(event)  # noqa: PERF401 - those before the end count

        with pytest.raises(openai.APIConnectionError):
            await read()
        *_, error, failed = events
        assert (error.type, error.code) == ("error", "replica_lost")
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert TEXT.startswith(failed.response.output_text)


async def test_an_answer_that_cannot_be_stored_says_so(tmp_path, monkeypatch):
    async with serving(tmp_path, [ANSWER]) as (system, client):

        async def fail(_):
            raise StoreUnavailable("It is away.")

        monkeypatch.setattr(system.responses, "save", fail)
        whole = await client.responses.create(model=MODEL, input="Hi")
        assert (whole.output_text, whole.store) == (TEXT, False)
        async with client.responses.stream(model=MODEL, input="Hi") as stream:
            assert (await stream.get_final_response()).store is False


async def test_a_server_that_stores_nothing_says_so(tmp_path):
    async with serving(tmp_path, [ANSWER], ttl_s=0.0) as (_, client):
        response = await client.responses.create(model=MODEL, input="Hi")
        assert (response.output_text, response.store) == (TEXT, False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="keeps no conversations"):
            await client.conversations.create()


async def test_a_long_conversation_is_read_beside_the_event_loop(tmp_path):
    said = "word " * 30_000
    async with serving(tmp_path, [ANSWER]) as (system, client):
        conversation = await client.conversations.create(items=[{"role": "user", "content": said}] * 3)
        answer = await client.responses.create(
            model=MODEL, input="So?", conversation=conversation.id, truncation="auto", max_output_tokens=10
        )
        assert answer.output_text.startswith("Hello")
        assert len(prompts_of(system)[0]) < 50


async def test_a_repeated_request_gets_the_same_response(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (system, client):
        again = {"extra_headers": {"Idempotency-Key": "k"}}
        first, second = await asyncio.gather(
            *(client.responses.create(model=MODEL, input="Hi", **again) for _ in range(2))
        )
        assert first == second
        assert len(system.engine.submitted) == 1
        assert (await client.responses.retrieve(first.id)).output_text == TEXT


async def test_the_context_window_is_spoken_of_in_the_clients_words(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (_, client):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            await client.responses.create(model=MODEL, input="word " * 100_000)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


@pytest.mark.parametrize("streams", [False, True])
async def test_the_oldest_turns_are_dropped_where_the_client_allows_it(tmp_path, streams):
    history = [
        message
        for number in range(40)
        for message in (
            {"role": "user", "content": f"question {number} " + "word " * 20},
            {"role": "assistant", "content": f"answer {number} " + "word " * 20},
        )
    ]
    asked = {"model": MODEL, "input": [*history, {"role": "user", "content": "So?"}], "instructions": "Be kind."}
    asked |= {"max_output_tokens": 30, "stream": streams}
    async with serving(tmp_path, [ANSWER]) as (system, client):
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(**asked)
        answer = await client.responses.create(**asked, truncation="auto")
        if streams:
            assert [event async for event in answer][-1].response.status == "completed"
        else:
            assert (answer.status, answer.truncation) == ("completed", "auto")
        (prompt,) = prompts_of(system)
        read = TOKENIZER.decode(prompt)
        assert "Be kind." in read
        assert "So?" in read
        assert "question 0 " not in read
        assert "answer 39 " in read
        assert CARD.context_tokens // 2 < len(prompt) <= CARD.context_tokens - 30
        asked |= {"input": "word " * 10_000, "truncation": "auto"}
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(**asked)


async def test_what_the_template_cannot_write_is_named_in_the_clients_words(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (_, client):
        for ask in (client.responses.create, client.responses.input_tokens.count):
            with pytest.raises(openai.BadRequestError, match="chat template") as caught:
                await ask(model=MODEL, input=[{"type": "function_call_output", "call_id": "c", "output": "x"}])
            assert caught.value.param == "input"


async def test_settings_reach_the_model(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (system, client):
        await client.responses.create(model=MODEL, input="Hi", temperature=0, max_output_tokens=5)
        (request,) = system.engine.submitted
        assert (request.sampling.max_tokens, request.sampling.temperature) == (5, 0)
        assert "Hi" in TOKENIZER.decode(request.prompt)
