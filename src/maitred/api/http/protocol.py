"""HTTP/1.1 on one connection, with bounds on the part that comes before a request is one, and on what is not read.

Body size and concurrency are the edge's business; but the edge hears of a request only when its head is complete. Until
then a client could send headers without end, or none at all and keep the connection for ever.

At the other end, a client that does not read would keep its answer. uvicorn stops taking from the answer when 64 KiB
wait to be sent, and then waits for as long as it takes. Here a clock runs while it does: when they have not gone out in
time, the connection is cut, which reaches the request as the client's leaving, wherever it is. This costs nothing as
long as clients read. A connection that is to be closed must not wait for ever for its client, either.

A client's offer to speak another protocol is ignored (RFC 9110, section 7.8): HTTP/1.1 goes on as if it had not been
made. Java's own HTTP client offers HTTP/2 with the first request of every connection without TLS, also with one that
has a body. The parser, though, ends at the head of such a request, and takes the body for the other protocol. So the
head is given to a new parser without the offer, and what follows it, too.
"""

import asyncio
import math
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from maitred.api.http.connection import EXTENSION
from maitred.api.http.fast_path import CachedHead, FastPathProtocol
from maitred.core.ids import new_request_id

HEAD_LIMIT_BYTES = 64 * 1024
"""Request line and headers; API keys, cookies and trace headers need a tenth of it."""
HEAD_DEADLINE_S = 30.0
"""From the opening of the connection, or the first byte of a later request, to the end of the headers."""

STALL_GRACE_S = 30.0
_MOST_UNSENT_BYTES = 64 * 1024
_GONE_OUT_BYTES = 16 * 1024
"""Of these: what a client must take within the grace. On the slowest connection that anybody reads by it does."""
_AT_ONCE = struct.pack("ii", 1, 0)
"""Lingering for 0 s: the connection is reset."""
_SOON_S = 0.001
"""Timers can be early by a little."""
_MOST_PIPELINED = 4
"""Requests that wait behind the running one, up to which we go on reading: who does not read, hears nobody leave."""

_UPGRADE = b"upgrade"
_NO_HTTP = "Invalid HTTP request received."

_TOO_LARGE = b'{"error":{"message":"The request\'s headers are too large.","type":"invalid_request_error","param":null,'
_TOO_LARGE += b'"code":"headers_too_large"}}'
_NOT_HTTP = b'{"error":{"message":"This is not HTTP/1.1. If it is TLS, use http:// in the address, not https://.",'
_NOT_HTTP += b'"type":"invalid_request_error","param":null,"code":"invalid_request"}}'


class HttpProtocol(FastPathProtocol):
    """A protocol which hangs up on heads that are too long or too slow, and on clients that do not read.

    Implements `maitred.api.http.connection.ServerConnection`.

    Args:
        stall_grace_s: How long what waits to be sent may take to go out.
        others: uvicorn's own.

    Attributes:
        stalled: Whether it was cut because its client did not read.
    """

    _head_bytes = 0
    _in_head = True
    _ended_another = False
    _deadline: asyncio.TimerHandle | None = None
    _patience: asyncio.TimerHandle | None = None
    _repeated: CachedHead | None = None
    """The head of the last request, if it may come again."""
    _idle_since_s = -math.inf
    lost = False
    on_lost: Callable[[], None] | None = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        stall_grace_s: float = STALL_GRACE_S,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.stalled = False
        self._stall_grace_s = stall_grace_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Limits what the transport may hold unsent, and starts the deadline of the first head."""
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(high=_MOST_UNSENT_BYTES, low=_MOST_UNSENT_BYTES - _GONE_OUT_BYTES)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers, and tells the running request that its client has left."""
        self._head_is_complete()
        self._calm()
        # uvicorn tells only the last request that has come; the one that runs is another if requests are pipelined.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.lost = True
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        # Each request knows its connection. Without its requests it is gone when they are.
        self._running = self._repeated = None
        self.cycle = self.scope = cast(Any, None)

    def data_received(self, data: bytes) -> None:
        """Takes a request with a cached head directly; feeds anything else to the parser."""
        before, repeated = self.cycle, self._repeated
        # Whether requests have come, all of each, and are answered, so that the next begins with the next byte.
        between = not self._in_head and before.response_complete and not before.more_body
        if between and repeated is not None and (body := repeated.body_in(data)) is not None:
            self._take(repeated, body)
            return
        self._ended_another = False
        self._feed(data)
        self._repeated = self._repeatable(data) if between and self.cycle is not before else None
        if self._in_head and not self._ended_another:
            # What was fed and has not completed the head belongs to it; unless an earlier request ended in it, of which
            # the most may be the body. So a pipelined head can be longer, by one read at most.
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
                self._turn_away(b"431 Request Header Fields Too Large", _TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._has_offer:
                self._read_without_offer(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning(_NO_HTTP)
            self.send_400_response(_NO_HTTP)

    @property
    def _has_offer(self) -> bool:
        """Whether the request that is read offers another protocol. ``CONNECT`` is nothing else than such a request."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _read_without_offer(self, rest: bytes) -> None:
        """Reads the request once more, without its offer, and what came after its head."""
        before = self.parser
        head = [b"%b %b HTTP/%b\r\n" % (before.get_method(), self.url, before.get_http_version().encode())]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != _UPGRADE]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._feed(b"".join(head) + b"\r\n" + rest)

    def _repeatable(self, data: bytes) -> CachedHead | None:
        """The head of a request that these bytes were, all of it and nothing else."""
        cycle = self.cycle
        if self._in_head or cycle.more_body or not cycle.keep_alive or self.parser.should_upgrade():
            return None
        return CachedHead.of(data, cast("dict[str, Any]", cycle.scope))

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP with JSON and an id, where uvicorn would send plain text."""
        self._turn_away(b"400 Bad Request", _NOT_HTTP)

    def on_message_begin(self) -> None:
        """The parser has seen the first byte of a request."""
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["extensions"] = {EXTENSION: self}
        self._await_head()

    def on_headers_complete(self) -> None:
        """The parser has seen the end of the head; the request starts."""
        if self._has_offer:
            return
        super().on_headers_complete()
        self._head_is_complete()
        self._read_on()

    def on_message_complete(self) -> None:
        """The parser has seen the end of a request; what follows is the next."""
        if self._has_offer:
            return
        super().on_message_complete()
        self._ended_another = True
        self._read_on()  # a large body has held it up

    def on_response_complete(self) -> None:
        """The last byte of an answer was handed to the transport, which may have it still."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self.linger()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._await_request(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        """Looks whether nothing was asked for a while."""
        self.timeout_keep_alive_task = None
        busy = self.cycle is not None and (self._in_head or not self.cycle.response_complete)
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if busy:
            return  # the end of its answer sets the next timer
        if left_s > _SOON_S:
            self._await_request(left_s)
            return
        super().timeout_keep_alive_handler()
        if self._unsent:
            self.transport.abort()  # nor was anything read

    def _await_request(self, patience_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(patience_s, self.timeout_keep_alive_handler)

    # --- what is not read ---

    def pause_writing(self) -> None:
        """The transport holds as much as it may."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Most of it has gone out."""
        super().resume_writing()
        self._calm()
        if self.transport.is_closing():
            self.linger()

    def linger(self) -> None:
        """Waits a little for what is still unsent, then drops it."""
        if self._unsent:
            self._wait_for_reader()

    @property
    def _unsent(self) -> bool:
        return bool(self.transport.get_write_buffer_size())

    def _wait_for_reader(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self._stall_grace_s, self._cut_connection)

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _cut_connection(self) -> None:
        self.stalled = True
        raw = self.transport.get_extra_info("socket")
        if raw is not None:
            # The kernel drops what it has as well, instead of offering it to a client that does not read.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        # Closing would wait until all is read.
        self.transport.abort()

    def _turn_away(self, status: bytes, body: bytes) -> None:
        """Answers what never became a request, and closes."""
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nx-request-id: %b\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (status, new_request_id().encode("ascii"), len(body), body)
        )
        self.transport.close()

    def _read_on(self) -> None:
        if len(self.pipeline) <= _MOST_PIPELINED:
            self.flow.resume_reading()

    def _await_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_DEADLINE_S, self._hang_up)

    def _head_is_complete(self) -> None:
        self._in_head = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _hang_up(self) -> None:
        self.transport.close()
        self.linger()
