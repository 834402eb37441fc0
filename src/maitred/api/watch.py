"""Waiting for something beside a block of code: in practice, for a client to leave while its request is served."""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType


class Watch:
    """Runs a coroutine for as long as its block runs, in a task of its own.

    It begins with the event loop's next turn: what ends before it awaits anything, as most refusals do, is never
    watched. To begin and to end a watch takes several turns, each of which is as long as it takes to serve all the
    streams of a full server; nine of ten callers of an overloaded one would wait for nothing else.

    Args:
        waits: Made into the task; it ends by itself or is cancelled with the block.
    """

    def __init__(self, waits: Callable[[], Coroutine[None, None, None]]) -> None:
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._beginning: asyncio.Handle | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._beginning = self._loop.call_soon(self._begin)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._waits())
