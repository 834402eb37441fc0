"""Response of an upstream server, as text: waits for dispatch, sends the request, and passes on what comes back.

A server that fails before the first part of the answer is followed by another one, or by itself after a pause; the
caller sees nothing of it but the time that it takes. For callers who get the answer in one piece, that holds up to its
end, and where the model's configuration allows it, a stream goes on elsewhere by its text (see `continuation`). The
text is passed on as it comes; what it was in tokens is an estimate until the server says what it has counted. The end
of the answer is held back until all of it is known to be there and in the ledger, so a stream that breaks off, however
late, never looks complete.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from maitred.app.request.continuation import TextContinuation
from maitred.app.request.flow_control import DispatchHandle, GrantHandle
from maitred.app.request.response import ReplicaAttempt, ReplicaResponse
from maitred.app.request.upstream_request import UpstreamRequest
from maitred.app.request.usage_counter import UpstreamUsageCounter
from maitred.cache.answer import fingerprint_in
from maitred.core.backoff import GiveUpReason, RetryState
from maitred.core.clock import Clock
from maitred.core.cohort import COHORT, CohortStage
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import (
    AnswerTooLarge,
    CallerError,
    DeadlineExceeded,
    ReplicaBusy,
    ReplicaLost,
    ReplicaStalled,
    ReplicaTooSlow,
    ReplicaUnavailable,
)
from maitred.core.ids import new_span_id
from maitred.core.inference import AnswerPrefix, TextDelta
from maitred.core.request import FinishReason
from maitred.core.resource_stack import ResourceStack
from maitred.core.text_replica import TextBatch, TextReplica, TextRequest
from maitred.core.timeline import RequestTimeline
from maitred.dispatch.request import Endpoint

log = logging.getLogger(__name__)


class UpstreamAttempt(ReplicaAttempt[TextBatch]):
    """Attempt at one upstream server.

    Args:
        endpoint: Endpoint of the server.
        request: The request to send.
        on_submitted: Called when the server has begun to answer.
        timeline: Timeline of the request.
        clock: Clock of the timeline.

    Attributes:
        ignored_fields: Fields of the request that the server was not given.
        is_passthrough: Whether the server was given the request as its client wrote it.
    """

    ignored_fields: Sequence[str] = ()
    is_passthrough = False

    def __init__(
        self,
        endpoint: Endpoint[TextReplica],
        request: TextRequest,
        on_submitted: Callable[[], None],
        timeline: RequestTimeline,
        clock: Clock,
    ) -> None:
        super().__init__(timeline, clock, {"replica": endpoint.name, **endpoint.replica.trace_attributes})
        self._replica = endpoint.replica
        self._request = request
        self._on_submitted = on_submitted

    async def _submit(self) -> None:
        request, timeline = self._request, self._timeline
        if timeline.trace is not None:
            request = replace(request, trace=timeline.context_at(self._span, new_span_id))
        stream = await self._stack.enter_async_context(self._replica.generate(request))
        self._items, self.listen = aiter(stream), stream.listen
        self.ignored_fields, self.is_passthrough = stream.ignored_fields, stream.is_passthrough
        self._on_submitted()


class UpstreamResponse(ReplicaResponse[UpstreamAttempt]):
    """Response that an upstream server produces, as text. Implements `maitred.core.service.ResponseStream`.

    Args:
        upstream_request: The request with its prompts and what its caller wants to see.
        request: The request to send.
        usage_counter: Counts the usage.
        retry_state: Retry state of the request.
        deadline_s: Deadline on the monotonic clock; None: no deadline.
        continuation: Records sent text to continue it at another server; None: streams are not continued.
    """

    def __init__(
        self,
        entry: DispatchHandle,
        stack: ResourceStack,
        *,
        upstream_request: UpstreamRequest,
        request: TextRequest,
        usage_counter: UpstreamUsageCounter,
        context: RequestContext,
        clock: Clock,
        grant: GrantHandle,
        retry_state: RetryState,
        deadline_s: float | None,
        continuation: TextContinuation | None = None,
    ) -> None:
        super().__init__(
            entry, stack, context=context, clock=clock, grant=grant, partial=upstream_request.request.partial
        )
        self._request = request
        self._continuation = continuation
        self.continues_at_fallback = continuation is not None and continuation.at_fallback
        self._next_is_continuation = upstream_request.request.prefix is not None
        """Whether the next delta is the first of a continuing server."""
        self._model = upstream_request.model
        self._prompt_count = len(upstream_request.prompts)
        self._requested_stops = upstream_request.request.stops
        self._usage_counter = usage_counter
        self._retry_state = retry_state
        self._deadline_s = deadline_s
        self._buffered: list[TextDelta] | None = [] if upstream_request.request.whole else None
        """Deltas of a buffered answer; None: the answer is streamed."""
        self._finish_reasons: dict[int, FinishReason] = {}
        self._stop_strings: dict[int, str] = {}
        """Stop string of the request that ended a choice, by the server's word."""
        self._last_delta_s: dict[int, float] = {}
        self._is_finished = False
        self._is_over_grant = False
        """Whether every unfinished choice has more tokens than were granted."""
        self._has_begun = False
        """Whether a part of the answer has come; where another model has begun the answer, its parts do not count."""

    async def __anext__(self) -> list[TextDelta]:
        if self._is_finished:
            raise StopAsyncIteration
        while True:
            if self._deadline_s is None:
                batch = await self._next_batch()
            else:
                try:
                    async with asyncio.timeout(max(0.0, self._deadline_s - self._clock.monotonic_s())):
                        batch = await self._next_batch()
                except TimeoutError:
                    return await self._end_at_deadline()
            if batch is None:
                return await self._end(self._finish_reasons)
            deltas = [] if self._is_over_grant else self._process_batch(batch)
            if batch.whole:
                return [*deltas, *await self._end(self._finish_reasons)]
            if self._is_over_grant:
                return [*deltas, *await self._end_at_grant()]
            if self._buffered is None:
                return deltas

    def _register_listener(self, attempt: UpstreamAttempt) -> None:
        attempt.listen(self._on_batch)

    def _on_batch(self, batch: TextBatch) -> bool:
        """Pushes a batch of plain text to the sink; returns False if the batch is not plain text."""
        sink = self._sink
        assert sink is not None
        if self._next_is_continuation or not sink.open:
            return False
        for part in batch.parts:
            if not part.plain:
                return False
        if shown := self._process_batch(batch):
            sink.send(shown)
        return not self._is_over_grant  # the reader ends the answer

    async def _next_batch(self) -> TextBatch | None:
        """Returns the next batch of text; None at the end of the answer."""
        while True:
            attempt = self._attempt
            if attempt is None:
                try:
                    endpoint = await self._entry.wait_dispatched()
                except ReplicaUnavailable as failure:
                    if not self._request.given:
                        raise
                    raise ReplicaLost from failure
            try:
                if attempt is None:
                    await COHORT.sync(CohortStage.DISPATCHED)
                    context = self._context
                    context.position, context.dispatched_s = None, self._clock.monotonic_s()
                    context.waited_ms = dict(self._entry.waited_ms)
                    attempt = await self._open_attempt(endpoint)
                    context.ignored_fields, context.is_passthrough = attempt.ignored_fields, attempt.is_passthrough
                return await anext(attempt, None)
            except (ReplicaLost, ReplicaUnavailable) as failure:
                await self._requeue(failure)
            except CallerError as failure:
                if not self._request.given:
                    raise
                raise ReplicaLost from failure  # a rejected continuation is not an error of the client

    def _new_attempt(self, endpoint: Endpoint[TextReplica], on_submitted: Callable[[], None]) -> UpstreamAttempt:
        """Makes an attempt at one server; closing it cancels the request."""
        request = self._request
        if self._context.has_fallback or self._entry.has_other_replica:
            request = replace(request, has_other_target=True)
        return UpstreamAttempt(endpoint, request, on_submitted, self._context.timeline, clock=self._clock)

    async def _requeue(self, failure: ReplicaLost | ReplicaUnavailable) -> None:
        """Closes the failed attempt and requeues the request, for another server or for the same one.

        Raises:
            ReplicaLost: The request cannot be retried.
            ReplicaUnavailable: The request cannot be retried, and nothing has been sent.
        """
        await self._close_attempt(failure)
        error = failure
        if self._context.first_token_s is not None and self._buffered is None:
            if not isinstance(failure, ReplicaLost):
                error = ReplicaLost()
                error.__cause__ = failure
            if self._has_begun and not self._prepare_continuation():
                raise error
        else:
            self._restart()
        retry_after_s = failure.retry_after_s if isinstance(failure, ReplicaBusy) else None
        elsewhere = self._entry.has_other_replica
        if not elsewhere and not self._may_repeat(failure):
            raise error  # another model of the route follows, if there is one
        wait_s = self._retry_state.wait(
            self._clock.monotonic_s(),
            retry_after_s=None if elsewhere else retry_after_s,
            is_free=elsewhere and self._entry.has_idle_replica,
        )
        if isinstance(wait_s, GiveUpReason):
            raise error
        again = self._entry.requeue(
            prompts=range(self._prompt_count),
            answer_by_s=self._deadline_s,
            suspend_s=retry_after_s if elsewhere else wait_s,
        )
        if not again:
            raise error
        self._context.recoveries += 1
        self._context.continued += bool(self._request.given)

    def _may_repeat(self, failure: ReplicaLost | ReplicaUnavailable) -> bool:
        """Returns whether the replica that failed can be asked again.

        A failure that lasts would meet the request again. One that has used up a time-out is not risked again while
        another model can be asked.
        """
        if isinstance(failure, ReplicaStalled):
            return not self._context.has_fallback
        return isinstance(failure, ReplicaLost | ReplicaBusy) and not isinstance(
            failure, ReplicaTooSlow | AnswerTooLarge
        )

    def _restart(self) -> None:
        """Resets the response: nothing has been sent, so the next attempt starts over."""
        self._usage_counter.restart()
        self._finish_reasons.clear()
        self._stop_strings.clear()
        self._last_delta_s.clear()
        if self._buffered is not None:
            self._buffered.clear()

    def _prepare_continuation(self) -> bool:
        """Prepares the request that continues the sent text; returns False if it cannot be continued."""
        if self._continuation is None or self._finish_reasons:
            return False
        self._usage_counter.resume()
        rest = self._continuation.remaining_request(self._context.completion_tokens)
        if rest is None or not self._continuation.at_own_servers:
            return False
        self._request, self._next_is_continuation = rest, True
        return True

    @property
    def prefix(self) -> AnswerPrefix | None:
        """The part that the caller has; implements `ContinuableResponse.prefix`."""
        if self._continuation is None or self._buffered is not None or self._finish_reasons:
            return None
        return self._continuation.prefix(self._context.completion_tokens, estimated=self._usage_counter.has_estimates)

    def _process_batch(self, batch: TextBatch) -> list[TextDelta]:
        """Processes a batch; returns its deltas without finish reasons, which `_end` returns."""
        now_s, context, entry = self._clock.monotonic_s(), self._context, self._entry
        answered_tokens = 0
        if not self._has_begun and batch.parts:
            self._has_begun = True
            if context.first_token_s is None:
                context.first_token_s = now_s
            entry.on_first_token()
            answered_tokens = context.prompt_tokens
        before, over = context.completion_tokens, self._usage_counter.choices_over_grant
        parts = [part for part in batch.parts if part.index not in over] if over else batch.parts
        self._usage_counter.count(batch)
        if answered_tokens or context.completion_tokens != before:
            entry.charge_tokens(prompt_tokens=answered_tokens, output_tokens=context.completion_tokens - before)
        self._grant.record_usage(context.usage)
        shown: list[TextDelta] = []
        for part in parts:
            if part.metadata is not None and (fingerprint := fingerprint_in([part])):
                self._model.note_fingerprint(self._request.model, fingerprint)
            if part.finish is not None:
                self._finish_reasons[part.index] = part.finish
                if part.stop is not None and part.stop in self._requested_stops:
                    self._stop_strings[part.index] = part.stop
            if over and part.index in over:
                part = self._usage_counter.cut(part)
            if part.text or part.extra or part.scores or part.metadata is not None or part.block is not None:
                if part.finish is not None or self._next_is_continuation:
                    part = TextDelta(
                        part.index,
                        part.text,
                        finish=None,
                        scores=part.scores,
                        extra=part.extra,
                        continued=self._next_is_continuation,
                        metadata=part.metadata,
                        block=part.block,
                    )
                    self._next_is_continuation = False
                shown.append(part)
                if (last_s := self._last_delta_s.get(part.index)) is not None:
                    context.gaps_s.append(now_s - last_s)
                self._last_delta_s[part.index] = now_s
        if over:
            self._finish_reasons |= dict.fromkeys(over, FinishReason.LENGTH)
            self._is_over_grant = len(self._finish_reasons) == self._request.choices
        if self._continuation is not None:
            self._continuation.on_delta(shown)
        if self._buffered is None:
            return shown
        self._buffered += shown
        return []

    async def _end(self, finishes: Mapping[int, FinishReason]) -> list[TextDelta]:
        """Settles the usage; returns the buffered and final deltas."""
        await COHORT.sync(CohortStage.HEARD)
        self._is_finished = True
        before = self._context.completion_tokens
        if reason := self._usage_counter.close():
            log.warning("An upstream of %s reports a wrong usage, which is estimated: %s.", self._context.model, reason)
        if self._context.completion_tokens != before:
            self._entry.charge_tokens(output_tokens=self._context.completion_tokens - before)
        self._context.finish_reasons = [finishes[index] for index in sorted(finishes)]
        await self._grant.settle(self._context.usage, Outcome.FINISHED)
        return [*(self._buffered or ()), *(self._final_delta(index, finishes[index]) for index in sorted(finishes))]

    def _final_delta(self, index: int, finish: FinishReason) -> TextDelta:
        """Makes the final delta of a choice."""
        stop = self._stop_strings.get(index)
        return TextDelta(index, "", finish, stop=stop, continued=self._next_is_continuation)

    async def _end_at_grant(self) -> list[TextDelta]:
        """Ends the response because its choices have all tokens that were granted; cancels the request."""
        await self.__aexit__(None, None, None)
        return await self._end(self._finish_reasons)

    async def _end_at_deadline(self) -> list[TextDelta]:
        """Ends the response at the deadline, if a partial answer is allowed."""
        if self._partial and self._context.first_token_s is not None:
            unfinished = dict.fromkeys(range(self._request.choices), FinishReason.DEADLINE)
            return await self._end({**unfinished, **self._finish_reasons})
        raise DeadlineExceeded
