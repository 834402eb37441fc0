"""HTTP/1.1 on one connection, with limits on incomplete heads and on unread responses.

The application limits body size and concurrency; but it sees a request only when the head is complete, and of a body
only the content. So a client could send headers, chunk extensions or trailers without end, or send none and keep the
connection for ever.

Trailers are read and dropped. They are never merged into the headers (RFC 9110, section 6.5.1): a proxy that sets or
removes headers does not see them. A request must have exactly one `Host` header (RFC 9112, section 3.2): with two, the
proxy and the gateway might each believe another one.

In the other direction, a client that does not read would keep its response in memory. uvicorn stops taking response
data when 64 KiB wait to be sent, and then waits without a time limit. Here a timer runs during this wait: if the data
is not sent in time, the connection is cut, and the request is cancelled as after a disconnect of the client, whatever
it does at that time. This costs nothing as long as clients read. A connection that is to be closed also waits for its
client only for a limited time.

A client's offer to speak another protocol than WebSocket is ignored (RFC 9110, section 7.8): the connection continues
with HTTP/1.1 as if there were no offer. Java's own HTTP client offers HTTP/2 with the first request of every connection
without TLS, also when this request has a body. The parser stops after the head of such a request, and treats the body
as data of the other protocol. So the head without the offer, and the data after it, are given to a new parser. The
application sees the offer of a WebSocket among the headers, and may take the connection (`HttpProtocol.hand_over`).
"""

import asyncio
import math
import re
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.server import ServerState

from maitred.api.http.connection import EXTENSION, SuccessorProtocol, reset
from maitred.api.http.fast_path import CachedHead, FastPathProtocol
from maitred.core.ids import new_request_id
from maitred.core.parent_watch import is_exiting

HEAD_LIMIT_BYTES = 64 * 1024
"""Largest size of request line and headers; API keys, cookies and trace headers need a tenth of it. Chunk extensions
and trailers have the same limit."""
HEAD_DEADLINE_S = 30.0
"""Time from the opening of the connection, or from the first byte of a later request, to the end of the headers."""

STALL_GRACE_S = 30.0
_MOST_UNSENT_BYTES = 64 * 1024
_GONE_OUT_BYTES = 16 * 1024
"""Part of the unsent bytes that a client must receive within the grace time. Even the slowest connection in real use
achieves this."""
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group at the other end of a Unix socket."""
_SOON_S = 0.001
"""Tolerance for timers that fire slightly early."""
_MOST_PIPELINED = 4
"""Number of pipelined requests behind the running one up to which reading continues: without reading, a disconnect of
the client is not noticed."""

_UPGRADE = b"upgrade"
_WEBSOCKET = b"websocket"
_HOST = b"host"
_TRANSFER_ENCODING = b"transfer-encoding"
_NO_HTTP = "Invalid HTTP request received."
_BAD_REQUEST = b"400 Bad Request"


class InvalidHead(Exception):
    """A request head that the server refuses before there is a request, with the response to it.

    Args:
        status: Code and phrase of the status.
        code: The code of the error.
        message: What the client should change.
    """

    def __init__(self, status: bytes, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        self.body = msgspec.json.encode({"error": error})


_TOO_LARGE = b"431 Request Header Fields Too Large", "headers_too_large", "The request's headers are too large."
_TLS_RECORD = b"\x16\x03"
"""First bytes of every connection with TLS."""
_TLS = "This server speaks HTTP without TLS: use http:// in the address, not https://."
_NO_REQUEST = (
    "No request of HTTP/1.1 begins here: it has no method that this server knows. If it comes behind another request, "
    "check the Content-Length of that one."
)
_NOT_HTTP = "The request is not HTTP/1.1: {reason}. Correct its head, or the chunks of its body."
_NO_HOST = _BAD_REQUEST, "invalid_request", "The request must have exactly one Host header."
_OTHER_VERSION = b"505 HTTP Version Not Supported", "invalid_request", "This server speaks HTTP/1.1 and HTTP/1.0."
_TRANSFER_CODING = (
    b"501 Not Implemented",
    "invalid_request",
    "The only Transfer-Encoding that this server reads is chunked. Name the compression in Content-Encoding.",
)


class HttpProtocol(FastPathProtocol):
    """HTTP protocol that closes connections with too long or slow heads, or with clients that do not read.

    Implements `maitred.api.http.connection.ServerConnection`.

    Args:
        stall_grace_s: Time in which unsent data must be sent.
        knows_peer: Whether clients are processes at a Unix socket, so that the death of one is noticed.
        others: Arguments of uvicorn's protocol.

    Attributes:
        stalled: Whether the connection was cut because its client did not read.
    """

    _head_bytes = 0
    """Bytes of the current head, chunk extension or trailer."""
    _in_head = True
    _has_advanced = False
    """Whether the current read held the end of a head, a piece of a body, or the end of a request."""
    _reads_no_more = False
    """Whether received data is dropped, because the connection is closed after the answers to what came before."""
    _deadline: asyncio.TimerHandle | None = None
    _patience: asyncio.TimerHandle | None = None
    _repeated: CachedHead | None = None
    """The head of the last request, if the client may repeat it."""
    _idle_since_s = -math.inf
    lost = False
    peer_died = False
    _peer_pid = 0
    """Process at the other end of a Unix socket; 0: unknown."""
    on_lost: Callable[[], None] | None = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        stall_grace_s: float = STALL_GRACE_S,
        knows_peer: bool = False,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._knows_peer = knows_peer
        self.stalled = False
        self._stall_grace_s = stall_grace_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Limits the unsent data of the transport, and starts the deadline of the first head."""
        super().connection_made(cast(asyncio.Transport, transport))
        if self._knows_peer and (raw := self.transport.get_extra_info("socket")) is not None:
            credentials = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            self._peer_pid = _CREDENTIALS.unpack(credentials)[0]
        self.transport.set_write_buffer_limits(high=_MOST_UNSENT_BYTES, low=_MOST_UNSENT_BYTES - _GONE_OUT_BYTES)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers, and signals the disconnect to the running request."""
        self._head_is_complete()
        self._calm()
        # uvicorn signals only the request that came last; with pipelined requests, another request runs.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.lost = True
        self.peer_died = bool(self._peer_pid) and is_exiting(self._peer_pid)
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        self._drop_requests()

    def _drop_requests(self) -> None:
        """Drops the references to all requests. Each refers to its connection, which is freed together with them."""
        self._running = self._repeated = None
        self.cycle = self.scope = cast(Any, None)

    def data_received(self, data: bytes) -> None:
        """Takes a request with a cached head directly; feeds anything else to the parser."""
        before, repeated = self.cycle, self._repeated
        # This is true if all received requests are complete and answered, so the next byte begins a request.
        between = not self._in_head and before.response_complete and not before.more_body
        if between and repeated is not None and (body := repeated.body_in(data)) is not None:
            self._take(repeated, body)
            return
        if self._reads_no_more:
            return
        self._has_advanced = False
        self._feed(data)
        self._repeated = self._repeatable(data) if between and self.cycle is not before else None
        # The data belongs to the head, chunk extension or trailer that is being read, unless it holds something else;
        # then most of it may be that.
        self._head_bytes = 0 if self._has_advanced else self._head_bytes + len(data)
        if self._head_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
            self._turn_away(InvalidHead(*_TOO_LARGE))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._has_offer:
                self._read_without_offer(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, InvalidHead):
                self._turn_away(error.__context__)
                return
            self.logger.warning(_NO_HTTP)
            if isinstance(error, httptools.HttpParserInvalidMethodError):
                message = _TLS if data.startswith(_TLS_RECORD) else _NO_REQUEST
            elif error.__context__ is None:
                message = _NOT_HTTP.format(reason=error)
            else:
                message = _NOT_HTTP.format(reason="its target is neither a path nor a URL")
            self.send_400_response(message)

    @property
    def _has_offer(self) -> bool:
        """Whether the request that is being read offers another protocol. A ``CONNECT`` request always does."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _read_without_offer(self, rest: bytes) -> None:
        """Reads the request again without its offer, and the data after its head."""
        before = self.parser
        head = [b"%b %b HTTP/%b\r\n" % (before.get_method(), self.url, before.get_http_version().encode())]
        head += [b"%b: %b\r\n" % header for header in self.headers if header[0] != _UPGRADE]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        is_websocket = not rest and any(
            name == _UPGRADE and value.strip().lower() == _WEBSOCKET for name, value in self.headers
        )
        self._feed(b"".join(head) + b"\r\n" + rest)
        if is_websocket:
            self.headers.append((_UPGRADE, _WEBSOCKET))  # the scope of the request, which has not begun, has this list

    def hand_over(self, successor: SuccessorProtocol) -> bool:
        """Gives the connection to another protocol; False: more requests came, or the client has left."""
        running = self._running
        if running is None or running is not self.cycle or not running.keep_alive or self.transport.is_closing():
            return False
        if running.response_started or running.more_body or running.disconnected or self._reads_no_more:
            return False
        running.response_started = running.response_complete = True
        self._head_is_complete()
        self._calm()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        successor.app, successor.connections, successor.tasks = self.app, self.connections, self.tasks
        successor.peer_pid = self._peer_pid
        self.flow.resume_reading()
        self.transport.set_protocol(successor)
        successor.connection_made(self.transport)
        self._drop_requests()
        return True

    def _repeatable(self, data: bytes) -> CachedHead | None:
        """Returns the head of a request if these bytes were exactly this request."""
        cycle = self.cycle
        if self._in_head or cycle.more_body or not cycle.keep_alive or self.parser.should_upgrade():
            return None
        return CachedHead.of(data, cast("dict[str, Any]", cycle.scope))

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP with JSON and an id, where uvicorn would send plain text."""
        self._turn_away(InvalidHead(_BAD_REQUEST, "invalid_request", msg))

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a request."""
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["extensions"] = {EXTENSION: self}
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser at the end of a header or trailer; drops the trailers."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser at the end of the head; starts the request.

        Raises:
            InvalidHead: The head is too large, it does not have one host, or it has a version or a transfer coding that
                the server does not know.
        """
        if self._has_offer:
            return
        hosts, size = 0, len(self.url)
        for name, value in self.headers:
            hosts += name == _HOST
            size += len(name) + len(value)
            if name == _TRANSFER_ENCODING and value.strip().lower() != b"chunked":
                raise InvalidHead(*_TRANSFER_CODING)
        version = self.parser.get_http_version()
        if version != "1.1":
            if version != "1.0":
                raise InvalidHead(*_OTHER_VERSION)
            # Such a client would take the interim response for the final one (RFC 9110, section 10.1.1).
            self.expect_100_continue = False
        if hosts > 1 or (not hosts and version == "1.1"):
            raise InvalidHead(*_NO_HOST)
        if not self.url.startswith(b"/"):
            self._take_host_of_target()
        if size > HEAD_LIMIT_BYTES:
            raise InvalidHead(*_TOO_LARGE)
        super().on_headers_complete()
        self._head_is_complete()
        self._has_advanced = True
        self._read_on()

    def _take_host_of_target(self) -> None:
        """Replaces the `Host` header by the host of a target in absolute form (RFC 9112, section 3.2.2)."""
        _, is_absolute, rest = self.url.partition(b"://")
        if is_absolute:
            others = [header for header in self.headers if header[0] != _HOST]
            # The scope of the request has this same list.
            self.headers[:] = [(_HOST, re.split(rb"[/?#]", rest, maxsplit=1)[0]), *others]

    def on_body(self, body: bytes) -> None:
        """Called by the parser with a piece of the body."""
        super().on_body(body)
        self._has_advanced = True

    def on_message_complete(self) -> None:
        """Called by the parser at the end of a request; the next request follows."""
        if self._has_offer:
            return
        super().on_message_complete()
        self._has_advanced = True
        self._read_on()  # reading was paused because of a large body

    def on_response_complete(self) -> None:
        """Called when the last byte of a response was given to the transport, which may still hold it."""
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
        """Closes the connection if no request came for a while."""
        self.timeout_keep_alive_task = None
        busy = self.cycle is not None and (self._in_head or not self.cycle.response_complete)
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if busy:
            return  # the end of the running response sets the next timer
        if left_s > _SOON_S:
            self._await_request(left_s)
            return
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client has not read the data either

    def _await_request(self, patience_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(patience_s, self.timeout_keep_alive_handler)

    # --- clients that do not read ---

    def pause_writing(self) -> None:
        """Called when the transport holds as much unsent data as it may."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Called when most of the unsent data was sent."""
        super().resume_writing()
        self._calm()
        if self.transport.is_closing():
            self.linger()

    def linger(self) -> None:
        """Waits a short time for unsent data, then drops it."""
        if self.transport.get_write_buffer_size():
            self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self._stall_grace_s, self._cut_connection)

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _cut_connection(self) -> None:
        self.stalled = True
        reset(self.transport)

    def _turn_away(self, refusal: InvalidHead) -> None:
        """Answers data that did not become a request, and closes the connection.

        The client takes an answer for that of its first request without one. So earlier requests get their answers
        first, and there is none if one of them still waits, or if the request that the data belongs to has got one.
        """
        cycle, running = self.cycle, self._running
        if self._owes_answers:
            self._close_after_answers()
            return
        if self._in_head or not (running is cycle and cycle.response_started):
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nx-request-id: %b\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b"
                % (refusal.status, new_request_id().encode("ascii"), len(refusal.body), refusal.body)
            )
        self.transport.close()

    @property
    def _owes_answers(self) -> bool:
        """Whether a request that was received completely, before the data that is read now, waits for its answer."""
        running = self._running
        return running is not None and not running.response_complete and (self._in_head or running is not self.cycle)

    def _close_after_answers(self) -> None:
        """Drops what is received from now on, and closes the connection after the answers to complete requests."""
        self._reads_no_more = True
        if not self._in_head:
            self.pipeline.popleft()  # its body is broken
        self._head_is_complete()
        self.cycle = self.pipeline[0][0] if self.pipeline else cast(Any, self._running)
        self.cycle.keep_alive = False

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
        if self._owes_answers:
            self._close_after_answers()
            return
        self.transport.close()
        self.linger()
