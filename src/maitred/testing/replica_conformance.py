"""Conformance of replicas: one function that checks any implementation.

::

    async def test_my_replica():
        await exercise_replica(my_replica_in_a_context)

The checks cover the promises of `core.replica.Replica` and `core.replica.TokenStream`, but not the text: a replica
without a model passes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TypeVar

import msgspec

from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.ids import new_request_id
from maitred.core.replica import Replica, TokenStream
from maitred.core.request import EngineRequest, FinishReason, SamplingParams, TokenDelta

LIMIT_S = 300.0
"""Time limit of each check; a replica that hangs fails."""

PROMPT = [5, 6, 7]
_SHORT_TOKENS = 8


class ReplicaUnderTest(msgspec.Struct, frozen=True):
    """Ready replica, and a function that kills it."""

    replica: Replica
    kill: Callable[[], Awaitable[None]]
    """Ends the process behind the replica without warning, and returns when it has ended."""


MakeReplica = Callable[[], AbstractAsyncContextManager[ReplicaUnderTest]]
Check = Callable[[ReplicaUnderTest], Awaitable[None]]
Subject = TypeVar("Subject")


async def exercise_replica(make_replica: MakeReplica) -> None:
    """Applies every check to one replica in turn; the last check kills it.

    Args:
        make_replica: Makes a context with a ready replica.

    Raises:
        AssertionError: A check fails; the note on the error names the check.
    """
    async with make_replica() as subject:
        for check in CHECKS:
            await put_to(check, subject, LIMIT_S)


async def put_to(check: Callable[[Subject], Awaitable[None]], subject: Subject, limit_s: float) -> None:
    """Applies one check to a subject of any kind, within its time limit.

    Raises:
        AssertionError: The check fails; the note on the error names the check.
    """
    try:
        async with asyncio.timeout(limit_s):
            await check(subject)
    except Exception as error:
        error.add_note(f"in the replica check {check.__name__}")
        raise


async def describes_itself(subject: ReplicaUnderTest) -> None:
    """Checks that the card is plausible, and that a load report exists before any request."""
    card = subject.replica.card()
    assert card.name, "the card names the model"
    assert card.vocab_size > max(PROMPT), "the card says how many tokens there are"
    assert card.context_tokens > len(PROMPT) + _SHORT_TOKENS, "the context holds more than a few tokens"
    assert card.max_choices >= 1
    assert subject.replica.load().running == 0, "nothing runs before the first request"


async def answers_completely(subject: ReplicaUnderTest) -> None:
    """Checks one choice: the requested tokens, one finish at the end, and no deltas after it."""
    async with subject.replica.generate(_request()) as stream:
        _assert_complete(await _read(stream), choices=1)
        with suppress(StopAsyncIteration):
            raise AssertionError(f"after the end came {await anext(aiter(stream))}")


async def answers_every_choice(subject: ReplicaUnderTest) -> None:
    """Checks that each of several choices of one prompt is complete."""
    choices = min(3, subject.replica.card().max_choices)
    async with subject.replica.generate(_request(n=choices)) as stream:
        _assert_complete(await _read(stream), choices=choices)


async def scores_a_prompt(subject: ReplicaUnderTest) -> None:
    """Checks that each token of a prompt but the first has a log-probability, before an answer and without one."""
    for tokens in (_SHORT_TOKENS, 0):
        request = _request(tokens)
        sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=2)
        async with subject.replica.generate(msgspec.structs.replace(request, sampling=sampling)) as stream:
            deltas = await _read(stream)
        _assert_complete(deltas, choices=1, tokens=tokens)
        parts = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
        assert [part.start for part in parts[:1]] == [1], "the first token has none"
        assert sum(part.count for part in parts) == len(PROMPT) - 1, "all others have one"
        for part in parts:
            sizes = len(part.ranks), len(part.top_tokens), len(part.top_logprobs)
            assert sizes == (4 * part.count, 8 * part.count, 8 * part.count), "two others stand beside each"


async def answers_many_at_once(subject: ReplicaUnderTest) -> None:
    """Checks that concurrent requests stay separate, even with equal ids, as clients may choose ids."""

    async def ask(tokens: int) -> None:
        async with subject.replica.generate(_request(tokens, id="the-same")) as stream:
            _assert_complete(await _read(stream), choices=1, tokens=tokens)

    async with asyncio.TaskGroup() as tasks:
        for tokens in range(1, 9):
            tasks.create_task(ask(tokens))


async def cancels_one_choice(subject: ReplicaUnderTest) -> None:
    """Checks that a cancelled choice gets no more deltas, while the other choice continues to its end."""
    if subject.replica.card().max_choices < 2:
        return
    async with subject.replica.generate(_long_request(subject, n=2)) as stream:
        batches = aiter(stream)
        seen: set[int] = set()
        while seen != {0, 1}:
            seen |= {delta.index for delta in await anext(batches)}
        stream.cancel(1)
        received = 0
        while received < _SHORT_TOKENS:
            for delta in await anext(batches):
                assert delta.index == 0, f"after its cancellation choice 1 sent {delta}"
                received += len(delta.tokens)
        stream.cancel(0)
        async for batch in batches:
            raise AssertionError(f"after all choices were cancelled came {batch}")


async def pauses_and_goes_on(subject: ReplicaUnderTest) -> None:
    """Checks that a pause loses nothing, can be cancelled, and that every report is delivered."""
    reports = 0

    def count() -> None:
        nonlocal reports
        reports += 1

    subject.replica.on_change(count)
    async with subject.replica.generate(_request()) as stream, subject.replica.generate(_long_request(subject)) as left:
        stream.pause()
        left.pause()
        stream.resume()
        _assert_complete(await _read(stream), choices=1)
        assert subject.replica.count_unreported() == 0, "the last report knows of requests that were answered"
    assert reports, "listeners hear of reports"
    await _assert_idle(subject.replica)


async def leaving_cancels(subject: ReplicaUnderTest) -> None:
    """Checks that leaving a context early frees the resources of the request."""
    async with subject.replica.generate(_long_request(subject)) as stream:
        await anext(aiter(stream))
    await _assert_idle(subject.replica)


async def a_cancelled_task_cancels(subject: ReplicaUnderTest) -> None:
    """Checks that cancelling a waiting task cancels its work."""
    reading = asyncio.Event()

    async def read() -> None:
        async with subject.replica.generate(_long_request(subject)) as stream:
            async for _ in stream:
                reading.set()

    task = asyncio.create_task(read())
    await reading.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await _assert_idle(subject.replica)


async def a_death_is_said(subject: ReplicaUnderTest) -> None:
    """Checks that streams raise when the replica dies, and that new requests are refused with a time."""
    async with subject.replica.generate(_long_request(subject)) as stream:
        await anext(aiter(stream))
        await subject.kill()
        try:
            deltas = await _read(stream)
        except ReplicaLost:
            pass
        else:
            raise AssertionError(f"the replica died, and the stream ended as if complete with {deltas[-1:]}")
    with suppress(ReplicaUnavailable):
        subject.replica.card()
        raise AssertionError("a dead replica still has a card")
    retry_after_s = None
    try:
        async with subject.replica.generate(_request()):
            raise AssertionError("a dead replica took a request")
    except ReplicaUnavailable as refusal:
        retry_after_s = refusal.retry_after_s
    assert retry_after_s is not None, "a refusal says when to come back"
    assert retry_after_s >= 0


CHECKS: tuple[Check, ...] = (
    describes_itself,
    answers_completely,
    answers_every_choice,
    scores_a_prompt,
    answers_many_at_once,
    cancels_one_choice,
    pauses_and_goes_on,
    leaving_cancels,
    a_cancelled_task_cancels,
    a_death_is_said,
)


def _request(tokens: int = _SHORT_TOKENS, *, n: int = 1, id: str | None = None) -> EngineRequest:  # noqa: A002
    sampling = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True, n=n)
    return EngineRequest(id or new_request_id(), PROMPT, sampling)


def _long_request(subject: ReplicaUnderTest, *, n: int = 1) -> EngineRequest:
    """Makes a request that is still running when the check ends it."""
    return _request(subject.replica.card().context_tokens - len(PROMPT), n=n)


async def _read(stream: TokenStream) -> list[TokenDelta]:
    return [delta async for batch in stream for delta in batch]


def _assert_complete(deltas: list[TokenDelta], *, choices: int, tokens: int = _SHORT_TOKENS) -> None:
    assert {delta.index for delta in deltas} == set(range(choices)), "every choice answers, and no other"
    for index in range(choices):
        own = [delta for delta in deltas if delta.index == index]
        assert sum(len(delta.tokens) for delta in own) == tokens, f"choice {index} has as many tokens as asked for"
        assert [delta.finish for delta in own[:-1]] == [None] * (len(own) - 1), f"choice {index} finishes once"
        assert own[-1].finish is FinishReason.LENGTH, f"choice {index} says that it was cut at max_tokens"


async def _assert_idle(replica: Replica) -> None:
    """Checks that nothing runs; short requests bring fresh reports until the time limit."""
    while True:
        async with replica.generate(_request(1)) as stream:
            await _read(stream)
        load = replica.load()
        if load.running == load.waiting == 0:
            return
        await asyncio.sleep(0.01)
