"""An answer on its way in: bytes of a response become batches, each within its time."""

import asyncio
from collections.abc import Callable
from typing import Self

from maitred.core.errors import ReplicaLost, ReplicaTooSlow
from maitred.core.text_replica import TextBatch
from maitred.replica.http.connection import Response
from maitred.replica.upstream.openai_stream import StreamParser, broken

_REST_S = 0.05
"""How long a connection is kept for the end of a body behind the end of its answer."""


class UpstreamStream:
    """Implements `core.relay.TextStream`.

    What comes is read where it comes in, and its reader is woken for what there is to tell. Bytes that come while
    nobody waits are left where they are, and in the end the server has to wait.

    Of the waits each has an end, and nearly none of them comes to it. So no wait sets a timer: one looks
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
        response: Response,
        reader: StreamParser,
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
        self._waiter: asyncio.Future[TextBatch | None] | None = None
        """None: nobody waits, as who reads has enough to do."""
        self._waits_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Never later than the end of the wait under way."""
        self._pour: Callable[[TextBatch], bool] | None = None
        response.listen(self._come)

    def listen(self, pour: Callable[[TextBatch], bool]) -> None:
        """See `core.relay.TextStream`."""
        self._pour = pour

    def close(self) -> None:
        """Nobody reads any more: an answer that is not whole must not go on for nobody."""
        self._stop_timer()
        self._pour = None
        if self._reader.whole:
            self._response.drain(_REST_S)
        else:
            self._response.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextBatch:
        batch = self._read()
        if batch is None and not self._reader.whole:
            batch = await self._wait()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def _wait(self) -> TextBatch | None:
        waiter = self._waiter = self._loop.create_future()
        now_s = self._waits_since_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._until_s(now_s), self._check_late)
        try:
            batch: TextBatch | None = await waiter
        finally:
            self._waiter = None
        return batch

    def _come(self) -> None:
        """The connection has read something."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            batch = self._read()
            told = self._reader.whole or (batch is not None and not self._poured(batch))
        except Exception as failure:  # raised where it is read
            waiter.set_exception(failure)
            return
        if told:
            waiter.set_result(batch)
        else:
            self._waits_since_s = self._loop.time()

    def _poured(self, batch: TextBatch) -> bool:
        """Whether it has gone out. What has been read to its end is for the reader, who finds out what that means."""
        over = self._response.has_ended or self._response.failure is not None
        return self._pour is not None and not over and self._pour(batch)

    def _read(self) -> TextBatch | None:
        """What has come; None if nothing of the answer has, or it is over.

        Raises:
            ReplicaLost: It broke off, or is not what it should be.
            MaitredError: The server said at the beginning why there is none.
        """
        reader, response = self._reader, self._response
        if reader.whole:
            return None
        batch = reader.feed(data) if (data := response.take()) else None
        if batch is None and not reader.whole:
            if response.has_ended:
                reader.ended()
            elif response.failure is not None:
                raise broken(f"the connection broke ({response.failure})")
        elif self._begun is not None:
            self._begun()
            self._begun = None
            self._stop_timer()  # the next wait may be a shorter one
        return batch

    def _until_s(self, since_s: float) -> float:
        """When a wait has lasted too long."""
        return min(since_s + self._idle_s, self._total_s) if self._reader.begun else self._begin_s

    def _check_late(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        until_s = self._until_s(self._waits_since_s)
        if until_s <= self._loop.time():
            waiter.set_exception(self._late(until_s))
        else:
            self._timer = self._loop.call_at(until_s, self._check_late)

    def _late(self, until_s: float) -> ReplicaLost:
        if not self._reader.begun:
            return broken("it began an answer and sent none of it in time")
        if until_s >= self._total_s:
            return broken("it took too long in all in the middle of an answer", ReplicaTooSlow)
        return broken("it went silent in the middle of an answer")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
