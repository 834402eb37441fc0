"""An answer on its way in: bytes of a response become batches, each within its time."""

import asyncio
from collections.abc import Callable
from typing import Self

import aiohttp

from maitred.core.errors import ReplicaTooSlow
from maitred.core.relay import Batch
from maitred.replica.upstream.answer import Reader, broken

_REST_S = 0.05


class UpstreamStream:
    """Implements `core.relay.TextStream`.

    Args:
        response: Its head has been read, and announces a stream of events.
        reader: Makes parts of the bytes.
        begin_s: When the first part must be there, by the event loop's clock.
        idle_s: Longest time between two pieces after that.
        total_s: When all of it must be there.
        begun: Called when the first part is there.
    """

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        reader: Reader,
        *,
        begin_s: float,
        idle_s: float,
        total_s: float,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._response = response
        self._reader = reader
        self._begin_s = begin_s
        self._idle_s = idle_s
        self._total_s = total_s
        self._begun: Callable[[], None] | None = begun

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        reader = self._reader
        while not reader.whole:
            data = await self._read()
            if not data:
                reader.ended()
                break
            if (batch := reader.feed(data)) is not None:
                if self._begun is not None:
                    self._begun()
                    self._begun = None
                return batch
        await self._rest()
        raise StopAsyncIteration

    async def _read(self) -> bytes:
        """The next bytes; none at the end of the body."""
        begun = self._reader.begun
        now_s = asyncio.get_running_loop().time()
        until_s = min(now_s + self._idle_s, self._total_s) if begun else self._begin_s
        try:
            async with asyncio.timeout_at(until_s):
                return await self._response.content.readany()
        except TimeoutError:
            if not begun:
                raise broken("it began an answer and sent none of it in time") from None
            if until_s >= self._total_s:
                raise broken("it took too long in all in the middle of an answer", ReplicaTooSlow) from None
            raise broken("it went silent in the middle of an answer") from None
        except (aiohttp.ClientError, OSError) as error:
            raise broken(f"the connection broke ({type(error).__name__})") from None

    async def _rest(self) -> None:
        """Reads the end of the body behind the end of the answer, so that the connection can serve again."""
        try:
            async with asyncio.timeout(_REST_S):
                while await self._response.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # closed, then; the answer was whole
