"""Text stream of one answer: bytes of a response become batches, each within its time limit."""

import asyncio
from collections.abc import Callable
from typing import Self

from maitred.core.errors import ReplicaLost, ReplicaTooSlow
from maitred.core.text_replica import TextBatch
from maitred.replica.http.connection import Response
from maitred.replica.upstream.openai_stream import StreamParser, make_replica_lost

_DRAIN_TIMEOUT_S = 0.05
"""How long a connection is kept for the end of a body behind the end of its answer."""


class UpstreamStream:
    """Text stream of one answer of an upstream. Implements `core.text_replica.TextStream`.

    Data is parsed where it arrives, and the reader is woken only for a batch that the listener has not taken. Data that
    arrives while the reader does not wait stays in the response, and in the end the server has to wait.

    Each wait has a time limit, and nearly no wait reaches it. So no wait sets a timer of its own: one timer checks now
    and then how long the present wait has lasted, and breaks it off if that is too long.

    Args:
        response: Response whose head has been read, and announces an event stream.
        parser: Parser of the bytes.
        first_part_deadline_s: Latest time for the first part, by the event loop's clock.
        idle_timeout_s: Longest time between two pieces after that.
        deadline_s: Latest time for the whole answer.
        on_first_part: Called when the first part is there.
    """

    def __init__(
        self,
        response: Response,
        parser: StreamParser,
        *,
        first_part_deadline_s: float,
        idle_timeout_s: float,
        deadline_s: float,
        on_first_part: Callable[[], None] = lambda: None,
    ) -> None:
        self._response = response
        self._parser = parser
        self._first_part_deadline_s = first_part_deadline_s
        self._idle_timeout_s = idle_timeout_s
        self._deadline_s = deadline_s
        self._on_first_part: Callable[[], None] | None = on_first_part
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[TextBatch | None] | None = None
        """Future of the waiting reader; None: the reader is busy, or there is none."""
        self._wait_started_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the present wait; it fires no later than that wait's deadline."""
        self._on_batch: Callable[[TextBatch], bool] | None = None
        response.listen(self._on_data)

    def listen(self, on_batch: Callable[[TextBatch], bool]) -> None:
        """Offers each batch for which the reader waits to `on_batch` first. Implements `TextStream`."""
        self._on_batch = on_batch

    def close(self) -> None:
        """Closes the stream for its reader: an answer that is not complete is broken off, so that the server stops."""
        self._stop_timer()
        self._on_batch = None
        if self._parser.is_complete:
            self._response.drain(_DRAIN_TIMEOUT_S)
        else:
            self._response.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextBatch:
        batch = self._read()
        if batch is None and not self._parser.is_complete:
            batch = await self._wait()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def _wait(self) -> TextBatch | None:
        waiter = self._waiter = self._loop.create_future()
        now_s = self._wait_started_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._wait_deadline_s(now_s), self._check_timeout)
        try:
            batch: TextBatch | None = await waiter
        finally:
            self._waiter = None
        return batch

    def _on_data(self) -> None:
        """Parses data that the connection has read, and wakes the reader if the listener does not take the batch."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            batch = self._read()
            wakes_reader = self._parser.is_complete or (batch is not None and not self._push_to_listener(batch))
        except Exception as failure:  # raised in the reader
            waiter.set_exception(failure)
            return
        if wakes_reader:
            waiter.set_result(batch)
        else:
            self._wait_started_s = self._loop.time()

    def _push_to_listener(self, batch: TextBatch) -> bool:
        """Returns whether the listener has taken the batch.

        The last batch of a body goes to the reader, which finds out what the end means.
        """
        body_over = self._response.has_ended or self._response.failure is not None
        return self._on_batch is not None and not body_over and self._on_batch(batch)

    def _read(self) -> TextBatch | None:
        """Parses the data that has come; None if it is no part of the answer, or the answer is over.

        Raises:
            ReplicaLost: The answer broke off, or is not what it should be.
            MaitredError: The server reported at the beginning why there is no answer.
        """
        parser, response = self._parser, self._response
        if parser.is_complete:
            return None
        batch = parser.feed(data) if (data := response.take_body()) else None
        if batch is None and not parser.is_complete:
            if response.has_ended:
                parser.on_end()
            elif response.failure is not None:
                raise make_replica_lost(f"the connection broke ({response.failure})")
        elif self._on_first_part is not None:
            self._on_first_part()
            self._on_first_part = None
            self._stop_timer()  # the next wait may be a shorter one
        return batch

    def _wait_deadline_s(self, wait_started_s: float) -> float:
        """Returns the deadline of a wait that began at this time."""
        return (
            min(wait_started_s + self._idle_timeout_s, self._deadline_s)
            if self._parser.has_begun
            else self._first_part_deadline_s
        )

    def _check_timeout(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        deadline_s = self._wait_deadline_s(self._wait_started_s)
        if deadline_s <= self._loop.time():
            waiter.set_exception(self._make_timeout_error(deadline_s))
        else:
            self._timer = self._loop.call_at(deadline_s, self._check_timeout)

    def _make_timeout_error(self, deadline_s: float) -> ReplicaLost:
        if not self._parser.has_begun:
            return make_replica_lost("it began an answer and sent none of it in time")
        if deadline_s >= self._deadline_s:
            return make_replica_lost("it took too long in all in the middle of an answer", ReplicaTooSlow)
        return make_replica_lost("it went silent in the middle of an answer")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
