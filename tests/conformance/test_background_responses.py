"""Responses in the background by the official `openai` client: they go on without it, and are read and cancelled later.

Each is one generation and one bill, whoever reads it.
"""

import asyncio

import openai
import pytest
from msgspec.structs import replace

from maitred.cache.config import IdempotencyConfig
from maitred.core.context import Outcome
from maitred.core.errors import StoreUnavailable
from maitred.core.limits import Limit, LimitKind
from maitred.testing.script import AnswerFault, ScriptedAnswer
from tests.conformance.test_responses import ANSWER, EOS, TEXT, serving
from tests.support.gateway import CARD, MODEL, tokens_of

LONG = ScriptedAnswer(tokens=[*(tokens_of(TEXT) * 30)[:200], EOS])
STALLED = replace(LONG, fault=AnswerFault.STALL, fault_after=5)
"""It never ends by itself."""


async def ended(client, response):
    """The response when it has ended, by polling."""
    async with asyncio.timeout(300):
        while response.status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
            response = await client.responses.retrieve(response.id)
    return response


async def written(client, response):
    """The response when some of its output is there."""
    async with asyncio.timeout(300):
        while not response.output_text:
            assert response.status in ("queued", "in_progress")
            await asyncio.sleep(0.02)
            response = await client.responses.retrieve(response.id)
    return response


async def read(stream):
    return [event async for event in stream]


def events_of(sent):
    return [event.model_dump() for event in sent]


def asking(**fields):
    return {"model": MODEL, "input": "Hi", "max_output_tokens": 400, "background": True, **fields}


async def test_it_is_polled_to_its_end_and_gone_on_with(tmp_path):
    async with serving(tmp_path, [LONG, ANSWER], step_s=0.005) as (system, client):
        first = await client.responses.create(**asking(metadata={"a": "b"}))
        assert (first.status, first.background, first.output, first.usage) == ("queued", True, [], None)
        with pytest.raises(openai.BadRequestError, match="still in progress"):
            await client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        partial = await written(client, first)
        done = await ended(client, partial)
        assert (done.status, done.usage.output_tokens, done.metadata) == ("completed", len(LONG.tokens), {"a": "b"})
        assert done.output_text.startswith(partial.output_text)
        assert done.output[0].id == partial.output[0].id
        (billed,) = system.ledger.events
        assert (billed.output_tokens, billed.outcome) == (len(LONG.tokens), Outcome.FINISHED)
        await system.wait_until(lambda: system.gate.count == 0)
        second = await client.responses.create(model=MODEL, input="And?", previous_response_id=done.id)
        assert second.output_text == TEXT


async def test_a_stream_goes_on_where_it_was_left(tmp_path):
    async with serving(tmp_path, [LONG], step_s=0.005) as (system, client):
        stream = await client.responses.create(**asking(stream=True))
        before = [await anext(stream) for _ in range(20)]
        await stream.close()
        kinds = ["response.created", "response.queued", "response.in_progress", "response.output_item.added"]
        assert [event.type for event in before[:4]] == kinds
        response_id, after = before[0].response.id, before[-1].sequence_number
        rest = await read(await client.responses.retrieve(response_id, stream=True, starting_after=after))
        assert [event.sequence_number for event in [*before, *rest]] == [*range(len(before) + len(rest))]
        whole = await read(await client.responses.retrieve(response_id, stream=True))
        assert events_of(whole) == events_of([*before, *rest])
        done = await client.responses.retrieve(response_id)
        assert whole[-1].type == "response.completed"
        assert whole[-1].response == done
        assert "".join(event.delta for event in whole if event.type == "response.output_text.delta") == done.output_text
        async with client.responses.stream(response_id=response_id, starting_after=after) as helped:
            assert [event async for event in helped][-1].sequence_number == whole[-1].sequence_number
        await system.wait_until(lambda: len(system.contexts) == 5)
        assert len(system.engine.submitted) == len(system.ledger.events) == 1
        assert {context.outcome for context in system.contexts} == {Outcome.FINISHED}

        # When the recording is gone, the stored items serve.
        system.kept.reconfigure(IdempotencyConfig(ttl_s=1e-9))
        again = await read(await client.responses.retrieve(response_id, stream=True))
        numbers = [event.sequence_number for event in again]
        assert numbers == sorted({*numbers})
        assert again[-1] == whole[-1]
        assert "".join(event.delta for event in again if event.type == "response.output_text.delta") == done.output_text
        (last,) = await read(await client.responses.retrieve(response_id, stream=True, starting_after=after))
        assert last == whole[-1]
        assert await read(await client.responses.retrieve(response_id, stream=True, starting_after=10_000)) == []
        for query, param in (({"starting_after": 1}, "starting_after"), ({"stream": "x"}, "stream")):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.retrieve(response_id, extra_query=query)
            assert caught.value.param == param


async def test_a_stream_with_a_key_goes_on_without_its_client(tmp_path):
    """It is not in the background, but what is recorded for a repeat also serves who reads the response."""
    async with serving(tmp_path, [LONG], step_s=0.005) as (system, client):
        asked = {"model": MODEL, "input": "Hi", "max_output_tokens": 400, "stream": True}
        stream = await client.responses.create(**asked, extra_headers={"Idempotency-Key": "k"})
        before = [await anext(stream) for _ in range(20)]
        await stream.close()
        await system.wait_until(lambda: len(system.contexts) == 1)
        response_id = before[0].response.id
        rest = await read(await client.responses.retrieve(response_id, stream=True, starting_after=19))
        assert [event.sequence_number for event in [*before, *rest]] == [*range(len(before) + len(rest))]
        assert rest[-1].response == await client.responses.retrieve(response_id)
        assert sum(event.type == "response.output_text.delta" for event in rest) > 10
        assert len(system.engine.submitted) == len(system.ledger.events) == 1


async def test_any_stored_response_is_read_as_a_stream(tmp_path):
    async with serving(tmp_path, [ANSWER]) as (_, client):
        whole = await client.responses.create(model=MODEL, input="Hi")
        events = await read(await client.responses.retrieve(whole.id, stream=True))
        assert events[-1].response == whole
        rest = await read(await client.responses.retrieve(whole.id, stream=True, starting_after=3))
        assert events_of(rest) == events_of(events[4:])


async def test_cancel_ends_the_work_and_bills_what_was_generated(tmp_path):
    async with serving(tmp_path, [STALLED, ANSWER]) as (system, client):
        running = await written(client, await client.responses.create(**asking()))
        assert system.gate.count == 1, "it keeps its place"
        reading = asyncio.create_task(read(await client.responses.retrieve(running.id, stream=True)))
        cancelled, same = await asyncio.gather(*(client.responses.cancel(running.id) for _ in range(2)))
        assert cancelled == same == await client.responses.retrieve(running.id)
        assert (cancelled.status, cancelled.usage.output_tokens) == ("cancelled", 5)
        assert cancelled.output[0].status == "incomplete"
        assert TEXT.startswith(cancelled.output_text)
        last = (await reading)[-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        (billed,) = system.ledger.events
        assert (billed.outcome, billed.output_tokens) == (Outcome.CANCELLED, 5)
        await system.wait_until(lambda: system.gate.count == 0 and system.engine.load().running == 0)
        done = await ended(client, await client.responses.create(**asking()))
        assert await client.responses.cancel(done.id) == done
        foreground = await client.responses.create(model=MODEL, input="Hi")
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(foreground.id)


async def test_one_that_waits_is_cancelled_for_nothing(tmp_path):
    async with serving(tmp_path, [STALLED], card=replace(CARD, max_sequences=1)) as (system, client):
        running = await written(client, await client.responses.create(**asking()))
        waiting = await client.responses.create(**asking())
        assert (await client.responses.retrieve(waiting.id)).status == "queued"
        cancelled = await client.responses.cancel(waiting.id)
        assert (cancelled.status, cancelled.usage, cancelled.output) == ("cancelled", None, [])
        assert [event.output_tokens for event in system.ledger.events] == [0]
        await client.responses.cancel(running.id)
        assert len(system.engine.submitted) == 1


async def test_events_that_are_too_many_to_keep_hold_up_nothing(tmp_path):
    async with serving(tmp_path, [LONG], step_s=0.002) as (system, client):
        system.kept.reconfigure(IdempotencyConfig(max_answer_bytes=4096))
        unread = await client.responses.create(**asking())
        live = await read(await client.responses.create(**asking(stream=True)))
        assert live[-1].type == "response.completed"
        assert (await ended(client, unread)).output_text == live[-1].response.output_text
        again = await read(await client.responses.retrieve(live[0].response.id, stream=True))
        assert again[-1] == live[-1]
        assert len(again) < len(live)


async def test_a_running_response_that_is_deleted_is_cancelled(tmp_path):
    async with serving(tmp_path, [STALLED]) as (system, client):
        running = await written(client, await client.responses.create(**asking()))
        await client.responses.delete(running.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(running.id)
        assert [event.outcome for event in system.ledger.events] == [Outcome.CANCELLED]
        assert system.gate.count == 0


async def test_a_failure_is_the_state_of_the_response(tmp_path):
    broken = ScriptedAnswer(tokens=LONG.tokens, fault=AnswerFault.DIE, fault_after=5)
    async with serving(tmp_path, [broken]) as (system, client):
        conversation = await client.conversations.create()
        events = await read(await client.responses.create(**asking(stream=True, conversation=conversation.id)))
        assert (await client.conversations.items.list(conversation.id)).data == []
        error, failed = events[-2:]
        assert (error.type, error.code, failed.type) == ("error", "replica_lost", "response.failed")
        stored = await client.responses.retrieve(failed.response.id)
        assert (stored.status, stored.error.code) == ("failed", "server_error")
        assert stored == failed.response
        assert events_of(await read(await client.responses.retrieve(stored.id, stream=True))) == events_of(events)
        assert [event.cost_nusd for event in system.ledger.events] == [0]
        context = next(context for context in system.contexts if context.error)
        assert (context.outcome, context.error) == (Outcome.FAILED, "replica_lost")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_ends_what_its_time_does_not_suffice_for(tmp_path, streams):
    async with serving(tmp_path, [STALLED]) as (system, client):
        if streams:
            stream = await client.responses.create(**asking(stream=True))
            response = (await anext(stream)).response
        else:
            response = await client.responses.create(**asking())
        await written(client, response)
        assert await system.gate.drain(0.01) == 1
        if streams:
            assert (await read(stream))[-1].response.error.code == "server_error"
        failed = await ended(client, response)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert [event.outcome for event in system.ledger.events] == [Outcome.FAILED]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_repeat_gets_the_same_response(tmp_path, streams):
    async with serving(tmp_path, [LONG], step_s=0.002) as (system, client):
        again = asking(stream=streams, extra_headers={"Idempotency-Key": "k"})
        first, second = await asyncio.gather(*(client.responses.create(**again) for _ in range(2)))
        if streams:
            events, repeated = await asyncio.gather(read(first), read(second))
            assert events_of(events) == events_of(repeated)
            first = events[-1].response
            later = await read(await client.responses.retrieve(first.id, stream=True, starting_after=10))
            assert events_of(later) == events_of(events[11:])
            # One recording serves all of them.
            assert len({id(recording) for recording in system.kept._listed.values()}) == 1
        else:
            assert first == second
            assert (await ended(client, first)).status == "completed"
        assert len(system.engine.submitted) == 1
        await system.wait_until(lambda: len(system.ledger.events) == 1)


async def test_a_refusal_is_told_at_once_and_nothing_is_kept(tmp_path, monkeypatch):
    limit = Limit(id="l", subject="*", kind=LimitKind.REQUESTS_PER_MINUTE, value=1)
    async with serving(tmp_path, [ANSWER], limited=[limit]) as (system, client):
        with pytest.raises(openai.BadRequestError, match="stored"):
            await client.responses.create(**asking(store=False))

        async def fail(_):
            raise StoreUnavailable("It is away.")

        with monkeypatch.context() as patch:
            patch.setattr(system.responses.claims, "begin", fail)
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(**asking())
        assert (await ended(client, await client.responses.create(**asking()))).status == "completed"
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(**asking())
        assert len(system.kept) == 1
    async with serving(tmp_path, [ANSWER], ttl_s=0.0) as (_, client):
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            await client.responses.create(**asking())


async def test_an_end_that_cannot_be_stored_is_stored_later_and_told_then(tmp_path, monkeypatch):
    async with serving(tmp_path, [ANSWER]) as (system, client):
        save = system.responses.save
        failed = asyncio.Event()

        async def fail(_):
            failed.set()
            raise StoreUnavailable("It is away.")

        monkeypatch.setattr(system.responses, "save", fail)
        response = await client.responses.create(**asking())
        await failed.wait()
        await system.wait_until(lambda: system.gate.count == 0)
        assert (await client.responses.retrieve(response.id)).status == "in_progress"
        monkeypatch.setattr(system.responses, "save", save)
        looking = asyncio.create_task(system.background.run())
        async with asyncio.timeout(300):
            while system.background._running:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.05)
        looking.cancel()
        await asyncio.wait([looking])
        done = await client.responses.retrieve(response.id)
        assert (done.status, done.output_text) == ("completed", TEXT)
