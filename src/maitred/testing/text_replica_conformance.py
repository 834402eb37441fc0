"""Conformance of replicas that take text, as one function that any upstream server can be put to.

::

    async def test_my_server():
        await exercise_text_replica(my_server_in_a_context)

The checks are the promises of `core.relay.TextReplica`. They need a server with a real model that goes on when it is
told to be greedy; what it says does not matter. What a server cannot do is left out, and said so.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, suppress
from enum import StrEnum
from typing import Any

import msgspec

from maitred.core.errors import InvalidRequest, ReplicaLost, ReplicaUnavailable
from maitred.core.ids import new_request_id
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.core.text_replica import TextBatch, TextReplica, TextRequest, TextStream
from maitred.testing.replica_conformance import put_to

LIMIT_S = 60.0
"""For each check; a server that hangs fails."""
_SHORT_TOKENS = 8
_LONG_TOKENS = 700
_QUESTION = [{"role": "user", "content": "Tell me a story about a little dog."}]
_BEGINNING = "Once upon a time"


class ServerCapability(StrEnum):
    """Capability that not every server has."""

    CHOICES = "choices"
    """Several answers to one prompt."""
    PROMPTS = "prompts"
    """Several texts to continue in one request."""
    LOGPROBS = "logprobs"
    STOPS = "stops"
    """Strings that end an answer."""
    WINDOW = "window"
    """It refuses what does not fit."""
    LOAD = "load"
    """It tells what runs."""


class TextReplicaUnderTest(msgspec.Struct, frozen=True):
    """A ready replica, and what can be known and done behind its back."""

    replica: TextReplica
    abilities: Collection[ServerCapability]
    running: Callable[[], Awaitable[float | None]]
    """Requests that run, as the server says now."""
    kill: Callable[[], Awaitable[None]]
    """Ends the server without warning, and returns when it is ended."""


MakeTextReplica = Callable[[], AbstractAsyncContextManager[TextReplicaUnderTest]]
Check = Callable[[TextReplicaUnderTest], Awaitable[None]]


async def exercise_text_replica(make_replica: MakeTextReplica) -> None:
    """Puts one replica to every check in turn; the last one kills it.

    Args:
        make_replica: A context that holds a ready replica.

    Raises:
        AssertionError: A promise is not kept; the note on it names the check.
    """
    async with make_replica() as subject:
        for check, needs in TEXT_CHECKS.items():
            if needs is None or needs in subject.abilities:
                await put_to(check, subject, LIMIT_S)


async def describes_itself(subject: TextReplicaUnderTest) -> None:
    """The card is plausible, and nobody is there yet."""
    card = subject.replica.card()
    assert card.name, "the card names the model"
    assert card.context_tokens > _SHORT_TOKENS, "the context holds more than a few tokens"
    assert subject.replica.count_unreported() == 0, "nothing runs before the first request"


async def answers_a_conversation(subject: TextReplicaUnderTest) -> None:
    """One choice with one finish, cut at `max_tokens`, and counted; then the stream is over and stays so."""
    async with subject.replica.send(_asking()) as stream:
        batches = [batch async for batch in stream]
        _assert_whole(batches)
        with suppress(StopAsyncIteration):
            raise AssertionError(f"after the end came {await anext(aiter(stream))}")
    assert subject.replica.count_unreported() == 0, "what is over is not held"


async def streams(subject: TextReplicaUnderTest) -> None:
    """A long answer comes in many pieces, not in one at its end."""
    batches = await _answer(subject, _asking(64))
    assert len(batches) >= 8, f"64 tokens came in {len(batches)} pieces"


async def continues_a_text(subject: TextReplicaUnderTest) -> None:
    """A text is continued, and not repeated."""
    batches = await _answer(subject, _continuing(_BEGINNING))
    _assert_whole(batches)
    assert not _text(batches).startswith(_BEGINNING), "the answer repeats the prompt"


async def says_the_same_again(subject: TextReplicaUnderTest) -> None:
    """A greedy answer is the same each time: what is sent to the server is what was asked."""
    first, second = [_text(await _answer(subject, _asking(16))) for _ in range(2)]
    assert first == second, f"{first!r} and then {second!r}"


async def stops_before_a_stop_string(subject: TextReplicaUnderTest) -> None:
    """The answer ends before the string, for the reason that it was there."""
    text = _text(await _answer(subject, _asking(24)))
    stop = text[len(text) // 2 :][:4]
    batches = await _answer(subject, _asking(24, stop=[stop]))
    assert _text(batches) == text[: text.index(stop)], f"{_text(batches)!r} is not what is before {stop!r} of {text!r}"
    assert _parts(batches)[-1].finish is FinishReason.STOP, "it says that it was stopped"


async def answers_every_choice(subject: TextReplicaUnderTest) -> None:
    """Several answers to one conversation, each whole; the prompt counts once, and every token of theirs."""
    one = _usage(await _answer(subject, _asking()))
    # Not quite greedy: vLLM refuses several answers that would all be the same.
    batches = await _answer(subject, _asking(n=3, choices=3, temperature=0.01))
    _assert_whole(batches, choices=3)
    usage = _usage(batches)
    assert usage.prompt_tokens == one.prompt_tokens, f"a prompt of {one.prompt_tokens} is counted {usage.prompt_tokens}"


async def continues_several_texts(subject: TextReplicaUnderTest) -> None:
    """Each prompt has its own answer, and all of them count."""
    prompts = [_BEGINNING, "The waiter"]
    single = [_usage(await _answer(subject, _continuing(prompt))) for prompt in prompts]
    batches = await _answer(subject, _continuing(prompts, choices=2))
    _assert_whole(batches, choices=2)
    assert _usage(batches).prompt_tokens == sum(usage.prompt_tokens for usage in single), "all prompts count"


async def tells_log_probabilities(subject: TextReplicaUnderTest) -> None:
    """One for each token of the text, no better than certain, and the best ones beside it."""
    batches = await _answer(subject, _asking(logprobs=True, top_logprobs=2))
    scores = [score for part in _parts(batches) for score in part.scores or ()]
    assert len(scores) == _SHORT_TOKENS, f"{_SHORT_TOKENS} tokens have {len(scores)} log-probabilities"
    assert all(score.chosen.logprob <= 0 and len(score.top) == 2 for score in scores)
    assert "".join(score.chosen.text for score in scores) == _text(batches)


async def answers_many_at_once(subject: TextReplicaUnderTest) -> None:
    """Concurrent requests do not mix, even under one id, for clients may choose ids."""

    async def ask(tokens: int) -> None:
        _assert_whole(await _answer(subject, _asking(tokens, id="the-same")), tokens=tokens)

    async with asyncio.TaskGroup() as tasks:
        for tokens in range(1, 9):
            tasks.create_task(ask(tokens))


async def refuses_what_does_not_fit(subject: TextReplicaUnderTest) -> None:
    """A prompt that is longer than the window is the caller's fault, and said to be."""
    long = "The little dog ran home. " * 20_000
    with suppress(InvalidRequest):
        batches = await _answer(subject, _asking(messages=[{"role": "user", "content": long}]))
        raise AssertionError(f"it answered {_text(batches)!r}")


async def tells_its_load(subject: TextReplicaUnderTest) -> None:
    """Checks that running requests are in the load report while they run."""
    async with subject.replica.send(_asking(_LONG_TOKENS, ignore_eos=True)) as stream:
        await anext(aiter(stream))
        while not await subject.running():  # noqa: ASYNC110 - the server has to be asked
            await asyncio.sleep(0.05)
    await _assert_idle(subject)


async def leaving_cancels(subject: TextReplicaUnderTest) -> None:
    """A context left early ends the work there."""
    await _assert_idle(subject)
    async with subject.replica.send(_asking(_LONG_TOKENS, ignore_eos=True)) as stream:
        await anext(aiter(stream))
    assert subject.replica.count_unreported() == 0
    await _assert_idle(subject)


async def a_cancelled_task_cancels(subject: TextReplicaUnderTest) -> None:
    """Checks that a task that is cancelled while it waits cancels the work."""
    reading = asyncio.Event()

    async def read() -> None:
        async with subject.replica.send(_asking(_LONG_TOKENS, ignore_eos=True)) as stream:
            async for _ in stream:
                reading.set()

    task = asyncio.create_task(read())
    await reading.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await _assert_idle(subject)


async def a_death_is_said(subject: TextReplicaUnderTest) -> None:
    """When the server dies a stream raises, and never just ends; new requests are refused with a time."""
    async with subject.replica.send(_asking(500)) as stream:
        await anext(aiter(stream))
        await subject.kill()
        try:
            rest = [batch async for batch in stream]
        except ReplicaLost:
            pass
        else:
            raise AssertionError(f"the server died, and the stream ended as if complete with {rest[-1:]}")
    retry_after_s = None
    try:
        async with subject.replica.send(_asking()):
            raise AssertionError("a dead server took a request")
    except ReplicaUnavailable as refusal:
        retry_after_s = refusal.retry_after_s
    assert retry_after_s is not None, "a refusal says when to come back"


TEXT_CHECKS: dict[Check, ServerCapability | None] = {
    describes_itself: None,
    answers_a_conversation: None,
    streams: None,
    continues_a_text: None,
    says_the_same_again: None,
    stops_before_a_stop_string: ServerCapability.STOPS,
    answers_every_choice: ServerCapability.CHOICES,
    continues_several_texts: ServerCapability.PROMPTS,
    tells_log_probabilities: ServerCapability.LOGPROBS,
    answers_many_at_once: None,
    refuses_what_does_not_fit: ServerCapability.WINDOW,
    tells_its_load: ServerCapability.LOAD,
    leaving_cancels: ServerCapability.LOAD,
    a_cancelled_task_cancels: ServerCapability.LOAD,
    a_death_is_said: None,
}
"""Each with what a server must be able to do for it."""


def _asking(max_tokens: int = _SHORT_TOKENS, *, choices: int = 1, id: str | None = None, **fields: Any) -> TextRequest:  # noqa: A002, ANN401
    whole = {"messages": _QUESTION, "temperature": 0, **fields}
    return TextRequest(id or new_request_id(), whole, choices, max_tokens)


def _continuing(prompt: str | list[str], *, choices: int = 1) -> TextRequest:
    return TextRequest(new_request_id(), {"prompt": prompt, "temperature": 0}, choices, _SHORT_TOKENS, chat=False)


async def _answer(subject: TextReplicaUnderTest, request: TextRequest) -> list[TextBatch]:
    async with subject.replica.send(request) as stream:
        return await _read(stream)


async def _read(stream: TextStream) -> list[TextBatch]:
    return [batch async for batch in stream]


def _parts(batches: list[TextBatch]) -> list[TextDelta]:
    return [part for batch in batches for part in batch.parts]


def _text(batches: list[TextBatch], index: int = 0) -> str:
    return "".join(part.text for part in _parts(batches) if part.index == index)


def _usage(batches: list[TextBatch]) -> Usage:
    counted = [batch.usage for batch in batches if batch.usage is not None]
    assert counted, "the server says what it counted"
    return counted[-1]


def _assert_whole(batches: list[TextBatch], *, choices: int = 1, tokens: int = _SHORT_TOKENS) -> None:
    parts = _parts(batches)
    assert {part.index for part in parts} == set(range(choices)), "every choice answers, and no other"
    for index in range(choices):
        own = [part for part in parts if part.index == index]
        assert [part.finish for part in own[:-1]] == [None] * (len(own) - 1), f"choice {index} finishes once"
        assert own[-1].finish is FinishReason.LENGTH, f"choice {index} was cut at max_tokens and ends {own[-1].finish}"
        assert _text(batches, index), f"choice {index} has a text"
    usage = _usage(batches)
    assert usage.completion_tokens == choices * tokens, f"{choices} x {tokens} tokens are counted as {usage}"
    assert usage.prompt_tokens > 0, "the prompt is counted"


async def _assert_idle(subject: TextReplicaUnderTest) -> None:
    """The server says that nothing runs, within the check's time."""
    while await subject.running() != 0:  # noqa: ASYNC110 - the server has to be asked
        await asyncio.sleep(0.05)
