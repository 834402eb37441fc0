"""One answer, by the first of several models that gives one.

A model that fails before anything of its answer has been seen is followed by the next on the request's way (see
`maitred.routing.pools.route_table`); each is admitted, queued and billed as what it is. Where none gives an answer, the
caller is told of the first failure: it is that of the model that was asked for.
"""

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Self

from maitred.core.answer import PushStream, RequestContext, ResponseStream, StreamSink, TextDelta
from maitred.core.errors import DeadlineUnmeetable, MaitredError
from maitred.dispatch.dispatcher import DispatchEntry, OverflowRequested
from maitred.routing.pools.route_table import RoutePlan, RouteTarget

Serve = Callable[[RouteTarget], Awaitable[AbstractAsyncContextManager[ResponseStream]]]
"""Plans the work at one model. Entering the context begins it; leaving ends it."""


class FallbackStream(PushStream):
    """Implements `maitred.core.answer.ResponseStream`. A context; leaving it ends what is unfinished.

    Args:
        serve: Plans the work at a model.
        route_plan: The models.
        context: What is known of the request.
        whole: Whether nobody sees a part of the answer before all of it is there.

    Attributes:
        first_failure: Of the model that was asked for; None: there is none yet.
    """

    def __init__(self, serve: Serve, route_plan: RoutePlan, context: RequestContext, *, whole: bool) -> None:
        self._start_model = serve
        self._route_plan = route_plan
        self._context = context
        self._whole = whole
        self._response: AbstractAsyncContextManager[ResponseStream] | None = None
        """Of the model that is at it."""
        self._batches: AsyncIterator[list[TextDelta]] | None = None
        self._seen: AsyncIterator[list[TextDelta]] | None = None
        """Its answer, once anything of it has been seen."""
        self.first_failure: MaitredError | None = None

    async def __aenter__(self) -> Self:
        await self._start(self._route_plan.first_target())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        work, self._response = self._response, None
        if work is not None:
            await work.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[list[TextDelta]]:
        # Once it has begun nothing stands between it and its reader; for each of its tokens that would be a frame more.
        return self._first() if self._seen is None else anext(self._seen)

    def push_to(self, sink: StreamSink) -> None:
        """Pushes deltas to a sink as they come; implements `PushStream.push_to`."""
        answer: object = self._seen
        if isinstance(answer, PushStream):
            answer.push_to(sink)

    async def _first(self) -> list[TextDelta]:
        """Returns the first deltas; a model that fails before them is followed by the next."""
        while True:
            assert self._batches is not None
            try:
                parts = await anext(self._batches)
            except MaitredError as failure:
                target = self._next(failure)
                await self.__aexit__(type(failure), failure, failure.__traceback__)
                await self._start(target)
            else:
                # With a stream's first batch its head goes out, text or not.
                self._seen = self._batches if parts or not self._whole else None
                return parts

    async def _start(self, target: RouteTarget) -> None:
        """Begins at a model, or at one of those after it."""
        while True:
            self._context.arm = self._route_plan.arm_for(target)
            try:
                work = await self._start_model(target)
                self._batches = aiter(await work.__aenter__())
            except MaitredError as failure:
                target = self._next(failure)
            else:
                self._response = work
                return

    def _next(self, failure: MaitredError) -> RouteTarget:
        """Starts the model that follows a failed one; raises the first failure where none follows."""
        self.first_failure = self.first_failure or failure
        target = self._route_plan.next_target(failure)
        if target is None:
            if self.first_failure is failure:
                raise failure
            raise self.first_failure from failure
        self._context.reset_for_fallback(f"{target.reason}={target.name}")
        return target


Work = Callable[[], AbstractAsyncContextManager[ResponseStream]]
"""Takes what a request needs at a model, and waits there; leaving the context gives everything back."""


class OverflowStream:
    """Implements `maitred.core.answer.ResponseStream`. A context; leaving it ends what is unfinished.

    A waiting request can be asked to move to the model that its own model's ladder names (`overflow`). It gives up
    nothing before it has everything there: the tokenised prompt, the budget, a place in the queue. A rejection there is
    as if it had not been asked. Once it has moved it does not come back: what has been sent to a provider costs.

    Args:
        here: Where it waits first.
        elsewhere: Where it may be sent.
        context: What is known of the request; as it was, when it stays.
    """

    def __init__(self, here: Work, elsewhere: Work, context: RequestContext) -> None:
        self._here = here
        self._start_elsewhere = elsewhere
        self._context = context
        self._resources = AsyncExitStack()
        self._batches: AsyncIterator[list[TextDelta]] | None = None

    async def __aenter__(self) -> Self:
        self._batches = aiter(await self._resources.enter_async_context(self._here()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._resources.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TextDelta]:
        assert self._batches is not None
        while True:
            try:
                return await anext(self._batches)
            except OverflowRequested as asked:
                await self._overflow(asked.entry)

    async def _overflow(self, entry: DispatchEntry) -> None:
        """Leaves for elsewhere, if it is taken there and has not got its turn here meanwhile."""
        before, there = copy.copy(self._context), AsyncExitStack()
        try:
            batches = aiter(await there.enter_async_context(self._start_elsewhere()))
        except MaitredError:
            self._context.restore(before)
            entry.decline_overflow()
            return
        leaving = DeadlineUnmeetable("It waits for another model now.")
        if entry.accept_overflow():
            there, self._resources, self._batches = self._resources, there, batches
            await there.__aexit__(type(leaving), leaving, None)
        else:
            await there.__aexit__(type(leaving), leaving, None)
            self._context.restore(before)
