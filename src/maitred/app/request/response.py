"""Response of a request at a replica: waits for dispatch, opens an attempt, reads it, and goes on after a failure.

`ReplicaResponse` is the part that responses in tokens (`engine_response`) and in text (`upstream_response`) share.

A second replica is asked only where the first is late and another has room at this moment (see
`dispatch.policy.hedging`). As soon as one has begun, the other is left, which ends the work there; so all that is ever
done twice is the beginning.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Generic, Protocol, Self, TypeVar

from maitred.app.request.flow_control import DispatchHandle, GrantHandle
from maitred.core.clock import Clock
from maitred.core.context import RequestContext
from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.service import PushStream, StreamSink
from maitred.dispatch.dispatcher import HedgeAllocation
from maitred.dispatch.request import AnyEndpoint

T = TypeVar("T")


class ReplicaAttempt(Protocol):
    """Attempt at one replica, whose first part can be waited for without being taken."""

    async def wait_first(self) -> None:
        """Waits for the first item."""
        ...


B = TypeVar("B", bound=ReplicaAttempt)
Open = Callable[[AnyEndpoint, Callable[[], None]], AbstractAsyncContextManager[B]]
"""Sends the request to a replica, and says so after each submission; leaving the context ends the work there."""
_Runner = asyncio.Task[tuple[B, AsyncExitStack]]


class ReplicaResponse(PushStream, Generic[B]):
    """Base of the responses that replicas produce. Implements `maitred.core.service.ResponseStream`, but for reading.

    Until it is read for the first time the request only has its place in the queue. Then it waits for dispatch and an
    attempt is opened at the replica. A replica that fails is left, and the request waits in the queue for another one.
    The end is shown only after the usage is settled.

    Args:
        entry: Place in the queue, and then at a replica.
        stack: Holds what is opened here; whoever made it closes it.
        context: Record of the request.
        clock: Clock for the times in it.
        grant: What the request may use.
        partial: Whether what is there at the deadline is an answer.
    """

    def __init__(
        self,
        entry: DispatchHandle,
        stack: AsyncExitStack,
        context: RequestContext,
        clock: Clock,
        grant: GrantHandle,
        *,
        partial: bool,
    ) -> None:
        self._entry = entry
        self._context = context
        self._clock = clock
        self._grant = grant
        self._partial = partial
        self._sink: StreamSink | None = None
        self._attempt: B | None = None
        self._attempt_stack = stack.push_async_exit(AsyncExitStack())
        """Holds the attempt."""

    def __aiter__(self) -> Self:
        return self

    def push_to(self, sink: StreamSink) -> None:
        """Pushes deltas to a sink as they come; implements `PushStream.push_to`."""
        self._sink = sink
        if self._attempt is not None:
            self._listen(self._attempt)

    async def _open_attempt(self, endpoint: AnyEndpoint) -> B:
        """Opens an attempt at the dispatched replica, or at another one where that is late."""
        self._grant.set_replica(endpoint.name)
        server, attempt = await open_hedged(self._entry, endpoint, self._open, self._attempt_stack, self._context)
        self._grant.set_replica(server.name)
        if self._sink is not None:
            self._listen(attempt)
        return attempt

    async def _close_attempt(self, failure: ReplicaLost | ReplicaUnavailable) -> None:
        """Leaves a replica that has failed; its breaker counts what the attempt ends with."""
        await self._attempt_stack.__aexit__(type(failure), failure, failure.__traceback__)
        self._attempt = None

    @abstractmethod
    def _open(self, endpoint: AnyEndpoint, on_submitted: Callable[[], None]) -> AbstractAsyncContextManager[B]:
        """Sends the request to one replica; leaving the context ends the work there."""
        ...

    @abstractmethod
    def _listen(self, attempt: B) -> None:
        """Has the attempt push what is nothing but text to the sink."""
        ...


class PeekableStream(Generic[T]):
    """An iterator that implements `ReplicaAttempt`."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items = items
        self._first: list[T] = []

    async def wait_first(self) -> None:
        """Waits for the first item; also returns where the stream ends without one."""
        async for item in self._items:
            self._first.append(item)
            return

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[T]:
        return _there(self._first.pop()) if self._first else anext(self._items)


async def _there(item: T) -> T:
    return item


async def open_hedged(
    entry: DispatchHandle,
    endpoint: AnyEndpoint,
    open_at: Open[B],
    attempt_stack: AsyncExitStack,
    context: RequestContext,
) -> tuple[AnyEndpoint, B]:
    """Sends a request to the replica that it was granted, and to another one if that is late.

    Args:
        entry: Its place.
        endpoint: The replica.
        open_at: Sends it.
        attempt_stack: Holds what was opened.
        context: Is told of a second replica.

    Returns:
        Who answers, and the answer.
    """
    after_s = entry.hedge_after_s()
    if after_s is None:
        return endpoint, await attempt_stack.enter_async_context(open_at(endpoint, entry.on_submitted))
    second: HedgeAllocation | None = None
    won: _Runner[B] | None = None
    runners = [first := asyncio.create_task(_run(open_at, endpoint, entry.on_submitted), name="first replica")]
    try:
        await asyncio.wait(runners, timeout=after_s)
        if not first.done() and (second := entry.hedge()) is not None:
            runners.append(
                asyncio.create_task(_run(open_at, second.endpoint, second.on_submitted), name="second replica")
            )
        won = await _first_of(runners)
        if won is None:
            raise first.exception() or RuntimeError("No runner has won, and the first one has not failed.")
        answer, running = won.result()
        await attempt_stack.enter_async_context(running)
    finally:
        await _leave([runner for runner in runners if runner is not won])
        if second is not None:
            context.hedged = "second" if won is runners[-1] else "first"
            second.settle(won=won is runners[-1])
    return (second.endpoint if second is not None and won is runners[-1] else endpoint), answer


async def _run(open_at: Open[B], endpoint: AnyEndpoint, submitted: Callable[[], None]) -> tuple[B, AsyncExitStack]:
    async with AsyncExitStack() as stack:
        answer = await stack.enter_async_context(open_at(endpoint, submitted))
        await answer.wait_first()
        return answer, stack.pop_all()


async def _first_of(runners: list[_Runner[B]]) -> _Runner[B] | None:
    """The first that begins to answer; None: all have failed."""
    running = {*runners}
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for runner in runners:
            if runner in done and runner.exception() is None:
                return runner
    return None


async def _leave(runners: list[_Runner[B]]) -> None:
    """Ends the work of those that were not the first."""
    for runner in runners:
        runner.cancel()
    if runners:
        await asyncio.wait(runners)
    for runner in runners:
        if not runner.cancelled() and runner.exception() is None:
            await runner.result()[1].aclose()
