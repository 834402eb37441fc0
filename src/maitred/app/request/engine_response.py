"""Response stream from an engine of this gateway: waits for dispatch, submits the request, and turns tokens into text.

If a replica fails, another replica resumes the answer at the last token (see `continuation`). The client only sees a
delay.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

from msgspec.structs import replace

from maitred.app.request.continuation import TokenContinuation
from maitred.app.request.flow_control import DispatchHandle, GrantHandle
from maitred.app.request.output import OutputProcessor, record_engine_spans
from maitred.app.request.response import ReplicaAttempt, ReplicaResponse
from maitred.core.clock import Clock
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import DeadlineExceeded, ReplicaLost, ReplicaUnavailable
from maitred.core.inference import TextDelta
from maitred.core.replica import TokenStream
from maitred.core.request import EngineRequest, FinishReason, TokenDelta
from maitred.core.resource_stack import ResourceStack
from maitred.core.timeline import RequestTimeline
from maitred.dispatch.request import AnyEndpoint

_CANCELLED_BY_REPLICA = "The replica gave up the answer before it was complete. Send the request again."


Batch = tuple[int, list[TokenDelta]]
"""Index of a prompt, and new deltas of its choices."""


class EngineAttempt(ReplicaAttempt[Batch]):
    """Attempt at one engine, with a stream for each prompt without a complete answer.

    Args:
        endpoint: Endpoint of the engine.
        requests: Requests by the number of their prompt.
        on_submitted: Called after each submission.
        on_unread: Called with the number of tokens that came while no reader waited for them.
        timeline: Timeline of the request.
        clock: Clock of the timeline.

    Attributes:
        streams: Streams by the number of the prompt.
    """

    def __init__(
        self,
        endpoint: AnyEndpoint,
        requests: Mapping[int, EngineRequest],
        on_submitted: Callable[[], None],
        on_unread: Callable[[int], None],
        timeline: RequestTimeline,
        clock: Clock,
    ) -> None:
        super().__init__(timeline, clock, {"replica": endpoint.name})
        self._replica = endpoint.replica
        self._requests = requests
        self._on_submitted = on_submitted
        self._on_unread = on_unread
        self.streams: dict[int, TokenStream] = {}

    async def _submit(self) -> None:
        for prompt, request in self._requests.items():
            context = self._replica.generate(request)
            stream = self.streams[prompt] = await context.__aenter__()
            stream.on_unread = self._on_unread
            self._stack.push_async_exit(context)
            self._on_submitted()
        if len(self.streams) == 1:
            # By far the most common case needs neither task nor queue.
            ((prompt, stream),) = self.streams.items()
            self._items = _SingleStream(prompt, stream)
        else:
            self._items = await self._stack.enter_async_context(merge_streams(self.streams))

    def listen(self, on_tokens: Callable[[int, Sequence[TokenDelta]], bool]) -> None:
        """Sets a listener for tokens, with the number of the prompt; only where there is one stream."""
        if len(self.streams) == 1:
            ((prompt, stream),) = self.streams.items()
            stream.listen(partial(on_tokens, prompt))


class EngineResponse(ReplicaResponse[EngineAttempt]):
    """Response that an own engine produces, as tokens. Implements `maitred.core.service.ResponseStream`.

    It records usage and times in the request context and charges every token to the fair queue.

    Args:
        requests: The engine requests, one for each prompt.
        outputs: Output of each choice of all prompts, in order.
        given: Token ids of the beginning of the only choice, which another model has written.
    """

    def __init__(
        self,
        entry: DispatchHandle,
        stack: ResourceStack,
        *,
        requests: Sequence[EngineRequest],
        outputs: Sequence[OutputProcessor],
        context: RequestContext,
        clock: Clock,
        grant: GrantHandle,
        partial: bool,
        given: Sequence[int] = (),
    ) -> None:
        super().__init__(entry, stack, context=context, clock=clock, grant=grant, partial=partial)
        self._outputs = outputs
        self._unfinished = len(outputs)
        self._choices_per_prompt = len(outputs) // len(requests)
        self._continuation = TokenContinuation(requests, context.started_s)
        self._has_begun = False
        self._held: dict[int, list[TokenDelta]] = {}
        """Prompt whose log-probabilities are not complete -> deltas of its choices that have come."""
        self._charged_unread = 0
        """Tokens that were charged before they are read."""
        self._next_is_continuation = bool(given)
        """Whether the next delta is the first after the beginning of another model."""
        if given:
            self._continuation.on_delta(0, TokenDelta(0, [*given]))
            context.completion_tokens = len(given)

    async def __anext__(self) -> list[TextDelta]:
        if not self._unfinished:
            raise StopAsyncIteration
        prompt, deltas = await self._next_tokens()
        while not (parts := self._to_deltas(prompt, deltas)) and prompt in self._held:
            prompt, deltas = await self._next_tokens()
        if not self._unfinished:
            # Settle before the last delta is sent, so that no complete answer is missing in the ledger.
            await self._grant.settle(self._context.usage, Outcome.FINISHED)
        return parts

    def _register_listener(self, attempt: EngineAttempt) -> None:
        attempt.listen(self._on_tokens)

    def _on_tokens(self, prompt: int, deltas: Sequence[TokenDelta]) -> bool:
        """Pushes deltas that are plain text to the sink; returns False, and pushes none, if any delta is not."""
        assert self._sink is not None
        if not self._sink.open:
            return False
        first_choice = prompt * self._choices_per_prompt
        for delta in deltas:
            processor = self._outputs[first_choice + delta.index]
            if delta.finish is not None or delta.stats is not None or not (processor.plain and processor.tokens):
                return False
        self._sink.send(self._to_deltas(prompt, deltas))
        return True

    def _to_deltas(self, prompt: int, deltas: Sequence[TokenDelta]) -> list[TextDelta]:
        """Turns token deltas into text deltas."""
        now_s = self._clock.monotonic_s()
        if self._outputs[prompt * self._choices_per_prompt].prompt_scores is not None:
            deltas = self._behind_prompt(prompt, deltas)
        changed: dict[int, OutputProcessor] = {}
        for delta in deltas:
            index = prompt * self._choices_per_prompt + delta.index
            choice = changed[index] = self._outputs[index]
            if choice.finish is None:
                self._process_delta(prompt, choice, delta, now_s)
        parts: list[TextDelta] = []
        for index, choice in changed.items():
            if (choice.tokens or choice.finish is FinishReason.LENGTH) and not self._has_begun:
                self._has_begun = True
                if self._context.first_token_s is None:
                    self._context.first_token_s = now_s
                self._entry.on_first_token()
            if choice.last_token_s is not None:
                self._context.gaps_s.append(now_s - choice.last_token_s)
            choice.last_token_s = now_s
            parts += choice.deltas(index)
        if self._next_is_continuation and parts:
            self._next_is_continuation = False
            parts[0] = replace(parts[0], continued=True)
        return parts

    def _behind_prompt(self, prompt: int, deltas: Sequence[TokenDelta]) -> Sequence[TokenDelta]:
        """Reads the log-probabilities of a prompt in these deltas; returns the deltas that may be shown.

        Other choices can begin to answer before the first choice, which computes these log-probabilities. Their deltas
        wait, because an answer begins with its prompt.
        """
        reader = self._outputs[prompt * self._choices_per_prompt].prompt_scores
        assert reader is not None
        shown = self._held.pop(prompt, [])
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                reader.add(delta.prompt_logprobs)
            if delta.tokens or delta.finish is not None:
                shown.append(delta)
            if delta.finish is FinishReason.DEADLINE:
                reader.give_up()
        if reader.complete:
            return shown
        self._held[prompt] = shown
        return ()

    async def _next_tokens(self) -> tuple[int, list[TokenDelta]]:
        """Returns the next tokens; retries at another replica while retries are left.

        Raises:
            ReplicaLost: No retries are left, or no replica became ready in time.
        """
        while True:
            if self._attempt is None:
                try:
                    endpoint = await self._entry.wait_dispatched()
                except DeadlineExceeded:
                    if self._context.first_token_s is None or not self._partial:
                        raise
                    return self._continuation.deadline_deltas()
                except ReplicaUnavailable:
                    if self._context.first_token_s is None:
                        raise
                    raise ReplicaLost from None
            try:
                attempt = self._attempt
                if attempt is None:
                    context = self._context
                    if context.first_token_s is None:
                        context.position, context.dispatched_s = None, self._clock.monotonic_s()
                        context.waited_ms = dict(self._entry.waited_ms)
                    attempt = await self._open_attempt(endpoint)
                prompt, deltas = await anext(attempt)
                for delta in deltas:
                    if delta.finish is FinishReason.CANCELLED:
                        break
                else:
                    return prompt, deltas
                failure: ReplicaLost | ReplicaUnavailable = ReplicaLost(_CANCELLED_BY_REPLICA)
            except StopAsyncIteration:
                failure = ReplicaLost()
            except (ReplicaLost, ReplicaUnavailable) as error:
                failure = error
            await self._requeue(failure)

    def _new_attempt(self, endpoint: AnyEndpoint, on_submitted: Callable[[], None]) -> EngineAttempt:
        """Makes an attempt that submits the unfinished prompts to one replica; closing the attempt cancels them.

        Raises:
            ReplicaUnavailable: Raised on `__aenter__` of the attempt if the replica is not ready.
        """
        requests = self._continuation.remaining_requests(self._clock.monotonic_s())
        return EngineAttempt(
            endpoint, requests, on_submitted, self._on_unread, timeline=self._context.timeline, clock=self._clock
        )

    async def _requeue(self, failure: ReplicaLost | ReplicaUnavailable) -> None:
        """Closes the failed attempt and requeues the request.

        Raises:
            ReplicaLost: No retries are left, and part of the answer has been sent.
            ReplicaUnavailable: No retries are left, and nothing has been sent.
        """
        await self._close_attempt(failure)
        self._held.clear()
        if not self._entry.requeue(
            prompts=self._continuation.unfinished_prompts, answer_by_s=self._continuation.answer_by_s
        ):
            if isinstance(failure, ReplicaUnavailable) and self._context.first_token_s is not None:
                raise ReplicaLost from failure
            raise failure
        self._context.recoveries += 1

    def _on_unread(self, tokens: int) -> None:
        """Charges tokens that the client is too slow for: the engine has computed them, and others have waited."""
        self._charged_unread += tokens
        self._entry.charge_tokens(output_tokens=tokens)

    def _process_delta(self, prompt: int, choice: OutputProcessor, delta: TokenDelta, now_s: float) -> None:
        if delta.finish is FinishReason.DEADLINE and not self._partial:
            raise DeadlineExceeded
        if not delta.begun:
            if delta.index == 0:
                self._context.prompt_tokens -= choice.prompt_tokens  # the prompt was not computed, so it is not billed
        elif delta.index == 0 and not choice.tokens:
            # Later choices hit the prefix cache because of the first one, so only the first counts cached tokens.
            # A replica can also find the beginning of an answer, which is no part of the prompt.
            self._context.cached_tokens += min(delta.cached_tokens, choice.prompt_tokens)
            self._entry.charge_tokens(prompt_tokens=choice.prompt_tokens, cached_tokens=delta.cached_tokens)
        before, reasoning_before = choice.tokens, choice.reasoning_tokens
        choice.process(delta)
        self._continuation.on_delta(prompt, delta)
        if delta.stats is not None:
            record_engine_spans(
                self._context.timeline, prompt * self._choices_per_prompt + delta.index, choice, delta, now_s
            )
        if choice.tokens > before:
            uncharged = choice.tokens - before
            self._context.completion_tokens += uncharged
            if self._charged_unread:
                charged = min(self._charged_unread, uncharged)
                self._charged_unread -= charged
                uncharged -= charged
            if uncharged:
                self._entry.charge_tokens(output_tokens=uncharged)
        self._context.reasoning_tokens += choice.reasoning_tokens - reasoning_before
        if delta.waited_ms is not None:
            for cause, waited_ms in delta.waited_ms.items():
                # Choices wait concurrently, so the longest wait counts.
                in_all_ms = self._entry.waited_ms.get(cause, 0.0) + waited_ms
                self._context.waited_ms[cause] = max(self._context.waited_ms.get(cause, 0.0), in_all_ms)
        if choice.finish is not None:
            self._unfinished -= 1
            self._context.finish_reasons.append(choice.finish)
            self._continuation.on_end(prompt, delta.index)
            if delta.finish is None and self._attempt is not None:
                # The gateway has found a stop string; cancel the choice at the replica.
                self._attempt.streams[prompt].cancel(delta.index)


@asynccontextmanager
async def merge_streams(streams: Mapping[int, TokenStream]) -> AsyncIterator[AsyncIterator[Batch]]:
    """Merges batches of several streams in order of arrival, each with its prompt index.

    The prompts of a completions request run concurrently. A slow prompt does not delay the others. Unread tokens stay
    in their own bounded stream.

    Raises:
        ReplicaLost: From the iterator, when any of the streams broke: the rest would not be the whole answer.
    """
    merged = _MergedStream(unfinished=len(streams))
    pump_tasks = [asyncio.create_task(merged.pump(number, stream)) for number, stream in streams.items()]
    try:
        yield merged
    finally:
        for pump in pump_tasks:
            pump.cancel()
        await asyncio.wait(pump_tasks)


class _SingleStream:
    def __init__(self, number: int, stream: TokenStream) -> None:
        self._number = number
        self._stream = aiter(stream)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        return self._number, await anext(self._stream)


class _MergedStream:
    """Batches of several streams in order of arrival, brought by one pump for each."""

    def __init__(self, unfinished: int) -> None:
        self._unfinished = unfinished
        self._queue: asyncio.Queue[Batch | Exception | None] = asyncio.Queue(maxsize=unfinished)

    async def pump(self, number: int, stream: TokenStream) -> None:
        """Moves a stream's batches into the queue; None after the last one."""
        try:
            async for batch in stream:
                await self._queue.put((number, batch))
            await self._queue.put(None)
        except Exception as error:  # raised again where it is read
            await self._queue.put(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        while self._unfinished:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._unfinished -= 1
        raise StopAsyncIteration
