"""Several token streams read as one.

A completions request may bring many prompts; they run side by side, and whichever has news is read next. One slow
prompt must not hold back the others' tokens. What nobody reads stays in its stream, which sees to it that it does
not grow without bound.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

from maitred.core.replica import TokenStream
from maitred.core.request import TokenDelta

Batch = tuple[int, list[TokenDelta]]
"""The number of a stream, and what came of it."""


@asynccontextmanager
async def merged(streams: Mapping[int, TokenStream]) -> AsyncIterator[AsyncIterator[Batch]]:
    """All batches of all streams, by number, as they come; ends when all have ended.

    Raises:
        ReplicaLost: From the iterator, when any of the streams broke: the rest would not be the whole answer.
    """
    if len(streams) == 1:
        # By far the most common case needs neither task nor queue.
        ((number, stream),) = streams.items()
        yield _SingleStream(number, stream)
        return
    news = _MergedStream(unfinished=len(streams))
    pumps = [asyncio.create_task(news.pump(number, stream)) for number, stream in streams.items()]
    try:
        yield news
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


class _SingleStream:
    def __init__(self, number: int, stream: TokenStream) -> None:
        self._number = number
        self._stream = aiter(stream)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        return self._number, await anext(self._stream)


class _MergedStream:
    """What the pumps bring, in order of arrival."""

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
