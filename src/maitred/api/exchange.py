"""One HTTP request with its parsed head, and its answer, on raw ASGI.

A framework's response classes cost more per streamed chunk than all our own work on it, and they decide too early
when the status line goes out. Here a handler sees three things: the body, one way to answer at once, and one way to
stream.

A client repeats its head with each request of a connection (see `maitred.api.http.fast_path`). What follows from it
alone, or from it and the configuration, is kept with it: which route it leads to, who has proved to be its sender, what
its headers ask for.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from enum import Enum, auto
from typing import Any, Self
from urllib.parse import parse_qsl

from maitred.api.dialect import OPENAI, ApiDialect, Header, error_headers
from maitred.api.headers import Headers, retries_in
from maitred.api.http.connection import EXTENSION, PlainAsgiConnection, ServerConnection
from maitred.api.in_flight import CancelScope, ClientDisconnected
from maitred.api.response_head import encode_lines, response_head_lines, response_headers
from maitred.api.routes import Route, RouteTable
from maitred.core.context import RequestContext
from maitred.core.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, MaitredError
from maitred.core.ids import id_like, new_object_id, request_id_from
from maitred.core.tenancy import ANONYMOUS, Principal

KEPT = "maitred.kept"
"""The key under a scope's `extensions` of what is kept with its head; where there is none, its head is not repeated."""
_PARSED_HEAD = "parsed head"
_NONE: Mapping[str, Any] = {}


class ParsedHead:
    """Head of a request with what follows from it alone.

    Args:
        header: Its headers. Of a head that is repeated, the length of the body is that of the first request.

    Attributes:
        explain: Whether the answer is to tell what the request waited for.
        offered_id: What the client calls the request.
        repeat_key: What it calls it and its repeats; None: it does not repeat it, or leaves it open.
        retries: How often it says to have sent it before.
        route: Where it leads by a table, with the part of the path that the route leaves open; None: nobody has looked.
        principal: Who its credential was found to be of; None: nobody has looked. Whether that still holds has to be
            asked (see `Authenticator.is_still_valid`).
    """

    __slots__ = ("explain", "header", "offered_id", "principal", "repeat_key", "retries", "route")

    def __init__(self, header: Headers) -> None:
        self.header = header
        explain = header(b"x-maitred-explain")
        self.explain = explain is not None and explain.strip().lower() in ("true", "1")
        self.offered_id = header(b"x-request-id")
        self.repeat_key = header(b"idempotency-key")
        self.retries = retries_in(header)
        self.route: tuple[RouteTable, Route, str] | None = None
        self.principal: Principal | None = None


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = b"application/json"
_EVENT_STREAM: Sequence[Header] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx and its kin would otherwise collect the stream and pass it on in lumps.
    (b"x-accel-buffering", b"no"),
)
_STREAM = b"".join(map(b"%b: %b\r\n".__mod__, _EVENT_STREAM))
_WHOLE = b"content-type: %b\r\ncontent-length: %d\r\n"
"""The lines that are an answer's own."""
_MOST_PARAMETERS = 50
"""Of a query."""
_PIECE_BYTES = 64 * 1024
"""Of a whole answer: what is handed to the connection at once, and so lies in its buffer at most."""


class ResponseState(Enum):
    """How far the answer is."""

    NOTHING_SENT = auto()
    STREAMING = auto()
    SENDING = auto()
    """A whole answer, of which the client has a part."""
    COMPLETE = auto()


class HttpExchange:
    """One request with its answer.

    Attributes:
        path: Decoded, without the query.
        method: Upper case.
        parsed_head: What its head says...
        header: ...and the headers in it.
        context: What is known of this request so far.
        parameter: The part of the path that its route leaves open.
        dialect: Of the API that was called.
        body: What was read.
        status: The status that was sent; 0 before.
        answer_headers: Sent with the answer, whatever it will be.
        connection: What it goes out on.
        retries: How often the client has sent the same request before, as far as can be told.
        sent_s: When a stream last sent something, monotonic; 0 before.
        on_disconnect: Called when the client leaves, for work that goes on without it; None: leaving ends the work.
    """

    parameter = ""
    dialect: ApiDialect = OPENAI
    body = b""
    status = 0
    retries = 0
    sent_s = 0.0
    on_disconnect: Callable[[], None] | None = None
    state = ResponseState.NOTHING_SENT
    _watching: CancelScope
    """What ends when the client leaves."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, started_s: float) -> None:
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.answer_headers: list[Header] = []
        extensions = scope.get("extensions") or _NONE
        self.connection: ServerConnection = extensions.get(EXTENSION) or PlainAsgiConnection()
        kept: dict[str, ParsedHead] = extensions.get(KEPT, {})
        if (head := kept.get(_PARSED_HEAD)) is None:
            head = kept[_PARSED_HEAD] = ParsedHead(Headers(scope["headers"]))
        self.parsed_head = head
        self.header = head.header
        self._scope = scope
        self._receive = receive
        self._send = send
        offered = head.offered_id
        request_id = request_id_from(offered)
        self._ours = request_id is not offered
        self.context = RequestContext(request_id, started_s)

    def id_for(self, kind: str) -> str:
        """An id for the one thing of a kind that this request makes.

        It has the digits of the request's own, so that who has the one finds the other; unless the client has chosen
        that, and may have chosen the same for others.
        """
        return id_like(kind, self.context.request_id) if self._ours else new_object_id(kind)

    @property
    def principal(self) -> Principal:
        """Principal that sent the request."""
        return self.context.principal or ANONYMOUS

    @property
    def query(self) -> list[tuple[str, str]]:
        """The parameters of the query, decoded, in their order.

        Raises:
            InvalidRequest: They are not UTF-8, or too many.
        """
        try:
            text = self._scope.get("query_string", b"").decode("ascii")
            return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MOST_PARAMETERS)
        except ValueError as error:
            raise InvalidRequest(
                f"The query of this address cannot be read. Send at most {_MOST_PARAMETERS} parameters, as "
                "percent-encoded UTF-8."
            ) from error

    def has_body(self, limit_bytes: int) -> bool:
        """Takes the body, if all of it is here already, as nearly always; otherwise it is to be read.

        Raises:
            BodyTooLarge: It is longer than `limit_bytes`.
        """
        body = self.connection.take_body()
        if body is None:
            return False
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        self.body = body
        return True

    async def read_body(self, limit_bytes: int, timeout_s: float) -> None:
        """Reads the whole body; chunked or not, no more than the limit is ever held.

        Raises:
            BodyTooLarge: It is longer than `limit_bytes`.
            BodyTooSlow: It takes longer than `timeout_s`.
            ClientDisconnected: The connection closed before the body was complete.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self.body = await self._receive_body(limit_bytes)
        except TimeoutError:
            raise BodyTooSlow from None

    async def _receive_body(self, limit_bytes: int) -> bytes:
        announced = self.header(b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > limit_bytes:
            raise _too_large(limit_bytes)
        chunks: list[bytes] = []
        received_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk = message.get("body", b"")
            received_bytes += len(chunk)
            if received_bytes > limit_bytes:
                raise _too_large(limit_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def cancel_on_disconnect(self, block: CancelScope) -> Self:
        """A context: it ends the block that makes the answer when the client leaves, unless that goes on without it."""
        self._watching = block
        return self

    def __enter__(self) -> None:
        self.connection.on_lost = self._on_disconnect
        if self.connection.lost:
            self._on_disconnect()

    def __exit__(self, *_: object) -> None:
        if self.connection.on_lost == self._on_disconnect:  # the next request on it may have begun
            self.connection.on_lost = None

    def _on_disconnect(self) -> None:
        if self.state is not ResponseState.COMPLETE:
            if self.on_disconnect is None:
                self._watching.cancel(ClientDisconnected())
            else:
                self.on_disconnect()

    async def respond(
        self, body: bytes, *, status: int = 200, content_type: bytes = JSON, headers: Sequence[Header] = ()
    ) -> None:
        """Sends a whole response at once."""
        further = [*headers, *self.answer_headers]
        self.state, self.status = ResponseState.SENDING, status
        head = self._head(_WHOLE % (content_type, len(body)), further) if len(body) <= _PIECE_BYTES else None
        if head is not None and self.connection.answer(status, head, body):
            self.state = ResponseState.COMPLETE
            return
        own = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *further]
        await self._send({"type": "http.response.start", "status": status, "headers": self._headers(own)})
        rest = memoryview(b"" if self.method == "HEAD" else body)
        while len(rest) > _PIECE_BYTES:
            await self._send({"type": "http.response.body", "body": bytes(rest[:_PIECE_BYTES]), "more_body": True})
            rest = rest[_PIECE_BYTES:]
        self.state = ResponseState.COMPLETE
        await self._send({"type": "http.response.body", "body": bytes(rest)})

    async def send_error(self, error: MaitredError, headers: Sequence[Header] = ()) -> None:
        """Answers with an error; in the middle of a stream, breaks it off with an error event.

        A stream that is broken off gets no ``[DONE]``, and its last chunk is never marked as the last: the server
        closes the connection instead. So a client that looks at any of the three knows that the answer is not whole.
        """
        request_id = self.context.request_id
        if self.state is ResponseState.STREAMING:
            await self.stream(self.dialect.error_event(error, request_id))
        elif self.state is ResponseState.NOTHING_SENT:
            status, body = self.dialect.error(error, request_id)
            await self.respond(body, status=status, headers=[*error_headers(error), *headers])

    async def stream(self, events: bytes) -> None:
        """Sends encoded events; the first call sends the status line before them.

        Returns when the connection's buffer has room again: a client that reads slowly holds up its own handler,
        and nobody else.
        """
        if self.state is ResponseState.NOTHING_SENT:
            self.state, self.status = ResponseState.STREAMING, 200
            head = self._head(_STREAM, self.answer_headers)
            if head is not None and self.connection.begin(200, head, events):
                self.sent_s = time.monotonic()
                return
            own = [*_EVENT_STREAM, *self.answer_headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers(own)})
        if self.ready and events:
            self.write(events)
            return
        if events:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self.sent_s = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether a stream can `write`."""
        return self.connection.ready

    def write(self, events: bytes) -> None:
        """Writes events without waiting; only while the exchange is `ready`."""
        self.connection.write(events)
        self.sent_s = time.monotonic()

    async def send_comment(self, comment: bytes) -> None:
        """Sends something that is no part of the answer, only to be heard of."""
        await self.stream(comment)

    async def finish(self, events: bytes = b"") -> None:
        """Ends a stream as complete."""
        events += self.dialect.done
        if self.ready:
            self.state = ResponseState.COMPLETE
            self.connection.end(events)
            return
        await self.stream(events)
        self.state = ResponseState.COMPLETE
        await self._send({"type": "http.response.body", "body": b""})

    def _head(self, own: bytes, further: Sequence[Header]) -> bytes | None:
        """The headers of an answer as lines, its own first; None where they are to go by ASGI's `send`."""
        common = response_head_lines(self.context, self.dialect, explain=self.parsed_head.explain)
        lines = encode_lines(further) if further else b""
        return None if common is None or lines is None else own + lines + common

    def _headers(self, own: Sequence[Header]) -> list[Header]:
        """Returns the headers of an answer one by one."""
        return [*own, *response_headers(self.context, self.dialect, explain=self.parsed_head.explain)]


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit_bytes:,} bytes, the most this server reads.")
