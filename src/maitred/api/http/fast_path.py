"""Fast path of HTTP/1.1: whole requests and responses bypass ASGI messages; repeated heads are cached.

Most responses go to a client whose buffer has room: the bytes are
built here and given to the transport in one piece. Each fast method first checks whether this is possible. If it is not
(the client has left, does not read, uses HTTP/1.0 or sent HEAD), the method reports this and changes nothing, and
ASGI's `send` handles the case as usual. The state that uvicorn keeps for the request is updated as `send` does it, so
one response may use both ways.

**Repeated heads.** The requests of a client differ mainly in their bodies. A client that keeps a connection sends the
same path and the same headers with each request, except for the content length. The parser treats each head as new, and
reports every header by a call. So when a whole request arrives in one read, its head is cached as two parts: the bytes
before the digits of the content length, and the bytes after them. Data that begins with these two parts and ends with a
body of the given length means the same as before: the parser starts anew with every request and would see no
difference. The parser handles all other data, and every first request of a connection.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Self

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from maitred.api.dialect import Header
from maitred.api.exchange import KEPT
from maitred.api.response_head import encode_lines
from maitred.core.cohort import COHORT, CohortStage

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)\r\n", re.IGNORECASE)
_MOST_DIGITS = 9
_OTHERWISE = frozenset({b"transfer-encoding", b"expect", b"upgrade"})
"""With any of these headers, the body is more than a number of bytes after the head."""


class CachedHead:
    """Request head that the client may repeat.

    Args:
        before: The bytes before the digits of the content length.
        after: The bytes after these digits, up to the body.
        scope: The ASGI scope of the request.
        length_at: Index of the content length among the headers.
    """

    __slots__ = ("_after", "_before", "_length_at", "_scope")

    def __init__(self, before: bytes, after: bytes, scope: dict[str, Any], length_at: int) -> None:
        self._before = before
        self._after = after
        extensions = scope.get("extensions")
        self._scope = scope if extensions is None else {**scope, "extensions": {**extensions, KEPT: {}}}
        self._length_at = length_at

    @classmethod
    def of(cls, data: bytes, scope: dict[str, Any]) -> Self | None:
        """Returns the head of the request that the parser has read from exactly these bytes, if it can repeat."""
        ends = data.find(b"\r\n\r\n") + 4
        names = [name for name, _ in scope["headers"]]
        length = _LENGTH.search(data, 0, ends)
        if length is None or names.count(b"content-length") != 1 or not _OTHERWISE.isdisjoint(names):
            return None
        if ends + int(length[1]) != len(data):
            return None
        return cls(data[: length.start(1)], data[length.end(1) : ends], scope, names.index(b"content-length"))

    def body_in(self, data: bytes) -> bytes | None:
        """Returns the body of a request with this head, if the bytes are exactly one request."""
        if not data.startswith(self._before):
            return None
        begins = len(self._before)
        ends = data.find(b"\r", begins, begins + _MOST_DIGITS + 1)
        if ends < 0 or not data.startswith(self._after, ends):
            return None
        body = data[ends + len(self._after) :]
        return body if data[begins:ends] == b"%d" % len(body) else None

    def scope_for(self, body: bytes) -> Any:  # noqa: ANN401 - as uvicorn's
        """Returns the ASGI scope of a request with this body."""
        headers: Sequence[Header] = self._scope["headers"]
        length = b"%d" % len(body)
        if headers[self._length_at][1] != length:
            headers = [*headers]
            headers[self._length_at] = (b"content-length", length)
        return {**self._scope, "headers": headers, "state": self._scope["state"].copy()}


_HERE = asyncio.Event()
"""Event shared by all requests that wait for nothing: it is always set."""
_HERE.set()


class _Whole(RequestResponseCycle):
    """Cycle of a request that has arrived completely; it stores only what differs between requests.

    Args:
        protocol: The protocol that received the request.
        scope: The ASGI scope of the request.
        body: The whole body of the request.
    """

    disconnected = waiting_for_100_continue = more_body = response_started = response_complete = access_log = False
    keep_alive = True
    chunked_encoding: bool | None = None
    expected_content_length = 0
    message_event = _HERE

    def __init__(self, protocol: HttpToolsProtocol, scope: Any, body: bytes) -> None:  # noqa: ANN401 - as uvicorn's
        self.scope = scope
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.default_headers = protocol.server_state.default_headers
        self.body = bytearray(body)
        self.on_response = protocol.on_response_complete

    async def receive(self) -> Any:  # noqa: ANN401 - as uvicorn's
        """Returns the next ASGI message; after the body, the caller waits until the client disconnects."""
        if self.message_event is _HERE:
            self.message_event = asyncio.Event()
            self.message_event.set()
        return await super().receive()


class _PlainSend:
    """ASGI's `send` for a client of HTTP/1.0, which knows no chunks: a body of unknown length ends with the connection.

    uvicorn would send chunks (RFC 9112, section 6.1 forbids it). It counts the bytes of other bodies down to 0; here
    each piece is announced as it is sent.

    Args:
        send: The method `send` of uvicorn's cycle.
    """

    def __init__(self, send: Any) -> None:  # noqa: ANN401 - as ASGI's
        self._send = send
        self._cycle: RequestResponseCycle = send.__self__
        self._has_length = False

    async def __call__(self, message: Any) -> None:  # noqa: ANN401 - as ASGI's
        """Sends the head of the response, or a piece of its body."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class FastPathProtocol(HttpToolsProtocol):
    """Protocol of uvicorn with methods that bypass ASGI messages; `ServerConnection` describes them."""

    _running: RequestResponseCycle | None = None
    """The request that is being answered, or that was answered last."""

    @property
    def writable(self) -> bool:
        """Whether a send would not have to wait."""
        return not self.flow.write_paused

    @property
    def ready(self) -> bool:
        """Whether a stream has begun and can continue at once, without ASGI's `send`."""
        running = self._running
        if running is None or running.disconnected or running.response_complete or self.flow.write_paused:
            return False
        return bool(running.chunked_encoding)  # this was decided when the head was sent

    def take_body(self) -> bytes | None:
        """Returns the body of the request if it has arrived completely; else None."""
        running = self._running
        if running is None or running.more_body or running.disconnected or running.waiting_for_100_continue:
            return None
        body, running.body = bytes(running.body), bytearray()
        return body

    def answer(self, status: int, head: bytes, body: bytes) -> bool:
        """Sends a whole response, if that is possible at once; returns whether it was sent."""
        running = self._fast_cycle()
        if running is None or (usual := encode_lines(running.default_headers)) is None:
            return False
        running.response_started, running.waiting_for_100_continue = True, False
        running.chunked_encoding = False
        self.transport.write(b"%b%b%b\r\n%b" % (STATUS_LINE[status], usual, head, body))
        self._complete(running)
        return True

    def begin(self, status: int, head: bytes, piece: bytes) -> bool:
        """Sends the head and first piece of a stream if possible at once; returns whether they were sent."""
        running = self._fast_cycle()
        if running is None or (usual := encode_lines(running.default_headers)) is None:
            return False
        running.response_started, running.waiting_for_100_continue = True, False
        running.chunked_encoding = True
        whole = b"%b%b%btransfer-encoding: chunked\r\n\r\n" % (STATUS_LINE[status], usual, head)
        self.transport.write(b"%b%x\r\n%b\r\n" % (whole, len(piece), piece) if piece else whole)
        return True

    def write(self, piece: bytes) -> None:
        """Sends a piece of a stream; only while `ready`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self, piece: bytes) -> None:
        """Sends the last piece of a stream and ends it as complete; only while `ready`."""
        running = self._running
        assert running is not None, "it is ready"
        self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n")
        self._complete(running)

    def _fast_cycle(self) -> RequestResponseCycle | None:
        """Returns the request if it is unanswered, can be answered at once, and keeps its connection."""
        running = self._running
        if running is None or running.response_started or running.disconnected or not running.keep_alive:
            return None
        return None if self.flow.write_paused or running.scope["method"] == "HEAD" else running

    def _complete(self, running: RequestResponseCycle) -> None:
        running.response_complete = True
        running.message_event.set()
        if not running.keep_alive:
            self.transport.close()  # the connection was to be kept when the response began
        self.on_response_complete()

    def _take(self, head: CachedHead, body: bytes) -> None:
        """Starts a whole request with a known head: does the work of the parser's callbacks for one request."""
        self.cycle = _Whole(self, head.scope_for(body), body)
        self._start_asgi_task(self.cycle, self.app)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - as uvicorn's
        self._running = cycle
        COHORT.expect(CohortStage.COME)
        super()._start_asgi_task(cycle, self._run_request)

    def _run_request(self, scope: Any, receive: Any, send: Any) -> Any:  # noqa: ANN401 - as ASGI's
        """Starts the task of a request: records its arrival, and calls the application of this moment."""
        COHORT.arrive(CohortStage.COME)
        return self.app(scope, receive, send if scope["http_version"] == "1.1" else _PlainSend(send))
