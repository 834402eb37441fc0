"""Text stream of one response: parses the body into batches and enforces the time limits."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from maitred.core.errors import AnswerTooLarge, ReplicaLost, ReplicaNotInTime, ReplicaStalled, ReplicaTooSlow
from maitred.core.text_replica import TextBatch
from maitred.replica.http.connection import Response
from maitred.replica.http.content_decoder import ContentBroken, make_content_decoder
from maitred.replica.upstream.errors import make_replica_lost, make_timeout_error
from maitred.replica.upstream.secret_mask import DeltaMask, SecretMask

_DRAIN_TIMEOUT_S = 0.05
"""Time to wait for the end of the HTTP body after ``[DONE]``, so that the connection can be reused."""


class StreamParser(Protocol):
    """Interface of the stream parsers of all APIs."""

    has_begun: bool
    """Whether any part of the response was received."""
    is_complete: bool
    """Whether the whole response was received."""

    def feed(self, data: bytes) -> TextBatch | None:
        """Parses data and returns a batch of new deltas; None if there are none.

        Raises:
            ReplicaLost: The response is invalid or incomplete.
            MaitredError: The stream begins with an error event; see `errors`.
        """
        ...

    def on_end(self, *, is_framed: bool) -> TextBatch | None:
        """Handles the end of the HTTP body; returns deltas that were held back until then, if there are any.

        Args:
            is_framed: Whether the framing of the body says that this is its end, not just the end of the connection.

        Raises:
            ReplicaLost: The response is incomplete.
            MaitredError: The body is an error.
        """
        ...


class UpstreamStream:
    """Text stream of one response of an upstream. Implements `core.text_replica.TextStream`.

    While the reader waits, data is parsed when it arrives, and the reader is woken only if the listener does not handle
    the batch. While the reader is busy, data stays in the buffer of the response; if that is full, the socket is not
    read (back-pressure).

    Each wait for data has a time limit that is rarely reached. So the waits share one timer: when it fires, it ends the
    current wait if its time limit is over, and else starts again.

    Args:
        response: Response whose head was read and whose body is an event stream.
        parser: Parser of the body.
        first_token_deadline_s: Deadline of the first batch, by the clock of the event loop.
        idle_timeout_s: Maximum time between two reads of data after the first batch.
        deadline_s: Deadline of the whole response, by the clock of the event loop.
        max_bytes: Most bytes of the body.
        mask: Masks the gateway's credentials in the body.
        on_first_token: Called when the first batch was parsed.
        ignored_fields: Fields of the request that the upstream was not given.
        is_passthrough: Whether the upstream was given the request as its client wrote it.
    """

    def __init__(
        self,
        response: Response,
        parser: StreamParser,
        *,
        first_token_deadline_s: float,
        idle_timeout_s: float,
        deadline_s: float,
        max_bytes: int,
        mask: SecretMask,
        on_first_token: Callable[[], None] = lambda: None,
        ignored_fields: Sequence[str] = (),
        is_passthrough: bool = False,
    ) -> None:
        self.ignored_fields = ignored_fields
        self.is_passthrough = is_passthrough
        self._response = response
        self._parser = parser
        self._first_token_deadline_s = first_token_deadline_s
        self._idle_timeout_s = idle_timeout_s
        self._deadline_s = deadline_s
        self._remaining_bytes = max_bytes
        self._mask = mask
        try:
            self._decoder = make_content_decoder(response.headers.get(b"content-encoding"))
            """Decoder of a body that is compressed, though nobody asked for that."""
        except ContentBroken as failure:
            response.close()
            raise make_replica_lost(str(failure)) from None
        self._delta_mask = DeltaMask(mask.secrets) if mask.secrets else None
        self._held_data = b""
        """End of the data that may begin a credential."""
        self._on_first_token: Callable[[], None] | None = on_first_token
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[TextBatch | None] | None = None
        """Future on which the reader waits; None: no reader is waiting."""
        self._wait_start_s = 0.0
        self._timeout_timer: asyncio.TimerHandle | None = None
        """Timer that checks the time limit; it fires no later than the deadline of the current wait."""
        self._on_batch: Callable[[TextBatch], bool] | None = None
        response.listen(self._on_data)

    def listen(self, on_batch: Callable[[TextBatch], bool]) -> None:
        """Sets a callback that gets each batch first; if it returns False, the reader gets the batch.

        Implements `TextStream`.
        """
        self._on_batch = on_batch

    def close(self) -> None:
        """Closes the stream; if the response is incomplete, closes the connection so that the server stops."""
        self._stop_timer()
        self._on_batch = None
        if self._parser.is_complete:
            self._response.drain(_DRAIN_TIMEOUT_S)
        else:
            self._response.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextBatch:
        batch = self._parse_received()
        if batch is None and not self._parser.is_complete:
            batch = await self._wait()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def _wait(self) -> TextBatch | None:
        waiter = self._waiter = self._loop.create_future()
        now_s = self._wait_start_s = self._loop.time()
        if self._timeout_timer is None:
            self._timeout_timer = self._loop.call_at(self._wait_deadline_s(now_s), self._check_timeout)
        try:
            batch: TextBatch | None = await waiter
        finally:
            self._waiter = None
        return batch

    def _on_data(self) -> None:
        """Parses received data, and wakes the reader if the listener does not handle the batch."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            batch = self._parse_received()
            must_wake_reader = self._parser.is_complete or (batch is not None and not self._offer_to_listener(batch))
        except Exception as failure:  # the reader raises it
            waiter.set_exception(failure)
            return
        if must_wake_reader:
            waiter.set_result(batch)
        else:
            self._wait_start_s = self._loop.time()

    def _offer_to_listener(self, batch: TextBatch) -> bool:
        """Passes the batch to the listener, and returns whether the listener has handled it.

        The last batch goes to the reader instead, because the reader handles the end of the body.
        """
        body_over = self._response.has_ended or self._response.failure is not None
        return self._on_batch is not None and not body_over and self._on_batch(batch)

    def _parse_received(self) -> TextBatch | None:
        """Parses the received data; returns None if it has no batch, or if the response is complete.

        Raises:
            ReplicaLost: The response is incomplete or invalid.
            MaitredError: The stream begins with an error event.
        """
        parser, response = self._parser, self._response
        if parser.is_complete:
            return None
        batch, data = None, response.take_body()
        body_over = response.has_ended or response.failure is not None
        if data or (self._held_data and body_over):
            if self._decoder is not None:
                try:
                    data = self._decoder.decode(data, self._remaining_bytes)
                except ContentBroken as failure:
                    raise make_replica_lost(str(failure)) from None
            self._remaining_bytes -= len(data)
            if self._remaining_bytes < 0:
                raise make_replica_lost("its answer has more bytes than answers may have", AnswerTooLarge)
            data, self._held_data = self._mask.split(self._held_data + data, body_over=body_over)
            batch = parser.feed(data)
            if batch is not None and self._delta_mask is not None and self._delta_mask.is_concerned(batch):
                batch = self._delta_mask.apply(batch)
        if batch is None and not parser.is_complete:
            if response.has_ended:
                batch = parser.on_end(is_framed=response.is_framed)
                if batch is not None and self._delta_mask is not None:
                    batch = self._delta_mask.apply(batch)
            elif response.failure is not None:
                raise make_replica_lost(f"the connection broke ({response.failure})")
        if self._on_first_token is not None and (batch is not None or parser.is_complete):
            self._on_first_token()
            self._on_first_token = None
            self._stop_timer()  # the next wait may have an earlier deadline
        return batch

    def _wait_deadline_s(self, wait_started_s: float) -> float:
        """Returns the deadline of a wait that started at this time."""
        return (
            min(wait_started_s + self._idle_timeout_s, self._deadline_s)
            if self._parser.has_begun
            else self._first_token_deadline_s
        )

    def _check_timeout(self) -> None:
        self._timeout_timer = None
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        deadline_s = self._wait_deadline_s(self._wait_start_s)
        if deadline_s <= self._loop.time():
            waiter.set_exception(self._make_timeout_error(deadline_s))
        else:
            self._timeout_timer = self._loop.call_at(deadline_s, self._check_timeout)

    def _make_timeout_error(self, deadline_s: float) -> ReplicaLost | ReplicaNotInTime:
        if not self._parser.has_begun:
            return make_timeout_error("it began an answer and sent none of it in time")
        if deadline_s >= self._deadline_s:
            return make_replica_lost("it took too long in all in the middle of an answer", ReplicaTooSlow)
        return make_replica_lost("it went silent in the middle of an answer", ReplicaStalled)

    def _stop_timer(self) -> None:
        if self._timeout_timer is not None:
            self._timeout_timer.cancel()
            self._timeout_timer = None
