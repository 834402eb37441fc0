"""An answer that may be made elsewhere as long as it waits here.

A request that waits can be asked to leave for the model that its own model's ladder names (`overflow`). It gives up
nothing before it has everything there: the reading, the budget, a place in the queue. What is refused there is as if
nobody had asked. Once it has left it does not come back: what has been sent to a provider costs.
"""

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Self

from maitred.core.answer import RequestContext, ResponseStream, TextDelta
from maitred.core.errors import DeadlineUnmeetable, MaitredError
from maitred.dispatch.seat import DispatchEntry, OverflowRequested

Work = Callable[[], AbstractAsyncContextManager[ResponseStream]]
"""Takes what a request needs at a model, and waits there; leaving the context gives everything back."""


class OverflowStream:
    """Implements `maitred.core.answer.ResponseStream`. A context; leaving it ends what is unfinished.

    Args:
        here: Where it waits first.
        elsewhere: Where it may be sent.
        tally: What is known of the request; as it was, when it stays.
    """

    def __init__(self, here: Work, elsewhere: Work, tally: RequestContext) -> None:
        self._here = here
        self._elsewhere = elsewhere
        self._tally = tally
        self._running = AsyncExitStack()
        self._batches: AsyncIterator[list[TextDelta]] | None = None

    async def __aenter__(self) -> Self:
        self._batches = aiter(await self._running.enter_async_context(self._here()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TextDelta]:
        assert self._batches is not None
        while True:
            try:
                return await anext(self._batches)
            except OverflowRequested as asked:
                await self._move(asked.seat)

    async def _move(self, seat: DispatchEntry) -> None:
        """Leaves for elsewhere, if it is taken there and has not got its turn here meanwhile."""
        before, there = copy.copy(self._tally), AsyncExitStack()
        try:
            batches = aiter(await there.enter_async_context(self._elsewhere()))
        except MaitredError:
            self._tally.go_back(before)
            seat.stay()
            return
        leaving = DeadlineUnmeetable("It waits for another model now.")
        if seat.move():
            there, self._running, self._batches = self._running, there, batches
            await there.__aexit__(type(leaving), leaving, None)
        else:
            await there.__aexit__(type(leaving), leaving, None)
            self._tally.go_back(before)
