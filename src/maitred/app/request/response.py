"""Base of responses from replicas: waits for dispatch, opens an attempt, streams it, and retries after a failure.

`ReplicaResponse` is the common base of `EngineResponse` (tokens) and `UpstreamResponse` (text).

Hedging: if the first replica is late and another has capacity (see `maitred.dispatch.policy.hedging`), a second attempt
is opened. The first attempt to answer wins; the other is cancelled. So only the start of the work is done twice.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from maitred.app.request.flow_control import DispatchHandle, GrantHandle
from maitred.core.clock import Clock
from maitred.core.context import RequestContext
from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.inference import AnswerPrefix, TextDelta
from maitred.core.resource_stack import ResourceStack
from maitred.core.service import PushStream, StreamSink
from maitred.core.timeline import RequestTimeline, SpanName, TimelineSpan, error_code
from maitred.dispatch.dispatcher import HedgeAllocation
from maitred.dispatch.request import AnyEndpoint

T = TypeVar("T")


class ReplicaAttempt(ABC, Generic[T]):
    """Attempt of a request at one replica. A context, and in it an iterator over what the replica sends.

    Entering submits the request; leaving ends the work there.

    Args:
        timeline: Timeline of the request; gets the attempt as a span.
        clock: Clock of the timeline.
        facts: Facts about the replica, for the span.
    """

    _span: TimelineSpan
    _items: AsyncIterator[T]
    """Stream of the replica; set by `_submit`."""

    def __init__(self, timeline: RequestTimeline, clock: Clock, facts: dict[str, object]) -> None:
        self._timeline = timeline
        self._clock = clock
        self._facts = facts
        self._stack = ResourceStack()
        self._first: list[T] = []

    @abstractmethod
    async def _submit(self) -> None:
        """Submits the request and sets `_items`; puts what it opens on `_stack`."""
        ...

    async def __aenter__(self) -> Self:
        self._span = self._timeline.begin(SpanName.ATTEMPT, self._clock.monotonic_s(), **self._facts)
        try:
            await self._submit()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stack.__aexit__(kind, error, trace)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._span.end(self._clock.monotonic_s(), "" if error is None else error_code(error))

    async def wait_first(self) -> None:
        """Waits for the first item and keeps it; returns also if the stream ends without an item."""
        async for item in self._items:
            self._first.append(item)
            return

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[T]:
        return _immediate(self._first.pop()) if self._first else anext(self._items)


async def _immediate(item: T) -> T:
    return item


A = TypeVar("A", bound=ReplicaAttempt[Any])
NewAttempt = Callable[[AnyEndpoint, Callable[[], None]], A]
"""Makes the attempt at an endpoint. The second argument is called after each submission."""


class ContinuableResponse(PushStream):
    """Response that another model may continue if it breaks off.

    Attributes:
        continues_at_fallback: Whether another model may continue the answer.
    """

    continues_at_fallback = False

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> list[TextDelta]:
        """Returns the next deltas, as `ResponseStream` has them."""
        ...

    @property
    def prefix(self) -> AnswerPrefix | None:
        """The part that the caller has, for another model to continue; None: it cannot be continued."""
        return None


class ReplicaResponse(ContinuableResponse, Generic[A]):
    """Base of the responses that replicas produce. Implements `maitred.core.service.ResponseStream`, but for reading.

    The request waits in the queue until the response is first read. Reading waits for dispatch and opens an attempt. If
    the replica fails, the attempt is closed and the request is requeued. The last delta is returned only after the
    usage is settled.

    Args:
        entry: Queue entry and dispatch handle.
        stack: Closes the open attempt when it is closed.
        context: Record of the request.
        clock: Clock for the times in it.
        grant: The reservation of the request.
        partial: Whether an incomplete answer is returned at the deadline.
    """

    def __init__(
        self,
        entry: DispatchHandle,
        stack: ResourceStack,
        *,
        context: RequestContext,
        clock: Clock,
        grant: GrantHandle,
        partial: bool,
    ) -> None:
        self._entry = entry
        self._context = context
        self._clock = clock
        self._grant = grant
        self._partial = partial
        self._sink: StreamSink | None = None
        self._attempt: A | None = None
        stack.push_async_exit(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the open attempt."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            await attempt.__aexit__(kind, error, trace)

    def push_to(self, sink: StreamSink) -> None:
        """Pushes deltas to a sink as they come; implements `PushStream.push_to`."""
        self._sink = sink
        if self._attempt is not None:
            self._register_listener(self._attempt)

    async def _open_attempt(self, endpoint: AnyEndpoint) -> A:
        """Opens an attempt at the dispatched replica, hedged where hedging applies."""
        entry = self._entry
        self._grant.set_replica(endpoint.name)
        self._context.is_counted = True
        hedge_delay_s = entry.start_hedge_timer()
        if hedge_delay_s is None:
            attempt = await self._new_attempt(endpoint, entry.on_submitted).__aenter__()
        else:
            endpoint, attempt = await open_hedged(entry, endpoint, self._new_attempt, hedge_delay_s, self._context)
            self._grant.set_replica(endpoint.name)
        if endpoint.region is not None:  # the gateway has a region, too
            self._context.served_region = entry.region
        self._attempt = attempt
        if self._sink is not None:
            self._register_listener(attempt)
        return attempt

    async def _close_attempt(self, failure: ReplicaLost | ReplicaUnavailable) -> None:
        """Closes the failed attempt with the failure, which its circuit breaker counts."""
        await self.__aexit__(type(failure), failure, failure.__traceback__)

    @abstractmethod
    def _new_attempt(self, endpoint: AnyEndpoint, on_submitted: Callable[[], None]) -> A:
        """Makes the attempt at one replica."""
        ...

    @abstractmethod
    def _register_listener(self, attempt: A) -> None:
        """Registers a listener that pushes plain text to the sink."""
        ...


async def open_hedged(
    entry: DispatchHandle,
    endpoint: AnyEndpoint,
    new_attempt: NewAttempt[A],
    after_s: float,
    context: RequestContext,
) -> tuple[AnyEndpoint, A]:
    """Opens an attempt at the dispatched replica, and a second one elsewhere if the first is late.

    Args:
        entry: Queue entry and dispatch handle.
        endpoint: The dispatched replica.
        new_attempt: Makes an attempt.
        after_s: Seconds until the second attempt is opened.
        context: Request context; gets `hedged`.

    Returns:
        The replica that answers, and the attempt there.
    """
    hedge: HedgeAllocation | None = None
    winner: asyncio.Task[A] | None = None
    first = asyncio.create_task(_open_and_wait_first(new_attempt(endpoint, entry.on_submitted)), name="first replica")
    attempt_tasks = [first]
    try:
        await asyncio.wait(attempt_tasks, timeout=after_s)
        if not first.done() and (hedge := entry.hedge()) is not None:
            attempt = new_attempt(hedge.endpoint, hedge.on_submitted)
            attempt_tasks.append(asyncio.create_task(_open_and_wait_first(attempt), name="second replica"))
        winner = await _first_success(attempt_tasks)
        if winner is None:
            raise first.exception() or RuntimeError("No attempt has won, and the first one has not failed.")
    finally:
        await _cancel_attempts([attempt_task for attempt_task in attempt_tasks if attempt_task is not winner])
        if hedge is not None:
            context.hedged = "second" if winner is attempt_tasks[-1] else "first"
            hedge.settle(won=winner is attempt_tasks[-1])
    return (hedge.endpoint if hedge is not None and winner is attempt_tasks[-1] else endpoint), winner.result()


async def _open_and_wait_first(attempt: A) -> A:
    """Enters an attempt, and waits until the replica has begun to answer."""
    async with ResourceStack() as stack:
        await stack.enter_async_context(attempt)
        await attempt.wait_first()
        stack.pop_all()
    return attempt


async def _first_success(attempts: list[asyncio.Task[A]]) -> asyncio.Task[A] | None:
    """Returns the task of the first attempt that succeeds; None: all failed."""
    running = {*attempts}
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for attempt_task in attempts:
            if attempt_task in done and attempt_task.exception() is None:
                return attempt_task
    return None


async def _cancel_attempts(attempts: list[asyncio.Task[A]]) -> None:
    """Cancels the losing attempts and closes those that had opened."""
    for attempt_task in attempts:
        attempt_task.cancel()
    if attempts:
        await asyncio.wait(attempts)
    for attempt_task in attempts:
        if not attempt_task.cancelled() and attempt_task.exception() is None:
            await attempt_task.result().__aexit__(None, None, None)
