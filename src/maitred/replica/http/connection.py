"""Connection to a server, and the response to the request that it carries.

Everything that one read of the socket brings is parsed at once and announced once: to the task that waits for the
response, or to the function that was given to `Response.listen`. So a response that arrives in one piece wakes its
reader once.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from maitred.core.cohort import COHORT, CohortStage

MAX_HEAD_BYTES = 64 * 1024
_MAX_BUFFERED_BYTES = 256 * 1024
"""Unread bytes of a body above which the connection stops reading, so that the server has to wait."""


class ResponseBroken(Exception):
    """Error of a response that ended before it was complete.

    Attributes:
        nothing_received: Whether not a byte of it has come.
    """

    def __init__(self, reason: str, *, nothing_received: bool = False) -> None:
        super().__init__(reason)
        self.nothing_received = nothing_received


class Response:
    """Response of a server to one request.

    Attributes:
        status: HTTP status; 0 until the head is there.
        headers: Headers by their names in lower case; of a header that comes twice, the last value.
        has_ended: Whether the body is there to its end.
        failure: Reason why nothing more of it comes; None: nothing is wrong.
        chunks: Bytes of the body that have come and have not been taken.
        on_data: Called when everything that one read has brought is noted.
    """

    __slots__ = (
        "_connection",
        "_waiter",
        "_woken",
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
        self._woken = False
        """Whether the waiting task has been woken and has not run since."""
        self.on_data: Callable[[], None] = self._wake

    def listen(self, on_data: Callable[[], None]) -> None:
        """Calls `on_data` for everything that comes from now on, instead of waking a waiting task."""
        self.on_data = on_data

    def take_body(self) -> bytes:
        """Returns the bytes of the body that have come, and removes them from the response."""
        chunks = self.chunks
        if not chunks:
            return b""
        self.chunks = []
        if not self.has_ended:
            self._connection.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def wait_head(self, deadline_s: float | None = None) -> None:
        """Waits for the head; the connection is closed if the head does not come or the wait is cancelled.

        Args:
            deadline_s: Latest time for the head, by the event loop's clock.

        Raises:
            ResponseBroken: The connection ended before the head.
            TimeoutError: The head has not come in time.
        """
        timer = None
        try:
            while not self.status:
                if self.failure is not None:
                    raise self.failure
                if timer is None and deadline_s is not None:
                    timer = asyncio.get_running_loop().call_at(deadline_s, self._on_timeout)
                await self._wait_data()
        except BaseException:
            self.close()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def read(self) -> bytes:
        """Returns the next bytes of the body; none at its end.

        Raises:
            ResponseBroken: The body broke off.
        """
        while True:
            if data := self.take_body():
                return data
            if self.failure is not None:
                raise self.failure
            if self.has_ended:
                return b""
            await self._wait_data()

    async def read_body(self, max_bytes: int) -> bytes:
        """Reads the body, or the beginning of a longer one; see `read` for what it raises."""
        chunks: list[bytes] = []
        size = 0
        while size < max_bytes and (chunk := await self.read()):
            chunks.append(chunk)
            size += len(chunk)
        return b"".join(chunks)[:max_bytes]

    def close(self) -> None:
        """Closes the connection unless the response is complete, which tells the server to stop."""
        self.on_data = _ignore_data  # who has heard it refers to it, and would have to be found by Python's collector
        if not self.has_ended:
            self._connection.close()

    def drain(self, timeout_s: float) -> None:
        """Drops the rest of the body; the connection can serve again if the rest comes within `timeout_s`."""
        self.on_data = _ignore_data
        if not self.has_ended:
            self._connection.drain(timeout_s)

    async def _wait_data(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._woken:
                self._woken = False
                COHORT.arrive(CohortStage.ANSWERED)

    def _on_timeout(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
            self._woken = True
            COHORT.expect(CohortStage.ANSWERED)


def _ignore_data() -> None:
    """Ignores data that nothing reads any more."""


class HttpConnection(asyncio.Protocol):
    """One HTTP/1.1 connection to a server.

    Args:
        on_idle: Called when the connection can take the next request.
        on_close: Called when the connection is closed.

    Attributes:
        is_open: Whether it can be written to.
    """

    def __init__(
        self, on_idle: "Callable[[HttpConnection], None]", on_close: "Callable[[HttpConnection], None]"
    ) -> None:
        self.is_open = False
        self._on_idle = on_idle
        self._on_close = on_close
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._message_complete = False
        """Whether the response that is being parsed has come to its end."""
        self._keep_alive = False
        """Whether the connection can serve again after this response."""
        self._has_extra_data = False
        """Whether data came behind the end of the response."""
        self._buffered_bytes = 0
        self._paused = False
        self._discard_body = False
        """Whether the rest of the body is dropped."""
        self._drain_timer: asyncio.TimerHandle | None = None

    def send(self, request: bytes) -> Response:
        """Sends a request on an idle connection and returns its response."""
        self._message_complete = False
        self._head_bytes = 0
        response = self._response = Response(self)
        self._transport.write(request)
        return response

    def close(self) -> None:
        """Closes the connection at once; data that has not been sent is dropped."""
        self.is_open = False
        self._response = None
        self._cancel_drain_timer()
        self._transport.abort()

    def resume_reading(self) -> None:
        """Resumes reading from the socket after the buffered body was taken."""
        self._buffered_bytes = 0
        if self._paused and self.is_open:
            self._paused = False
            self._transport.resume_reading()

    def drain(self, timeout_s: float) -> None:
        """Drops the rest of the body, and closes the connection if the rest takes longer than `timeout_s`."""
        self._discard_body = True
        self.resume_reading()
        self._drain_timer = asyncio.get_running_loop().call_later(timeout_s, self.close)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Notes the transport. Implements `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports inherit from no class of asyncio
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Parses what the socket has brought and announces it once. Implements `asyncio.Protocol`."""
        response = self._response
        if response is None:
            self.close()  # data without a request; mostly the server says that it is about to close
            return
        if awaiting_head := not response.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._message_complete:
                self._fail(f"it sent what is no HTTP ({type(error).__name__})")
                return
            self._has_extra_data = True
        if awaiting_head and self._head_bytes > MAX_HEAD_BYTES and self._is_head_too_long(response):
            response.status = 0
            self._fail(f"the head of its response is longer than {MAX_HEAD_BYTES} bytes")
            return
        if self._message_complete:
            self._on_complete(response)
        elif self._buffered_bytes > _MAX_BUFFERED_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        response.on_data()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends or fails the response, if there is one. Implements `asyncio.Protocol`."""
        self.is_open = False
        self._cancel_drain_timer()
        self._on_close(self)
        response = self._response
        if response is not None:
            if error is None and response.status and self._ends_at_eof(response):
                self._response, response.has_ended = None, True
                response.on_data()
            else:
                reason = "it closed the connection" if error is None else type(error).__name__
                self._fail(reason)
        del self._parser  # it holds the methods of this object

    # --- httptools ---

    def on_message_begin(self) -> None:
        """Starts a message: the response, an interim one before it, or data that was not asked for."""
        self._has_extra_data = self._message_complete
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Notes a header, or a trailer, which is not used."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Hands the complete head to the response, unless it is an interim one."""
        status = self._parser.get_status_code()
        if status >= 200 and not self._message_complete and self._response is not None:
            self._response.status, self._response.headers = status, self._headers

    def on_body(self, body: bytes) -> None:
        """Adds a piece of the body to the response."""
        response = self._response
        if response is not None and not (self._message_complete or self._discard_body):
            response.chunks.append(body)
            self._buffered_bytes += len(body)

    def on_message_complete(self) -> None:
        """Notes the end of the response; the end of an interim one changes nothing."""
        if self._response is not None and self._response.status and not self._message_complete:
            self._message_complete = True
            self._keep_alive = self._parser.should_keep_alive()  # after this call the parser has forgotten it

    # --- end of a response ---

    def _on_complete(self, response: Response) -> None:
        """Ends a complete response, and makes the connection idle or closes it."""
        self._response, response.has_ended, self._discard_body = None, True, False
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
        """Returns whether the head is too long; bytes that came with the end of a head may belong to the body."""
        size = sum(len(name) + len(value) for name, value in response.headers.items())
        return not response.status or size > MAX_HEAD_BYTES

    @staticmethod
    def _ends_at_eof(response: Response) -> bool:
        """Returns whether only the end of the connection marks the end of the body."""
        return b"content-length" not in response.headers and b"transfer-encoding" not in response.headers
