"""An answer on its way in: bytes of a response become batches, each within its time."""

import asyncio
from collections.abc import Callable
from typing import Self

import aiohttp

from maitred.core.errors import ReplicaLost, ReplicaTooSlow
from maitred.core.relay import Batch
from maitred.replica.upstream.answer import Reader, broken

_REST_S = 0.05


class UpstreamStream:
    """Implements `core.relay.TextStream`.

    Of the waits for its bytes each has an end, and nearly none of them comes to it. So no wait sets a timer: one looks
    now and then at how long the wait under way has lasted, and breaks it off if that is too long.

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
        self._loop = asyncio.get_running_loop()
        self._waits_since_s: float | None = None
        """None: nobody waits, as who reads has enough to do."""
        self._timer: asyncio.TimerHandle | None = None
        """Never later than the end of the wait under way."""

    def close(self) -> None:
        """Nobody reads any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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
                    self.close()  # the next wait may be a shorter one
                return batch
        await self._rest()
        raise StopAsyncIteration

    async def _read(self) -> bytes:
        """The next bytes; none at the end of the body."""
        now_s = self._waits_since_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._until_s(now_s), self._look)
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise broken(f"the connection broke ({type(error).__name__})") from None
        finally:
            self._waits_since_s = None

    def _until_s(self, since_s: float) -> float:
        """When a wait has lasted too long."""
        return min(since_s + self._idle_s, self._total_s) if self._reader.begun else self._begin_s

    def _look(self) -> None:
        self._timer = None
        if self._waits_since_s is None:
            return
        until_s = self._until_s(self._waits_since_s)
        if until_s <= self._loop.time():
            self._response.content.set_exception(self._late(until_s))
        else:
            self._timer = self._loop.call_at(until_s, self._look)

    def _late(self, until_s: float) -> ReplicaLost:
        if not self._reader.begun:
            return broken("it began an answer and sent none of it in time")
        if until_s >= self._total_s:
            return broken("it took too long in all in the middle of an answer", ReplicaTooSlow)
        return broken("it went silent in the middle of an answer")

    async def _rest(self) -> None:
        """Reads the end of the body behind the end of the answer, so that the connection can serve again."""
        try:
            async with asyncio.timeout(_REST_S):
                while await self._response.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # closed, then; the answer was whole
