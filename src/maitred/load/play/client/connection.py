"""HTTP/1.1 connection of a user: sends a request and receives the timed bytes of its response."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Protocol, cast

import httptools

from maitred.load.play.clock import RunClock

_LONGEST_SIZE = 16
"""Number of bytes that are searched for the size of a chunk."""


class ConnectionFailed(Exception):
    """Connection failure: it could not be made, or ended before the response; the text says how."""


class ResponseReader(Protocol):
    """Reader of one response; `now_s` is when the bytes were read from the socket."""

    def head(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None:
        """Receives the status and the headers, with lower-case names."""
        ...

    def body(self, data: bytes, now_s: float) -> None:
        """Receives the next bytes of the body."""
        ...


class LoadConnection(asyncio.Protocol):
    """Connection that carries one request at a time, and is kept alive where the server agrees.

    Args:
        clock: Clock of the run.

    Attributes:
        reusable: Whether another request may follow: the connection is open and idle.
        used: Whether it has carried a response before.
    """

    __slots__ = (
        "_between_chunks",
        "_clock",
        "_ended",
        "_feed",
        "_head_seen",
        "_headers",
        "_parser",
        "_read_s",
        "_reader",
        "_take",
        "_transport",
        "_until_close",
        "reusable",
        "used",
    )

    def __init__(self, clock: RunClock) -> None:
        self._clock = clock
        self._read_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._reader: ResponseReader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._head_seen = False
        self._until_close = False
        self._between_chunks = False
        """Whether the parser has read to the end of a chunk and waits for the next."""
        self._take: Callable[[bytes, float], None] = _nobody
        self.reusable = False
        self.used = False

    def request(self, data: bytes, reader: ResponseReader) -> "asyncio.Future[None]":
        """Sends a request. The future ends with the response, or with `ConnectionFailed`."""
        assert self._transport is not None, "connect first"
        self.reusable = False
        self._reader, self._take = reader, reader.body
        self._head_seen = self._until_close = False
        ended = self._ended = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._fail("The server closed the connection before the request could be sent.")
        else:
            self._transport.write(data)
        return ended

    def pause(self) -> None:
        """Stops reading, so that the server's writes back up as with a stalled user."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resumes reading from the socket."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes at once; a running request gets no more bytes, and its future is cancelled."""
        self.reusable = False
        self._take = _nobody
        self._reader = None
        if self._ended is not None and not self._ended.done():
            self._ended.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- callbacks of the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Notes the transport of the new connection."""
        self._transport = cast(asyncio.Transport, transport)
        self.reusable = True

    def data_received(self, data: bytes) -> None:
        """Reads what has arrived, with its time.

        A stream nearly always arrives as one whole chunk per segment. Such a chunk is unwrapped here, and the parser,
        which waits for the next chunk, never sees it.
        """
        self._read_s = monotonic() - self._clock.zero_s
        if self._between_chunks:
            size_end = data.find(b"\r\n", 0, _LONGEST_SIZE)
            if 0 < size_end < len(data) - 4 and data.endswith(b"\r\n"):
                try:
                    whole = int(data[:size_end], 16) == len(data) - size_end - 4
                except ValueError:
                    whole = False
                if whole:
                    self._take(data[size_end + 2 : -2], self._read_s)
                    return
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._fail(f"What the server sent is not HTTP: {error}.")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the response that was being read, as complete or as broken."""
        self.reusable = False
        if self._head_seen and self._until_close and error is None:
            self._finish()
        elif self._head_seen:
            self._fail("The connection ended in the middle of the response.")
        else:
            self._fail("The server closed the connection without a response.")

    # --- callbacks of the parser ---

    def on_message_begin(self) -> None:
        """Prepares for the headers of a response."""
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Notes one header of the response; trailers are dropped."""
        if not self._head_seen:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Handles the complete head; an interim response (1xx) is ignored."""
        status = self._parser.get_status_code()
        if status < 200 or self._reader is None:
            return
        self._head_seen = True
        framed = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        self._until_close = not framed and status not in (204, 304)
        self._reader.head(status, self._headers, self._read_s)

    def on_body(self, data: bytes) -> None:
        """Receives bytes of the body without the chunk framing."""
        self._take(data, self._read_s)

    def on_chunk_header(self) -> None:
        """Notes that a chunk begins."""
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        """Notes that a chunk has ended."""
        self._between_chunks = True

    def on_message_complete(self) -> None:
        """Ends the response as complete."""
        self._between_chunks = False
        if self._head_seen:
            self.used = True
            self.reusable = self._parser.should_keep_alive()
            self._finish()

    def _finish(self) -> None:
        self._reader, self._take = None, _nobody
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, reason: str) -> None:
        self._reader, self._take = None, _nobody
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionFailed(reason))


def _nobody(data: bytes, now_s: float) -> None:
    """Ignores the result of a request that nobody waits for any more."""
