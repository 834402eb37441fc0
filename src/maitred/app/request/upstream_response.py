"""One answer that a server of somebody else's makes: waits for its turn, asks, and passes on what comes back.

What `Generation` is to tokens this is to text. A server that fails before the first part of the answer is followed by
another one, or by itself after a pause; the caller sees nothing of it but the time that it takes. For callers who get
the answer in one piece, that holds up to its end, and where the model's configuration allows it, a stream goes on
elsewhere by its text (see `manuscript`). The text is passed on as it comes; what it was in tokens is an
estimate until the server says what it has counted. The end of the answer is held back until all of it is known to be
there and in the ledger, so a stream that breaks off, however late, never looks complete.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from maitred.app.request.continuation import TextContinuation
from maitred.app.request.flow_control import DispatchHandle, GrantHandle
from maitred.app.request.hedging import PeekableStream, open_hedged
from maitred.app.request.resources import ContextStack, ReusableSlot
from maitred.app.request.usage_counter import UpstreamUsageCounter
from maitred.core.answer import Outcome, PushStream, RequestContext, StreamSink, TextDelta
from maitred.core.backoff import GiveUpReason, RetryState
from maitred.core.clock import Clock
from maitred.core.cohort import COHORT, CohortStage
from maitred.core.errors import (
    CallerError,
    DeadlineExceeded,
    ReplicaBusy,
    ReplicaLost,
    ReplicaTooSlow,
    ReplicaUnavailable,
)
from maitred.core.ids import new_span_id
from maitred.core.request import FinishReason
from maitred.core.text_replica import TextBatch, TextReplica, TextRequest, TextStream
from maitred.core.timeline import SpanName, TimelineSpan, error_code
from maitred.dispatch.request import Endpoint


class UpstreamResponse(PushStream):
    """Response that an upstream server produces, as text. Implements `maitred.core.answer.ResponseStream`.

    Args:
        entry: Its place in the queue, and then at a replica.
        running: Holds what is opened here; whoever made it closes it.
        request: What the replica is asked.
        prompts: How many it has.
        usage_counter: Counts what comes.
        context: What is known of the request.
        clock: For the times in it.
        grant: What it may use.
        attempts: How often it may be tried.
        deadline_s: When the whole answer must be there, monotonic; None: whenever.
        partial: Whether what is there at the deadline is an answer.
        whole: Whether nobody sees a part of it before all of it is there.
        continuation: Notes what was shown, so that another server can go on with it; None: none does.
    """

    def __init__(
        self,
        entry: DispatchHandle,
        running: ContextStack,
        request: TextRequest,
        prompts: int,
        usage_counter: UpstreamUsageCounter,
        context: RequestContext,
        clock: Clock,
        grant: GrantHandle,
        attempts: RetryState,
        *,
        deadline_s: float | None,
        partial: bool,
        whole: bool,
        continuation: TextContinuation | None = None,
    ) -> None:
        self._entry = entry
        self._resources = running
        self._request = request
        self._continuation = continuation
        self._joint = False
        """Whether the next part is the first from a server that goes on."""
        self._prompts = prompts
        self._usage_counter = usage_counter
        self._context = context
        self._clock = clock
        self._grant = grant
        self._retry_state = attempts
        self._deadline_s = deadline_s
        self._partial = partial
        self._held: list[TextDelta] | None = [] if whole else None
        """What nobody has seen yet."""
        self._batches: _UpstreamBatches | None = None
        self._sink: StreamSink | None = None
        self._at_server = ReusableSlot()
        """Holds the attempt."""
        self._finishes: dict[int, FinishReason] = {}
        self._last_s: dict[int, float] = {}
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TextDelta]:
        if self._over:
            raise StopAsyncIteration
        while True:
            if self._deadline_s is None:
                batch = await self._next_batch()
            else:
                try:
                    async with asyncio.timeout(max(0.0, self._deadline_s - self._clock.monotonic_s())):
                        batch = await self._next_batch()
                except TimeoutError:
                    return await self._cut()
            if batch is None:
                return await self._end(self._finishes)
            shown = self._process(batch)
            if batch.whole:
                return [*shown, *await self._end(self._finishes)]
            if self._held is None:
                return shown

    def push_to(self, sink: StreamSink) -> None:
        """Pushes deltas to a sink as they come; implements `PushStream.push_to`."""
        self._sink = sink
        if self._batches is not None:
            self._batches.listen(self._on_batch)

    def _on_batch(self, batch: TextBatch) -> bool:
        """Lets out what is nothing but text; returns whether it is."""
        sink = self._sink
        assert sink is not None
        if self._joint or not sink.open:
            return False
        for part in batch.parts:
            if not part.plain:
                return False
        if shown := self._process(batch):
            sink.send(shown)
        return True

    async def _next_batch(self) -> TextBatch | None:
        """Returns the next batch of text; None at the end of the answer."""
        while True:
            if self._batches is None:
                endpoint = await self._wait_dispatched()
            try:
                if self._batches is None:
                    self._batches = await self._send(endpoint)
                return await anext(self._batches, None)
            except (ReplicaLost, ReplicaUnavailable) as failure:
                await self._retry(failure)
            except CallerError as failure:
                if not self._request.given:
                    raise
                raise ReplicaLost from failure  # it is no fault of the caller that a server cannot go on

    async def _wait_dispatched(self) -> Endpoint[TextReplica]:
        """The server whose turn it is to serve this."""
        try:
            return await self._entry.wait_dispatched()
        except ReplicaUnavailable as failure:
            if not self._request.given:
                raise
            raise ReplicaLost from failure

    async def _send(self, endpoint: Endpoint[TextReplica]) -> "_UpstreamBatches":
        """Sends the request to the assigned server."""
        await COHORT.sync(CohortStage.RELEASED)
        context = self._context
        context.position, context.dispatched_s = None, self._clock.monotonic_s()
        context.waited_ms = dict(self._entry.waited_ms)
        self._grant.set_replica(endpoint.name)
        if not self._retry_state.failures:
            await self._resources.enter_async_context(self._at_server)
        server, stream = await open_hedged(self._entry, endpoint, self._open, self._at_server, context)
        self._grant.set_replica(server.name)
        if self._sink is not None:
            stream.listen(self._on_batch)
        return stream

    def _open(self, endpoint: Endpoint[TextReplica], submitted: Callable[[], None]) -> "_UpstreamAttempt":
        """Sends it to a server."""
        timeline, request = self._context.timeline, self._request
        now_s = self._clock.monotonic_s
        span = timeline.begin(SpanName.ATTEMPT, now_s(), replica=endpoint.name, **endpoint.replica.location)
        if timeline.trace is not None:
            request = replace(request, trace=timeline.context_at(span, new_span_id))
        return _UpstreamAttempt(endpoint.replica.send(request), span, now_s, submitted)

    async def _retry(self, failure: ReplicaLost | ReplicaUnavailable) -> None:
        """Leaves a server that has failed, and waits for another one, or for the same one.

        Raises:
            ReplicaLost: The failure, where there is nothing left to try.
            ReplicaUnavailable: The same, and nobody has seen anything.
        """
        # The server's breaker counts what an attempt ends with.
        await self._at_server.__aexit__(type(failure), failure, failure.__traceback__)
        self._batches = None
        told = failure
        if self._context.first_token_s is not None and self._held is None:
            if not isinstance(failure, ReplicaLost):
                told = ReplicaLost()
                told.__cause__ = failure
            if not self._continue_text():
                raise told
        else:
            self._restart()
        rest_s = failure.retry_after_s if isinstance(failure, ReplicaBusy) else None
        elsewhere = self._entry.has_other_replica
        passes = isinstance(failure, ReplicaLost | ReplicaBusy) and not isinstance(failure, ReplicaTooSlow)
        if not elsewhere and not passes:
            raise told  # it is away, too slow, or not what the configuration says: a pause would not help
        wait_s = self._retry_state.wait(self._clock.monotonic_s(), told_s=None if elsewhere else rest_s)
        if isinstance(wait_s, GiveUpReason):
            raise told
        again = self._entry.requeue(
            prompts=range(self._prompts), answer_by_s=self._deadline_s, rest_s=rest_s if elsewhere else wait_s
        )
        if not again:
            raise told
        self._context.recoveries += 1
        self._context.continued += bool(self._request.given)

    def _restart(self) -> None:
        """Starts over at another server, where the reader has seen nothing yet."""
        self._usage_counter.restart()
        self._finishes.clear()
        self._last_s.clear()
        if self._held is not None:
            self._held.clear()

    def _continue_text(self) -> bool:
        """A part was seen: whether another server can go on behind it, as it will be asked to then."""
        if self._continuation is None or self._finishes:
            return False
        self._usage_counter.resume()
        rest = self._continuation.remaining_request(self._context.completion_tokens)
        if rest is None:
            return False
        self._request, self._joint = rest, True
        return True

    def _process(self, batch: TextBatch) -> list[TextDelta]:
        """Notes what came; returns it without the ends of choices, which have to wait."""
        now_s, context, entry = self._clock.monotonic_s(), self._context, self._entry
        if context.first_token_s is None and batch.parts:
            context.first_token_s = now_s
            entry.on_first_token()
            entry.charge_tokens(prompt_tokens=context.prompt_tokens)
        before = context.completion_tokens
        self._usage_counter.count(batch)
        if context.completion_tokens != before:
            entry.charge_tokens(output_tokens=context.completion_tokens - before)
        self._grant.record_usage(context.usage)
        shown: list[TextDelta] = []
        for part in batch.parts:
            if part.finish is not None:
                self._finishes[part.index] = part.finish
            if part.text or part.extra or part.scores:
                if part.finish is not None or self._joint:
                    part = TextDelta(part.index, part.text, None, part.scores, part.extra, continued=self._joint)
                    self._joint = False
                shown.append(part)
                if (last_s := self._last_s.get(part.index)) is not None:
                    context.gaps_s.append(now_s - last_s)
                self._last_s[part.index] = now_s
        if self._continuation is not None:
            self._continuation.on_delta(shown)
        if self._held is None:
            return shown
        self._held += shown
        return []

    async def _end(self, finishes: Mapping[int, FinishReason]) -> list[TextDelta]:
        """Settles, and only then says that it is over."""
        await COHORT.sync(CohortStage.HEARD)
        self._over = True
        before = self._context.completion_tokens
        self._usage_counter.close()
        self._entry.charge_tokens(output_tokens=self._context.completion_tokens - before)
        self._context.finish_reasons = [finishes[index] for index in sorted(finishes)]
        await self._grant.settle(self._context.usage, Outcome.FINISHED)
        return [*(self._held or ()), *(self._last(index, finishes[index]) for index in sorted(finishes))]

    def _last(self, index: int, finish: FinishReason) -> TextDelta:
        """The end of a choice."""
        return TextDelta(index, "", finish, continued=self._joint)

    async def _cut(self) -> list[TextDelta]:
        """The caller's time is over."""
        if self._partial and self._context.first_token_s is not None:
            unfinished = dict.fromkeys(range(self._request.choices), FinishReason.DEADLINE)
            return await self._end({**unfinished, **self._finishes})
        raise DeadlineExceeded


class _UpstreamAttempt:
    """A request at a server. A context; entering it sends the request, and gives what comes back.

    Args:
        sent: The request.
        span: What is told of it.
        now_s: The time.
        submitted: Called when it has arrived there.
    """

    __slots__ = ("_now_s", "_sent", "_span", "_submitted")

    def __init__(
        self,
        sent: AbstractAsyncContextManager[TextStream],
        span: TimelineSpan,
        now_s: Callable[[], float],
        submitted: Callable[[], None],
    ) -> None:
        self._sent = sent
        self._span = span
        self._now_s = now_s
        self._submitted = submitted

    async def __aenter__(self) -> "_UpstreamBatches":
        try:
            stream = await self._sent.__aenter__()
        except BaseException as failure:
            self._span.end(self._now_s(), error_code(failure))
            raise
        self._submitted()
        return _UpstreamBatches(stream)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._sent.__aexit__(kind, error, trace)
        finally:
            self._span.end(self._now_s(), "" if error is None else error_code(error))


class _UpstreamBatches(PeekableStream[TextBatch]):
    """Batches of text from one upstream server."""

    def __init__(self, stream: TextStream) -> None:
        super().__init__(aiter(stream))
        self.listen = stream.listen
