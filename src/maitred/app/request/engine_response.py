"""One answer in the making: waits for its turn, runs, and turns what comes back into text.

Reading it for the first time is what makes it wait: until then the request has its place in the queue and nothing
else, so whoever reads can tell the caller where it stands. A replica that fails on the way is followed by another one,
which goes on where it was lost (see `continuation`); who reads sees nothing of it but the time that it takes.
"""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

from maitred.app.request.continuation import ReplicaAttempt, TokenContinuation, attempt
from maitred.app.request.engine_spans import tell_course
from maitred.app.request.flow_control import DispatchHandle, GrantHandle
from maitred.app.request.hedging import opened
from maitred.app.request.output import OutputProcessor
from maitred.app.request.resources import Holder, Slot
from maitred.core.answer import Outcome, PushStream, RequestContext, StreamSink, TextDelta
from maitred.core.clock import Clock
from maitred.core.errors import DeadlineExceeded, ReplicaLost, ReplicaUnavailable
from maitred.core.request import EngineRequest, FinishReason, TokenDelta
from maitred.core.timeline import SpanName
from maitred.dispatch.request import AnyEndpoint

_GIVEN_UP = "The replica gave up the answer before it was complete. Send the request again."


class EngineResponse(PushStream):
    """Implements `maitred.core.answer.ResponseStream`.

    It writes what it sees into the tally, tells the seat and so the fair queue of every token, and settles before the
    end is shown.

    Args:
        seat: Its place in the queue, and then at a replica.
        running: Holds what is opened here; whoever made it closes it.
        requests: Makes what the replica gets, given the time, one for each prompt.
        choices: All of all prompts, in order.
        tally: What is known of the request.
        clock: For the times in it.
        grant: What it may use.
        partial: Whether what is there at the deadline is an answer.
    """

    def __init__(
        self,
        seat: DispatchHandle,
        running: Holder,
        requests: Callable[[float], Sequence[EngineRequest]],
        choices: Sequence[OutputProcessor],
        tally: RequestContext,
        clock: Clock,
        grant: GrantHandle,
        *,
        partial: bool,
    ) -> None:
        self._seat = seat
        self._running = running
        self._requests = requests
        self._choices = choices
        self._unfinished = len(choices)
        self._tally = tally
        self._clock = clock
        self._grant = grant
        self._partial = partial
        self._transcript: TokenContinuation | None = None
        self._attempt: ReplicaAttempt | None = None
        self._outlet: StreamSink | None = None
        self._at_replica = Slot()
        """Holds the attempt."""
        self._per_prompt = 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TextDelta]:
        if not self._unfinished:
            raise StopAsyncIteration
        parts = self._parts(*await self._news())
        if not self._unfinished:
            # Nobody may see the end of an answer that could still be lost to the ledger.
            await self._grant.settle(self._tally.usage, Outcome.FINISHED)
        return parts

    def pour(self, outlet: StreamSink) -> None:
        """See `core.answer.Pouring`."""
        self._outlet = outlet
        if self._attempt is not None:
            self._attempt.listen(self._hear)

    def _hear(self, prompt: int, deltas: Sequence[TokenDelta]) -> bool:
        """Lets out what is nothing but text; returns whether it is."""
        assert self._outlet is not None
        if not self._outlet.open:
            return False
        first = prompt * self._per_prompt
        for delta in deltas:
            choice = self._choices[first + delta.index]
            if delta.finish is not None or delta.course is not None or not (choice.plain and choice.tokens):
                return False
        self._outlet.send(self._parts(prompt, deltas))
        return True

    def _parts(self, prompt: int, deltas: Sequence[TokenDelta]) -> list[TextDelta]:
        """What has come, as its reader sees it."""
        now_s = self._clock.monotonic_s()
        touched: dict[int, OutputProcessor] = {}
        for delta in deltas:
            index = prompt * self._per_prompt + delta.index
            choice = touched[index] = self._choices[index]
            if choice.finish is None:
                self._take(prompt, choice, delta, now_s)
        self._time(touched.values(), now_s)
        return [part for index, choice in touched.items() for part in choice.parts(index)]

    async def _news(self) -> tuple[int, list[TokenDelta]]:
        """What comes next, from whichever replica: one that fails is followed by another, as often as that is allowed.

        Raises:
            ReplicaLost: Too many replicas failed, or none came back in time.
        """
        while True:
            if self._attempt is None:
                try:
                    post = await self._seat.granted()
                except DeadlineExceeded:
                    if self._transcript is None or self._tally.first_token_s is None or not self._partial:
                        raise
                    return self._transcript.cut_off()
                except ReplicaUnavailable:
                    if self._tally.first_token_s is None:
                        raise
                    raise ReplicaLost from None
            try:
                if self._attempt is None:
                    self._attempt = await self._submit(post)
                prompt, deltas = await self._attempt.news()
                if FinishReason.CANCELLED not in [delta.finish for delta in deltas]:
                    return prompt, deltas
                failure: ReplicaLost | ReplicaUnavailable = ReplicaLost(_GIVEN_UP)
            except StopAsyncIteration:
                failure = ReplicaLost()
            except (ReplicaLost, ReplicaUnavailable) as error:
                failure = error
            await self._go_on_elsewhere(failure)

    async def _submit(self, post: AnyEndpoint) -> ReplicaAttempt:
        """Hands a replica what is left."""
        tally, now_s = self._tally, self._clock.monotonic_s()
        if self._transcript is None:
            requests = self._requests(now_s)
            self._transcript = TokenContinuation(requests, now_s)
            self._per_prompt = len(self._choices) // len(requests)
            await self._running.enter_async_context(self._at_replica)
        if tally.first_token_s is None:
            tally.place, tally.released_s = None, now_s
            tally.waited_ms = dict(self._seat.waited_ms)
        self._grant.served_by(post.name)
        left = self._transcript.left(now_s)
        server, answer = await opened(self._seat, post, partial(self._open, left), self._at_replica, tally)
        self._grant.served_by(server.name)
        if self._outlet is not None:
            answer.listen(self._hear)
        return answer

    @asynccontextmanager
    async def _open(
        self, left: dict[int, EngineRequest], post: AnyEndpoint, submitted: Callable[[], None]
    ) -> AsyncIterator[ReplicaAttempt]:
        """Hands it to one replica."""
        with self._tally.story.telling(SpanName.ATTEMPT, self._clock.monotonic_s, replica=post.name):
            async with attempt(post.replica, left, submitted) as answer:
                yield answer

    async def _go_on_elsewhere(self, failure: ReplicaLost | ReplicaUnavailable) -> None:
        """Leaves a replica that has failed, and waits for another one.

        Raises:
            ReplicaLost: It has been so too often, and a part of the answer has been sent.
            ReplicaUnavailable: The same, and nothing has.
        """
        assert self._transcript is not None
        await self._at_replica.__aexit__(type(failure), failure, failure.__traceback__)
        self._attempt = None
        if not self._seat.again(prompts=self._transcript.prompts, answer_by_s=self._transcript.answer_by_s):
            if isinstance(failure, ReplicaUnavailable) and self._tally.first_token_s is not None:
                raise ReplicaLost from failure
            raise failure
        self._tally.recoveries += 1

    def _take(self, prompt: int, choice: OutputProcessor, delta: TokenDelta, now_s: float) -> None:
        assert self._transcript is not None
        if delta.finish is FinishReason.DEADLINE and not self._partial:
            raise DeadlineExceeded
        if not delta.begun:
            if delta.index == 0:
                self._tally.prompt_tokens -= choice.prompt_tokens  # nobody pays for what was not computed
        elif delta.index == 0 and not choice.tokens:
            # The further choices of a prompt find it in the cache because of the first: no merit of an earlier request.
            self._tally.cached_tokens += delta.cached_tokens
            self._seat.took(prompt_tokens=choice.prompt_tokens, cached_tokens=delta.cached_tokens)
        before, thought_before = choice.tokens, choice.thought_tokens
        choice.take(delta)
        self._transcript.heard(prompt, delta)
        if delta.course is not None:
            tell_course(self._tally.story, prompt * self._per_prompt + delta.index, choice, delta, now_s)
        if choice.tokens > before:
            self._tally.completion_tokens += choice.tokens - before
            self._seat.took(output_tokens=choice.tokens - before)
        self._tally.reasoning_tokens += choice.thought_tokens - thought_before
        if delta.waited_ms is not None:
            for cause, waited_ms in delta.waited_ms.items():
                # Choices wait beside each other, so the longest wait is what the caller noticed.
                in_all_ms = self._seat.waited_ms.get(cause, 0.0) + waited_ms
                self._tally.waited_ms[cause] = max(self._tally.waited_ms.get(cause, 0.0), in_all_ms)
        if choice.finish is not None:
            self._unfinished -= 1
            self._tally.finishes.append(choice.finish)
            self._transcript.ended(prompt, delta.index)
            if delta.finish is None and self._attempt is not None:
                # A stop string came up, of which the replica knows nothing.
                self._attempt.streams[prompt].cancel(delta.index)

    def _time(self, choices: Collection[OutputProcessor], now_s: float) -> None:
        if self._tally.first_token_s is None and any(choice.tokens for choice in choices):
            self._tally.first_token_s = now_s
            self._seat.first_token()
        for choice in choices:
            if choice.last_token_s is not None:
                self._tally.gaps_s.append(now_s - choice.last_token_s)
            choice.last_token_s = now_s
