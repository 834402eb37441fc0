"""Conformance of text replicas: one function that checks any upstream server.

::

    async def test_my_server():
        await exercise_text_replica(my_server_in_a_context)

The checks cover the promises of `core.text_replica.TextReplica`. They need a server with a real model that decodes
greedily on request; the content of its text does not matter. Checks of missing capabilities are skipped and reported as
skipped.
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

LIMIT_S = 300.0
"""Time limit of each check; a server that hangs fails."""
_SHORT_TOKENS = 8
_LONG_TOKENS = 700
_QUESTION = [{"role": "user", "content": "Tell me a story about a little dog."}]
_BEGINNING = "Once upon a time"


class ServerCapability(StrEnum):
    """Optional capability of a server."""

    CHOICES = "choices"
    """Checks several answers to one conversation: the prompt counts once, and all output tokens count."""
    PROMPTS = "prompts"
    """Several texts to continue in one request."""
    LOGPROBS = "logprobs"
    STOPS = "stops"
    """Strings that end an answer."""
    WINDOW = "window"
    """The server refuses prompts that do not fit its window."""
    LOAD = "load"
    """The server reports its running requests."""


class TextReplicaUnderTest(msgspec.Struct, frozen=True):
    """Ready replica, with direct access to its server."""

    replica: TextReplica
    abilities: Collection[ServerCapability]
    running: Callable[[], Awaitable[float | None]]
    """Returns the running requests that the server reports now."""
    kill: Callable[[], Awaitable[None]]
    """Ends the server without warning, and returns when it is ended."""


MakeTextReplica = Callable[[], AbstractAsyncContextManager[TextReplicaUnderTest]]
Check = Callable[[TextReplicaUnderTest], Awaitable[None]]


async def exercise_text_replica(make_replica: MakeTextReplica) -> None:
    """Applies every check to one replica in turn; the last check kills it.

    Args:
        make_replica: Makes a context with a ready replica.

    Raises:
        AssertionError: A check fails; the note on the error names the check.
    """
    async with make_replica() as subject:
        for check, needs in TEXT_CHECKS.items():
            if needs is None or needs in subject.abilities:
                await put_to(check, subject, LIMIT_S)


async def describes_itself(subject: TextReplicaUnderTest) -> None:
    """Checks that the card is plausible, and that no request runs yet."""
    card = subject.replica.card()
    assert card.name, "the card names the model"
    assert card.context_tokens > _SHORT_TOKENS, "the context holds more than a few tokens"
    assert subject.replica.count_unreported() == 0, "nothing runs before the first request"


async def answers_a_conversation(subject: TextReplicaUnderTest) -> None:
    """Checks one counted choice: one finish, the limit `max_tokens`, and no deltas after the end."""
    async with subject.replica.generate(_asking()) as stream:
        batches = [batch async for batch in stream]
        _assert_whole(batches)
        with suppress(StopAsyncIteration):
            raise AssertionError(f"after the end came {await anext(aiter(stream))}")
    assert subject.replica.count_unreported() == 0, "what is over is not held"


async def streams(subject: TextReplicaUnderTest) -> None:
    """Checks that a long answer comes in many pieces instead of one at its end.

    Pieces that come while the reader lacks a core are read as one, so longer answers are asked for, too.
    """
    for tokens in (64, 256, 1024):
        tokens = min(tokens, subject.replica.card().context_tokens // 2)
        batches = await _answer(subject, _asking(tokens))
        if len(batches) >= 3:
            return
    raise AssertionError(f"{tokens} tokens came in {len(batches)} pieces")


async def continues_a_text(subject: TextReplicaUnderTest) -> None:
    """Checks that the answer continues a text without repeating it."""
    batches = await _answer(subject, _continuing(_BEGINNING))
    _assert_whole(batches)
    assert not _text(batches).startswith(_BEGINNING), "the answer repeats the prompt"


async def says_the_same_again(subject: TextReplicaUnderTest) -> None:
    """Checks that a greedy answer is always the same, which shows that requests arrive unchanged."""
    first, second = [_text(await _answer(subject, _asking(16))) for _ in range(2)]
    assert first == second, f"{first!r} and then {second!r}"


async def stops_before_a_stop_string(subject: TextReplicaUnderTest) -> None:
    """Checks that the answer ends before a stop string, with the matching finish reason."""
    text = _text(await _answer(subject, _asking(24)))
    stop = text[len(text) // 2 :][:4]
    batches = await _answer(subject, _asking(24, stop=[stop]))
    assert _text(batches) == text[: text.index(stop)], f"{_text(batches)!r} is not what is before {stop!r} of {text!r}"
    assert _parts(batches)[-1].finish is FinishReason.STOP, "it says that it was stopped"


async def answers_every_choice(subject: TextReplicaUnderTest) -> None:
    """Several answers to one conversation, each whole; the prompt counts once, and every token of theirs."""
    one = _usage(await _answer(subject, _asking()))
    # The temperature is slightly above 0, because vLLM refuses several answers that would all be equal.
    batches = await _answer(subject, _asking(n=3, choices=3, temperature=0.01))
    _assert_whole(batches, choices=3)
    usage = _usage(batches)
    assert usage.prompt_tokens == one.prompt_tokens, f"a prompt of {one.prompt_tokens} is counted {usage.prompt_tokens}"


async def continues_several_texts(subject: TextReplicaUnderTest) -> None:
    """Checks that each prompt has its own answer, and that all of them count."""
    prompts = [_BEGINNING, "The waiter"]
    single = [_usage(await _answer(subject, _continuing(prompt))) for prompt in prompts]
    batches = await _answer(subject, _continuing(prompts, choices=2))
    _assert_whole(batches, choices=2)
    assert _usage(batches).prompt_tokens == sum(usage.prompt_tokens for usage in single), "all prompts count"


async def tells_log_probabilities(subject: TextReplicaUnderTest) -> None:
    """Checks one log probability per token, at most 0, with the best alternatives."""
    batches = await _answer(subject, _asking(logprobs=True, top_logprobs=2))
    scores = [score for part in _parts(batches) for score in part.scores or ()]
    assert len(scores) == _SHORT_TOKENS, f"{_SHORT_TOKENS} tokens have {len(scores)} log-probabilities"
    chosen = [score.chosen.logprob for score in scores]
    assert all(logprob is not None and logprob <= 0 for logprob in chosen)
    assert all(len(score.top) == 2 for score in scores)
    assert "".join(score.chosen.text for score in scores) == _text(batches)


async def answers_many_at_once(subject: TextReplicaUnderTest) -> None:
    """Checks that concurrent requests stay separate, even with equal ids, as clients may choose ids."""

    async def ask(tokens: int) -> None:
        _assert_whole(await _answer(subject, _asking(tokens, id="the-same")), tokens=tokens)

    async with asyncio.TaskGroup() as tasks:
        for tokens in range(1, 9):
            tasks.create_task(ask(tokens))


async def refuses_what_does_not_fit(subject: TextReplicaUnderTest) -> None:
    """Checks that a prompt longer than the window is reported as the caller's error."""
    long = "The little dog ran home. " * 20_000
    with suppress(InvalidRequest):
        batches = await _answer(subject, _asking(messages=[{"role": "user", "content": long}]))
        raise AssertionError(f"it answered {_text(batches)!r}")


async def tells_its_load(subject: TextReplicaUnderTest) -> None:
    """Checks that the load report contains running requests."""
    async with subject.replica.generate(_asking(_LONG_TOKENS, ignore_eos=True)) as stream:
        await anext(aiter(stream))
        while not await subject.running():  # noqa: ASYNC110 - the server has to be asked
            await asyncio.sleep(0.05)
    await _assert_idle(subject)


async def leaving_cancels(subject: TextReplicaUnderTest) -> None:
    """Checks that leaving a context early ends the work on the server."""
    await _assert_idle(subject)
    async with subject.replica.generate(_asking(_LONG_TOKENS, ignore_eos=True)) as stream:
        await anext(aiter(stream))
    assert subject.replica.count_unreported() == 0
    await _assert_idle(subject)


async def a_cancelled_task_cancels(subject: TextReplicaUnderTest) -> None:
    """Checks that cancelling a waiting task cancels its work."""
    reading = asyncio.Event()

    async def read() -> None:
        async with subject.replica.generate(_asking(_LONG_TOKENS, ignore_eos=True)) as stream:
            async for _ in stream:
                reading.set()

    task = asyncio.create_task(read())
    await reading.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await _assert_idle(subject)


async def a_death_is_said(subject: TextReplicaUnderTest) -> None:
    """Checks that streams raise when the server dies, and that new requests are refused with a time."""
    async with subject.replica.generate(_asking(500)) as stream:
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
        async with subject.replica.generate(_asking()):
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
"""Each check with the capabilities that it needs."""


def _asking(max_tokens: int = _SHORT_TOKENS, *, choices: int = 1, id: str | None = None, **fields: Any) -> TextRequest:  # noqa: A002, ANN401
    whole = {"messages": _QUESTION, "temperature": 0, **fields}
    return TextRequest(id or new_request_id(), whole, choices, max_tokens)


def _continuing(prompt: str | list[str], *, choices: int = 1) -> TextRequest:
    return TextRequest(new_request_id(), {"prompt": prompt, "temperature": 0}, choices, _SHORT_TOKENS, chat=False)


async def _answer(subject: TextReplicaUnderTest, request: TextRequest) -> list[TextBatch]:
    async with subject.replica.generate(request) as stream:
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
    """Checks that the server reports no running requests within the time limit."""
    while await subject.running() != 0:  # noqa: ASYNC110 - the server has to be asked
        await asyncio.sleep(0.05)
