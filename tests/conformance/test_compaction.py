"""Compaction of conversations by the official `openai` client: what the model reads afterwards, and what it costs."""

import asyncio

import openai
import pytest

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.core.context import Outcome
from maitred.core.limits import Limit, LimitKind
from maitred.testing.script import ScriptedAnswer
from tests.conformance.test_responses import END, LOOK, TEXT, serving
from tests.support.gateway import MODEL
from tests.support.tool_models import save_tool_tokenizer

SUMMARY = "They greeted. A fox was seen."
ASKED = "Summarise the conversation above"
LONG = " ".join(["The fox goes on."] * 40)
HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Hello, I saw something."},
    {"role": "assistant", "content": LONG},
    {"role": "user", "content": "Look there."},
    {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": "sky"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "A red fox."},
]
QUESTION = {"role": "user", "content": "What was it?"}
COMPACTING = [{"type": "compaction", "compact_threshold": 200}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tool_tokenizer(tmp_path_factory.mktemp("hermes"), "hermes")


def compacting(folder, tokenizer, answers=None, **options):
    """A gateway whose model gives a summary to who asks for one, and else the usual answer."""

    def answer(request):
        asks = ASKED in tokenizer.decode(request.prompt, skip_special_tokens=False)
        return ScriptedAnswer(tokens=[*tokenizer.encode(SUMMARY if asks else TEXT, add_special_tokens=False), END])

    return serving(folder, answers or answer, tokenizer, **options)


def texts_of(system, tokenizer):
    """The prompts so far, as text."""
    return [tokenizer.decode(request.prompt, skip_special_tokens=False) for request in system.engine.submitted]


def in_order(text, *parts):
    return sorted(parts, key=text.index) == list(parts)


def lenient(client):
    """The client's type of a compacted response knows no messages of the user, which OpenAI's has."""
    return openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0)


async def test_a_conversation_is_compacted_and_gone_on_with(tmp_path, tokenizer):
    async with compacting(tmp_path, tokenizer) as (system, client), lenient(client) as plain:
        compacted = await plain.responses.compact(model=MODEL, input=HISTORY, instructions="You are kind.")
        assert (compacted.object, compacted.output[-1].type) == ("response.compaction", "compaction")
        *kept, item = compacted.output
        assert [(message.role, message.content[0].text) for message in kept] == [
            ("user", "Hello, I saw something."),
            ("user", "Look there."),
        ]
        (asked,) = texts_of(system, tokenizer)
        assert in_order(asked, "You are kind.", "Hello, I saw", LONG, "Look there.", "A red fox.", ASKED)
        (billed,) = system.ledger.events
        assert (billed.route, billed.outcome) == ("/v1/responses/compact", Outcome.FINISHED)
        assert (compacted.usage.input_tokens, compacted.usage.output_tokens) == (
            billed.prompt_tokens,
            billed.output_tokens,
        )

        # As it came, and with the items as a client keeps them.
        output = [part.model_dump(exclude_none=True, warnings=False) for part in compacted.output]
        counted = await client.responses.input_tokens.count(model=MODEL, input=[*output, QUESTION])
        response = await client.responses.create(model=MODEL, input=[*output, QUESTION])
        read = texts_of(system, tokenizer)[-1]
        assert in_order(read, "Be brief.", "Hello, I saw", "Look there.", SUMMARY, "What was it?")
        assert "goes on" not in read
        assert "red fox" not in read
        assert response.usage.input_tokens == counted.input_tokens

        # A turn that names it reads the same; so does another compaction.
        await client.responses.create(model=MODEL, input="Sure?", previous_response_id=response.id)
        assert in_order(
            texts_of(system, tokenizer)[-1], "Be brief.", "Look there.", SUMMARY, "What was it?", TEXT, "Sure?"
        )
        again = await plain.responses.compact(model=MODEL, previous_response_id=response.id)
        assert in_order(texts_of(system, tokenizer)[-1], "Look there.", SUMMARY, "What was it?", TEXT, ASKED)
        assert [message.content[0].text for message in again.output[:-1]] == [
            "Hello, I saw something.",
            "Look there.",
            "What was it?",
        ]
        listed = await plain.responses.input_items.list(response.id, order="asc")
        assert listed.data[2].encrypted_content == item.encrypted_content

        # A message of the developer that the client repeats is not read twice.
        await client.responses.create(model=MODEL, input=[HISTORY[0], *output, QUESTION])
        assert texts_of(system, tokenizer)[-1] == read


async def test_a_compaction_item_of_somebody_else_is_refused(tmp_path, tokenizer):
    async with compacting(tmp_path, tokenizer) as (_, client), lenient(client) as plain:
        item = (await plain.responses.compact(model=MODEL, input=HISTORY)).output[-1].model_dump()
        sealed = item["encrypted_content"]
        middle = len(sealed) // 2
        altered = sealed[:middle] + ("A" if sealed[middle] != "A" else "B") + sealed[middle + 1 :]
        for text, message in (
            (altered, "altered"),
            (sealed[:40], "altered"),
            (sealed.replace(".", ".\u00e4"), "altered"),
            ("gAAAAABpM0Yj", "not made by this server"),
        ):
            wrong = {**item, "encrypted_content": text}
            for call in (client.responses.create, client.responses.compact, client.responses.input_tokens.count):
                with pytest.raises(openai.BadRequestError, match=message) as caught:
                    await call(model=MODEL, input=[QUESTION, wrong, QUESTION])
                assert caught.value.param == "input[1].encrypted_content"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_long_conversation_is_compacted_before_the_answer(tmp_path, tokenizer, streams, background):
    limits = (Limit(id="l", subject="*", kind=LimitKind.CONCURRENT_REQUESTS, value=1),)
    async with compacting(tmp_path, tokenizer, limited=limits) as (system, client):
        asked = {
            "model": MODEL,
            "context_management": COMPACTING,
            "tools": [LOOK] if not streams else [],
            "background": background,
        }
        if streams:
            stream = await client.responses.create(**asked, input=[*HISTORY, QUESTION], stream=True)
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == [*range(len(events))]
            begun = [event.type for event in events if event.type not in ("response.queued",)]
            assert begun[:5] == [
                *("response.created", "response.in_progress"),
                *("response.output_item.added", "response.output_item.done", "response.output_item.added"),
            ]
            response = events[-1].response
            items = [event.item for event in events if event.type == "response.output_item.done"]
            assert items == response.output
        else:
            response = await client.responses.create(**asked, input=[*HISTORY, QUESTION])
            response = await ended(client, response)
        assert [item.type for item in response.output] == ["compaction", "message"]
        assert response.output_text == TEXT
        asked_for, read = texts_of(system, tokenizer)
        assert in_order(asked_for, "Be brief.", LONG, "A red fox.", ASKED)
        assert "What was it?" not in asked_for, "the question stays as it is"
        assert in_order(read, "Be brief.", SUMMARY, "What was it?")
        assert "Look there." not in read

        first, second = system.ledger.events
        assert response.usage.input_tokens == first.prompt_tokens + second.prompt_tokens
        assert response.usage.output_tokens == first.output_tokens + second.output_tokens
        await system.wait_until(lambda: system.gate.count == 0)
        (context,) = [context for context in system.contexts if context.compaction is not None]
        assert (context.outcome, context.compaction.usage.completion_tokens) == (Outcome.FINISHED, first.output_tokens)
        rendered = (await system.client.get("/metrics")).text
        assert f'maitred_compactions_total{{model="{MODEL}"}} 1.0' in rendered
        assert f'maitred_output_tokens_total{{model="{MODEL}"}} {response.usage.output_tokens}.0' in rendered

        # However the conversation goes on, the model reads the same.
        stored = await client.responses.create(
            model=MODEL, input="Sure?", previous_response_id=response.id, context_management=COMPACTING
        )
        assert [item.type for item in stored.output] == ["message"], "it is short now"
        output = [item.model_dump(exclude_none=True) for item in response.output]
        sure = {"role": "user", "content": "Sure?"}
        for items in ([*HISTORY, QUESTION, *output, sure], [*output, sure]):
            await client.responses.create(model=MODEL, input=items, store=False)
        *_, of_stored, of_all, of_pruned = texts_of(system, tokenizer)
        assert of_stored == of_all == of_pruned
        replayed = await client.responses.retrieve(response.id, stream=True)
        assert [event async for event in replayed][-1].response == response


async def test_without_a_threshold_a_quarter_of_the_window_is_kept_free(tmp_path, tokenizer):
    async with compacting(tmp_path, tokenizer) as (_, client):
        window, kinds = 4096, []
        for words in (1400, 1700):
            said = {"role": "assistant", "content": " fox goes" * words}
            asked = [HISTORY[1], said, QUESTION]
            counted = await client.responses.input_tokens.count(model=MODEL, input=asked)
            response = await client.responses.create(
                model=MODEL, input=asked, context_management=[{"type": "compaction"}]
            )
            kinds.append((counted.input_tokens / window, response.output[0].type))
        (short, of_short), (long, of_long) = kinds
        assert short < 0.75 < long, kinds
        assert (of_short, of_long) == ("message", "compaction")


async def ended(client, response):
    async with asyncio.timeout(300):
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
            response = await client.responses.retrieve(response.id)
    return response


async def test_turns_before_a_compaction_are_not_needed_any_more(tmp_path, tokenizer):
    async with compacting(tmp_path, tokenizer) as (system, client):
        asked = {"model": MODEL, "input": [QUESTION], "context_management": COMPACTING}
        for background in (False, True):
            first = await client.responses.create(model=MODEL, input=HISTORY)
            begun = await client.responses.create(**asked, previous_response_id=first.id, background=background)
            second = await ended(client, begun)
            assert (second.output[0].type, second.previous_response_id) == ("compaction", first.id)
            await client.responses.delete(first.id)
            third = await client.responses.create(model=MODEL, input="Sure?", previous_response_id=second.id)
            assert third.output_text == TEXT
            assert in_order(texts_of(system, tokenizer)[-1], "Be brief.", SUMMARY, "What was it?", TEXT, "Sure?")


async def test_a_model_at_work_goes_on_with_its_question(tmp_path, tokenizer):
    """Its calls and their results are summarised, and nothing waits behind them."""
    async with compacting(tmp_path, tokenizer) as (system, client):
        response = await client.responses.create(model=MODEL, input=HISTORY, context_management=COMPACTING)
        assert response.output[0].type == "compaction"
        assert in_order(texts_of(system, tokenizer)[-1], "Be brief.", "Look there.", SUMMARY)
        # Messages of the user alone stay as they are.
        many = [{"role": "user", "content": LONG}, {"role": "user", "content": LONG}]
        response = await client.responses.create(model=MODEL, input=many, context_management=COMPACTING)
        assert [item.type for item in response.output] == ["message"]


async def test_a_summary_that_is_cut_or_empty_is_no_compaction(tmp_path, tokenizer):
    asked = {"model": MODEL, "input": HISTORY}
    compacting_first = {**asked, "input": [*HISTORY, QUESTION], "context_management": COMPACTING}
    prices = AdmissionConfig(prices={MODEL: PriceConfig(output=1_000_000.0)})
    budget = Limit(id="day", subject="*", kind=LimitKind.USD_PER_DAY, value=30 * 10**9)
    options = {"admitting": prices, "limited": [budget]}
    async with compacting(tmp_path, tokenizer, [ScriptedAnswer(tokens=None)], **options) as (system, client):
        with pytest.raises(openai.BadRequestError, match="limits of this key"):
            await client.responses.create(**compacting_first)
        assert [event.output_tokens for event in system.ledger.events] == [30], "what was generated is billed"
    async with compacting(tmp_path, tokenizer, [ScriptedAnswer(tokens=[END])]) as (system, client):
        for calls in (client.responses.compact(**asked), client.responses.create(**compacting_first)):
            with pytest.raises(openai.APIStatusError, match="no summary"):
                await calls
        assert len(system.ledger.events) == 2, "and nothing else"
        await system.wait_until(lambda: system.gate.count == 0)


async def test_a_summary_of_a_model_that_finds_no_end_is_marked(tmp_path, tokenizer):
    async with (
        compacting(tmp_path, tokenizer, [ScriptedAnswer(tokens=None)]) as (system, client),
        lenient(client) as plain,
    ):
        compacted = await plain.responses.compact(model=MODEL, input=HISTORY)
        assert (compacted.output[-1].status, compacted.usage.output_tokens) == ("incomplete", 2048)
        asked = {"model": MODEL, "input": [*HISTORY, QUESTION], "context_management": COMPACTING}
        response = await client.responses.create(**asked, max_output_tokens=5)
        assert response.output[0].status == "incomplete"
        assert "The summary was cut here" in texts_of(system, tokenizer)[-1]


async def test_a_stream_has_the_compaction_whatever_becomes_of_the_answer(tmp_path, tokenizer):
    limits = (Limit(id="l", subject="*", kind=LimitKind.REQUESTS_PER_MINUTE, value=1),)
    async with compacting(tmp_path, tokenizer, limited=limits) as (system, client):
        asked = {"model": MODEL, "input": [*HISTORY, QUESTION], "context_management": COMPACTING}
        stream = await client.responses.create(**asked, stream=True)
        events = [await anext(stream)]
        while events[-1].type != "response.failed":
            events.append(await anext(stream))
        assert events[-2].type == "error"
        failed = events[-1].response
        assert (failed.error.code, [item.type for item in failed.output]) == ("rate_limit_exceeded", ["compaction"])
        assert len(system.ledger.events) == 1


@pytest.mark.parametrize(
    ("entry", "param"),
    [
        ({"type": "truncation"}, "type"),
        ({"type": "compaction", "compact_threshold": 0}, "compact_threshold"),
    ],
)
async def test_an_entry_without_meaning_is_refused(tmp_path, tokenizer, entry, param):
    async with compacting(tmp_path, tokenizer) as (system, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="Hi", context_management=[entry])
        assert caught.value.param == f"context_management[0].{param}"
        assert system.engine.submitted == []
