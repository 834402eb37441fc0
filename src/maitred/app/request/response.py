"""Response of a request at a replica: waits for dispatch, opens an attempt, reads it, and goes on after a failure.

`ReplicaResponse` is the part that responses in tokens (`engine_response`) and in text (`upstream_response`) share.

A second replica is asked only where the first is late and another has room at this moment (see
`dispatch.policy.hedging`). As soon as one has begun, the other is left, which ends the work there; so all that is ever
done twice is the beginning.
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
    """What the replica sends; set by `_submit`."""

    def __init__(self, timeline: RequestTimeline, clock: Clock, facts: dict[str, object]) -> None:
        self._timeline = timeline
        self._clock = clock
        self._facts = facts
        self._stack = ResourceStack()
        self._first: list[T] = []

    @abstractmethod
    async def _submit(self) -> None:
        """Submits the request; what it opens is in the stack."""
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
        """Waits for the first item and keeps it; also returns where the replica ends without one."""
        async for item in self._items:
            self._first.append(item)
            return

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[T]:
        return _return(self._first.pop()) if self._first else anext(self._items)


async def _return(item: T) -> T:
    return item


A = TypeVar("A", bound=ReplicaAttempt[Any])
NewAttempt = Callable[[AnyEndpoint, Callable[[], None]], A]
"""Makes the attempt at a replica; it calls its second argument after each submission."""


class ReplicaResponse(PushStream, Generic[A]):
    """Base of the responses that replicas produce. Implements `maitred.core.service.ResponseStream`, but for reading.

    Until it is read for the first time the request only has its place in the queue. Then it waits for dispatch and an
    attempt is opened at the replica. A replica that fails is left, and the request waits in the queue for another one.
    The end is shown only after the usage is settled.

    Args:
        entry: Place in the queue, and then at a replica.
        stack: Leaves the replica when it is left itself.
        context: Record of the request.
        clock: Clock for the times in it.
        grant: What the request may use.
        partial: Whether what is there at the deadline is an answer.
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
        """Leaves the replica that the request is at."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            await attempt.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    def push_to(self, sink: StreamSink) -> None:
        """Pushes deltas to a sink as they come; implements `PushStream.push_to`."""
        self._sink = sink
        if self._attempt is not None:
            self._listen(self._attempt)

    async def _open_attempt(self, endpoint: AnyEndpoint) -> A:
        """Opens an attempt at the dispatched replica, or at another one where that is late."""
        entry = self._entry
        self._grant.set_replica(endpoint.name)
        after_s = entry.hedge_after_s()
        if after_s is None:
            attempt = await self._new_attempt(endpoint, entry.on_submitted).__aenter__()
        else:
            endpoint, attempt = await open_hedged(entry, endpoint, self._new_attempt, after_s, self._context)
            self._grant.set_replica(endpoint.name)
        self._attempt = attempt
        if self._sink is not None:
            self._listen(attempt)
        return attempt

    async def _close_attempt(self, failure: ReplicaLost | ReplicaUnavailable) -> None:
        """Leaves a replica that has failed; its breaker counts what the attempt ends with."""
        await self.__aexit__(type(failure), failure, failure.__traceback__)

    @abstractmethod
    def _new_attempt(self, endpoint: AnyEndpoint, on_submitted: Callable[[], None]) -> A:
        """Makes the attempt at one replica."""
        ...

    @abstractmethod
    def _listen(self, attempt: A) -> None:
        """Has the attempt push what is nothing but text to the sink."""
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
        entry: Place in the queue, and then at a replica.
        endpoint: The dispatched replica.
        new_attempt: Makes an attempt.
        after_s: Seconds after which the first one is late.
        context: Record of the request; notes which of two answered.

    Returns:
        The replica that answers, and the attempt there.
    """
    second: HedgeAllocation | None = None
    won: asyncio.Task[A] | None = None
    first = asyncio.create_task(_open(new_attempt(endpoint, entry.on_submitted)), name="first replica")
    runners = [first]
    try:
        await asyncio.wait(runners, timeout=after_s)
        if not first.done() and (second := entry.hedge()) is not None:
            attempt = new_attempt(second.endpoint, second.on_submitted)
            runners.append(asyncio.create_task(_open(attempt), name="second replica"))
        won = await _first_of(runners)
        if won is None:
            raise first.exception() or RuntimeError("No runner has won, and the first one has not failed.")
    finally:
        await _leave([runner for runner in runners if runner is not won])
        if second is not None:
            context.hedged = "second" if won is runners[-1] else "first"
            second.settle(won=won is runners[-1])
    return (second.endpoint if second is not None and won is runners[-1] else endpoint), won.result()


async def _open(attempt: A) -> A:
    """Enters an attempt, and waits until the replica has begun to answer."""
    async with ResourceStack() as stack:
        await stack.enter_async_context(attempt)
        await attempt.wait_first()
        stack.pop_all()
    return attempt


async def _first_of(runners: list[asyncio.Task[A]]) -> asyncio.Task[A] | None:
    """Returns the task of the replica that begins to answer first; None: all have failed."""
    running = {*runners}
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for runner in runners:
            if runner in done and runner.exception() is None:
                return runner
    return None


async def _leave(runners: list[asyncio.Task[A]]) -> None:
    """Ends the work of those that were not the first."""
    for runner in runners:
        runner.cancel()
    if runners:
        await asyncio.wait(runners)
    for runner in runners:
        if not runner.cancelled() and runner.exception() is None:
            await runner.result().__aexit__(None, None, None)
