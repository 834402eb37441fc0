"""HTTP/1.1 connection to a server, and the response to its current request.

The data of one socket read is parsed completely, followed by one notification: of the task that waits for the response,
or of the callback given to `Response.listen`. So a response that arrives in one piece wakes the reading task once.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import cast

import httptools

from maitred.core.cohort import COHORT, CohortStage
from maitred.replica.http.content_decoder import ContentBroken, make_content_decoder

MAX_HEAD_BYTES = 64 * 1024
"""Largest size of a response's head; a chunk extension and the trailers have the same limit."""
_MAX_BUFFERED_BYTES = 256 * 1024
"""Number of unread body bytes above which reading from the socket pauses (back-pressure)."""


class ResponseBroken(Exception):
    """The connection ended or failed before the response was complete.

    Attributes:
        nothing_received: Whether not one byte of the response was received.
    """

    def __init__(self, reason: str, *, nothing_received: bool = False) -> None:
        super().__init__(reason)
        self.nothing_received = nothing_received


class Response:
    """Response of a server to one request.

    Attributes:
        status: HTTP status; 0 until the head is complete.
        headers: Headers by lower-case name; of a repeated header, the last value.
        has_ended: Whether the whole body was received.
        failure: Error that ended the response; None: there is none.
        chunks: Received body data that was not yet read.
        on_data: Called after the data of one socket read was parsed.
    """

    __slots__ = (
        "_connection",
        "_is_woken",
        "_waiter",
        "chunks",
        "failure",
        "has_ended",
        "headers",
        "on_data",
        "status",
    )

    def __init__(self, connection: "HttpConnection") -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.has_ended = False
        self.failure: ResponseBroken | None = None
        self._connection = connection
        self.chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_woken = False
        """Whether the waiting task was woken but has not run yet."""
        self.on_data: Callable[[], None] = self._wake

    def listen(self, on_data: Callable[[], None]) -> None:
        """Sets a callback that is called when data has arrived, instead of waking the waiting task."""
        self.on_data = on_data

    def take_body(self) -> bytes:
        """Returns the received body data and removes it from the response; does not wait."""
        chunks = self.chunks
        if not chunks:
            return b""
        self.chunks = []
        if not self.has_ended:
            self._connection.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @property
    def is_framed(self) -> bool:
        """Whether the response says where its body ends, so that the end of the connection does not."""
        return b"content-length" in self.headers or b"transfer-encoding" in self.headers

    async def wait_head(self, deadline_s: float | None = None) -> None:
        """Waits for the response head; closes the connection if that fails or is cancelled.

        Args:
            deadline_s: Deadline of the head, by the clock of the event loop; None: there is none.

        Raises:
            ResponseBroken: The connection ended before the head.
            TimeoutError: The head was not received by the deadline.
        """
        timer = None
        try:
            while not self.status:
                if self.failure is not None:
                    raise self.failure
                if timer is None and deadline_s is not None:
                    timer = asyncio.get_running_loop().call_at(deadline_s, self._on_timeout)
                await self._wait_for_data()
        except BaseException:
            self.close()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def read(self) -> bytes:
        """Waits for body data and returns it; empty bytes at the end of the body.

        Raises:
            ResponseBroken: The connection ended before the end of the body.
        """
        while True:
            if data := self.take_body():
                return data
            if self.failure is not None:
                raise self.failure
            if self.has_ended:
                return b""
            await self._wait_for_data()

    async def read_body(self, max_bytes: int) -> bytes:
        """Reads the body without its coding, up to `max_bytes`.

        Raises:
            ResponseBroken: The connection ended before the end of the body, or the body does not have its coding.
        """
        chunks: list[bytes] = []
        size = 0
        try:
            decoder = make_content_decoder(self.headers.get(b"content-encoding"))
            while size < max_bytes and (chunk := await self.read()):
                chunks.append(chunk if decoder is None else decoder.decode(chunk, max_bytes - size))
                size += len(chunks[-1])
        except ContentBroken as failure:
            raise ResponseBroken(str(failure)) from None
        return b"".join(chunks)[:max_bytes]

    def close(self) -> None:
        """Closes the connection if the response is incomplete; the server then cancels the request."""
        # Breaks the reference cycle with the callback's owner, so that the garbage collector is not needed
        self.on_data = _ignore_data
        if not self.has_ended:
            self._connection.close()

    def drain(self, timeout_s: float) -> None:
        """Drops the rest of the body; the connection is reused if the rest arrives within `timeout_s`."""
        self.on_data = _ignore_data
        if not self.has_ended:
            self._connection.drain(timeout_s)

    async def _wait_for_data(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._is_woken:
                self._is_woken = False
                COHORT.arrive(CohortStage.ANSWERED)

    def _on_timeout(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
            self._is_woken = True
            COHORT.expect(CohortStage.ANSWERED)


def _ignore_data() -> None:
    """Ignores data of a response that was closed."""


class HttpConnection(asyncio.Protocol):
    """One HTTP/1.1 connection to a server.

    Args:
        on_idle: Called when the connection is ready for the next request.
        on_close: Called when the connection is closed.

    Attributes:
        is_open: Whether the connection is established and not closed.
    """

    def __init__(
        self, on_idle: "Callable[[HttpConnection], None]", on_close: "Callable[[HttpConnection], None]"
    ) -> None:
        self.is_open = False
        self._on_idle = on_idle
        self._on_close = on_close
        self._transport: asyncio.Transport
        self._body_parts: list[bytes] = []
        """Parts of the body in the data that is parsed now."""
        self.on_body = self._body_parts.append
        """Callback of the parser. A list's own method: a whole answer may come in hundreds of parts."""
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._framing_bytes = 0
        """Bytes after the head that were no part of a body, since the last part of the body."""
        self._message_complete = False
        """Whether the parser has reached the end of the response."""
        self._complete_parts = 0
        """Number of body parts before that end, in the data that has it."""
        self._keep_alive = False
        """Whether the connection can be reused after this response."""
        self._has_extra_data = False
        """Whether data followed the end of the response."""
        self._buffered_bytes = 0
        self._is_reading_paused = False
        self._is_draining = False
        """Whether `drain` was called, so that body data is dropped."""
        self._drain_timer: asyncio.TimerHandle | None = None
        self._write_waiter: asyncio.Future[None] | None = None
        """Waiter of `write_body` while the server does not read; None: it does, or nobody waits."""
        self._is_writing_paused = False

    def send(self, request: bytes) -> Response:
        """Sends a request on an idle connection and returns its response, without waiting for the head."""
        self._message_complete = False
        self._head_bytes = self._framing_bytes = 0
        response = self._response = Response(self)
        self._transport.write(request)
        return response

    async def write_body(self, pieces: Iterator[bytes]) -> None:
        """Writes the body of the request whose head was sent last, as fast as the server reads it.

        It ends early when the server answers before it has read all, or the connection is lost. Such a connection is
        not used again: its request says ``connection: close``.
        """
        response = self._response
        for piece in pieces:
            if response is None or response.status or response.failure is not None or not self.is_open:
                return
            self._transport.write(piece)
            if self._is_writing_paused:
                self._write_waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._write_waiter
                finally:
                    self._write_waiter = None
            else:
                await asyncio.sleep(0)  # other requests have their turn between two pieces

    def pause_writing(self) -> None:
        """Notes that the server reads slower than is written. Implements `asyncio.Protocol`."""
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        """Lets `write_body` go on. Implements `asyncio.Protocol`."""
        self._is_writing_paused = False
        self._wake_writer()

    def _wake_writer(self) -> None:
        if self._write_waiter is not None and not self._write_waiter.done():
            self._write_waiter.set_result(None)

    def close(self) -> None:
        """Closes the connection at once; data that has not been sent is dropped."""
        self.is_open = False
        self._response = None
        self._cancel_drain_timer()
        self._transport.abort()

    def resume_reading(self) -> None:
        """Resumes reading from the socket after the buffered body was taken."""
        self._buffered_bytes = 0
        if self._is_reading_paused and self.is_open:
            self._is_reading_paused = False
            self._transport.resume_reading()

    def drain(self, timeout_s: float) -> None:
        """Drops the rest of the body, and closes the connection if the rest takes longer than `timeout_s`."""
        self._is_draining = True
        self.resume_reading()
        self._drain_timer = asyncio.get_running_loop().call_later(timeout_s, self.close)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport. Implements `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports inherit from no class of asyncio
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Parses the data and notifies the response once. Implements `asyncio.Protocol`."""
        response = self._response
        if response is None:
            self.close()  # data without a request, mostly a 408 of a server that is about to close
            return
        if is_head_pending := not response.status:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)  # a part of the body sets it to 0
        broken = ""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = type(error).__name__
        if self._body_parts:
            self._keep_body(response, len(data))
        if broken:
            if not self._message_complete:
                self._fail(f"it sent what is no HTTP ({broken})")
                return
            self._has_extra_data = True
        if is_head_pending and self._head_bytes > MAX_HEAD_BYTES and self._is_head_too_long(response):
            response.status = 0
            self._fail(f"the head of its response is longer than {MAX_HEAD_BYTES} bytes")
            return
        if self._framing_bytes > MAX_HEAD_BYTES and not self._message_complete:
            self._fail(f"a chunk extension or the trailers of its response are longer than {MAX_HEAD_BYTES} bytes")
            return
        if self._message_complete:
            self._on_complete(response)
        elif self._buffered_bytes > _MAX_BUFFERED_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()
        self._wake_writer()
        response.on_data()

    def connection_lost(self, error: Exception | None) -> None:
        """Completes or fails the current response. Implements `asyncio.Protocol`."""
        self.is_open = False
        self._wake_writer()
        self._cancel_drain_timer()
        self._on_close(self)
        response = self._response
        if response is not None:
            if error is None and response.status and not response.is_framed:
                self._response, response.has_ended = None, True
                response.on_data()
            else:
                reason = "it closed the connection" if error is None else type(error).__name__
                self._fail(reason)
        del self._parser  # breaks a reference cycle: the parser holds bound methods of this object

    # --- httptools ---

    def on_message_begin(self) -> None:
        """Starts a message: the response, an interim (1xx) response, or unexpected data after the response."""
        self._has_extra_data = self._message_complete
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stores a header of the response's head; trailers are dropped (RFC 9110, section 6.5.1)."""
        if self._response is not None and not self._response.status:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Sets status and headers of the response, unless this is an interim (1xx) response."""
        status = self._parser.get_status_code()
        if status >= 200 and not self._message_complete and self._response is not None:
            self._response.status, self._response.headers = status, self._headers

    def on_message_complete(self) -> None:
        """Marks the response as complete; ignores the end of an interim (1xx) response."""
        if self._response is not None and self._response.status and not self._message_complete:
            self._message_complete = True
            self._complete_parts = len(self._body_parts)
            self._keep_alive = self._parser.should_keep_alive()  # the parser resets it after this callback

    # --- body and end of a response ---

    def _keep_body(self, response: Response, size: int) -> None:
        """Adds the parts of the body to the response, without those of a message behind it.

        Args:
            response: The response.
            size: Bytes of the data in which they came.
        """
        self._framing_bytes = 0
        if self._message_complete:
            del self._body_parts[self._complete_parts :]
        if not self._is_draining:
            response.chunks += self._body_parts
            self._buffered_bytes += size
        self._body_parts.clear()

    def _on_complete(self, response: Response) -> None:
        """Finishes a complete response, and makes the connection idle or closes it."""
        self._response, response.has_ended, self._is_draining = None, True, False
        self._cancel_drain_timer()
        if self._has_extra_data or not (self.is_open and self._keep_alive):
            self.close()
        else:
            self.resume_reading()
            self._on_idle(self)

    def _fail(self, reason: str) -> None:
        response = self._response
        if self.is_open:
            self.close()
        self._response = None
        if response is not None:
            response.failure = ResponseBroken(reason, nothing_received=not self._head_bytes)
            response.on_data()

    def _cancel_drain_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    @staticmethod
    def _is_head_too_long(response: Response) -> bool:
        """Returns whether the head is too long, not counting body bytes that arrived in the same read."""
        size = sum(len(name) + len(value) for name, value in response.headers.items())
        return not response.status or size > MAX_HEAD_BYTES
