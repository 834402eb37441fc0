"""One HTTP exchange: a request with its parsed head and its response, on raw ASGI.

A framework's response classes cost more per streamed chunk than all of the gateway's own work on it, and they decide
too early when the status line is sent. Here a handler has three things: the body, one method that sends a whole
response, and one that streams.

A client repeats its request head on a connection (see `maitred.api.http.fast_path`). Facts that follow from the head
alone, or from the head and the configuration, are cached with the head: its route, the authenticated sender, and the
values of its headers.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from enum import Enum, auto
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl

from maitred.api.compression import read_coding
from maitred.api.dialect import OPENAI, ApiDialect, Header, error_headers
from maitred.api.headers import Headers, retries_in
from maitred.api.http.connection import EXTENSION, PlainAsgiConnection, ServerConnection, SuccessorProtocol
from maitred.api.in_flight import CancelScope, ClientDisconnected
from maitred.api.large_body import LargeBody, LargeBodyReader
from maitred.api.response_head import encode_lines, response_head_lines, response_headers
from maitred.api.routes import Route, RouteTable
from maitred.core.context import RequestContext
from maitred.core.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, MaitredError, ReplicaLost
from maitred.core.ids import id_like, new_object_id, request_id_from
from maitred.core.tenancy import ANONYMOUS, Principal

T = TypeVar("T")

KEPT = "maitred.kept"
"""Key under a scope's `extensions` for the data that is cached with the request head; it is missing if the head is not
repeated."""
_PARSED_HEAD = "parsed head"
_NONE: Mapping[str, Any] = {}
_PEER_DIED = "The process that passed this request on has ended."


class ParsedHead:
    """Request head, with the facts that follow from it alone.

    Args:
        header: The headers. In a repeated head, the content length is still that of the first request.

    Attributes:
        content_encoding: Values of the `Content-Encoding` headers; None: the header is missing.
        explain: Whether the response is to tell what the request waited for.
        is_checked: Whether the `OriginPolicy` was asked about it, and accepted it.
        offered_id: The request id that the client chose.
        origin: Origin of the web page that sent the request; None: no browser says that a page did.
        repeat_key: Value of the `Idempotency-Key` header; None: the header is missing.
        retries: How many retries the client says it has made.
        route: The route and its path parameter, together with the route table that found them; None: they were not
            looked up yet.
        principal: The principal that the credential belonged to; None: it was not looked up yet. Ask
            `Authenticator.is_still_valid` whether this still holds.
    """

    __slots__ = (
        "content_encoding",
        "explain",
        "header",
        "is_checked",
        "offered_id",
        "origin",
        "principal",
        "repeat_key",
        "retries",
        "route",
    )

    def __init__(self, header: Headers) -> None:
        self.header = header
        explain = header(b"x-maitred-explain")
        self.explain = explain is not None and explain.strip().lower() in ("true", "1")
        coding = header(b"content-encoding")
        self.content_encoding = None if coding is None else header.all_of(b"content-encoding")
        self.is_checked = False
        self.offered_id = header(b"x-request-id")
        self.origin = header(b"origin")
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
    # Without this header, nginx and similar proxies would collect the stream and pass it on in large pieces.
    (b"x-accel-buffering", b"no"),
)
_STREAM = b"".join(map(b"%b: %b\r\n".__mod__, _EVENT_STREAM))
_WHOLE = b"content-type: %b\r\ncontent-length: %d\r\n"
"""The two header lines that only a whole response has."""
_MOST_PARAMETERS = 50
"""Largest number of parameters in a query."""
_PIECE_BYTES = 64 * 1024
"""Largest piece of a whole response: it is given to the connection at once, so the connection's buffer holds at most
this."""


class ResponseState(Enum):
    """State of the response: what has been sent."""

    NOTHING_SENT = auto()
    STREAMING = auto()
    SENDING = auto()
    """A whole response of which a part has been sent."""
    COMPLETE = auto()


class HttpExchange:
    """One request with its response.

    Attributes:
        path: The path, decoded, without the query.
        scope: The request as the server gave it.
        method: The method in upper case.
        parsed_head: What its head says...
        header: ...and the headers in it.
        context: The request context.
        parameter: The value of the path parameter.
        dialect: The dialect of the API that was called.
        body: The body that was read.
        large_body: The same body if it must be decoded beside the event loop; None: it is small.
        status: The status that was sent; 0 before it is sent.
        answer_headers: Additional headers of the response, for every kind of response.
        connection: The connection that the response is sent on.
        retries: How often the client has sent the same request before, as far as this is known.
        sent_s: When a stream last sent something, in monotonic seconds; 0 before that.
        stream_type: Content type of a stream; None: it is one of events.
        error_events: Writes the last events of a stream that an error has ended; None: the dialect writes one.
        late_headers: Returns further headers of the response when it is sent, by its status, or 0 for a stream; None:
            there are none.
        on_disconnect: Called when the client disconnects, for work that continues without a client; None: the
            disconnect cancels the work.
    """

    parameter = ""
    dialect: ApiDialect = OPENAI
    body = b""
    status = 0
    large_body: LargeBody | None = None
    retries = 0
    sent_s = 0.0
    on_disconnect: Callable[[], None] | None = None
    error_events: Callable[[MaitredError], bytes] | None = None
    late_headers: Callable[["HttpExchange", int], Sequence[Header]] | None = None
    stream_type: bytes | None = None
    state = ResponseState.NOTHING_SENT
    _watching: CancelScope
    """The scope that is cancelled when the client disconnects."""

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
        self.scope = scope
        self._receive = receive
        self._send = send
        offered = head.offered_id
        request_id = request_id_from(offered)
        self._ours = request_id is not offered
        self.context = RequestContext(request_id, started_s)

    def id_for(self, kind: str) -> str:
        """Returns an id for the one object of this kind that the request makes.

        The id has the digits of the request id, so that each can be found from the other; if the client chose the
        request id, the digits are new, because the client may use the same id again.
        """
        return id_like(kind, self.context.request_id) if self._ours else new_object_id(kind)

    @property
    def principal(self) -> Principal:
        """Principal that sent the request."""
        return self.context.principal or ANONYMOUS

    @property
    def query(self) -> list[tuple[str, str]]:
        """Returns the parameters of the query, decoded and in order.

        Raises:
            InvalidRequest: The parameters are not UTF-8, or there are too many.
        """
        try:
            text = self.scope.get("query_string", b"").decode("ascii")
            return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MOST_PARAMETERS)
        except ValueError as error:
            raise InvalidRequest(
                f"The query of this address cannot be read. Send at most {_MOST_PARAMETERS} parameters, as "
                "percent-encoded UTF-8."
            ) from error

    def has_body(self, limit_bytes: int) -> bool:
        """Takes the body if it has arrived completely, which is the usual case; otherwise use `read_body`.

        Raises:
            BodyTooLarge: The body is longer than `limit_bytes`.
        """
        body = self.connection.take_body()
        if body is None:
            return False
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        self.body = body
        return True

    async def decompress_body(self, limit_bytes: int, reader: LargeBodyReader, least_output: int | None) -> bool:
        """Takes the coding off the body that was read; returns whether the caller's limits were checked for it.

        Args:
            limit_bytes: Largest size of the body without its coding.
            reader: Decompresses a large body.
            least_output: See `LargeBodyReader.check`.

        Raises:
            LimitReached: The body is large, and the caller's limits have no room for any request.
            BodyTooLarge: The body is longer than `limit_bytes`.
            InvalidRequest: The body does not have the coding that its head names.
            UnsupportedBody: The server does not know the coding.
        """
        coding = read_coding(self.parsed_head.content_encoding)
        if coding is None:
            return False
        self.body, is_checked = await reader.decompress(self.body, coding, limit_bytes, self.context, least_output)
        return is_checked

    async def decode(self, decode: Callable[..., T], **options: Any) -> T:  # noqa: ANN401 - those of `decode`
        """Returns what `decode` makes of the body and the options: a large body beside the event loop, others at once.

        Raises:
            LimitReached: The body is large, and the caller's limits have no room for any request.
            InvalidRequest: The body has too many strings or values, or `decode` raises it.
        """
        if self.large_body is not None:
            return await self.large_body.decode(decode, **options)
        return decode(self.body, **options)

    async def read_body(self, limit_bytes: int, timeout_s: float) -> None:
        """Reads the whole body, chunked or not, and never holds more than the limit.

        Raises:
            BodyTooLarge: The body is longer than `limit_bytes`.
            BodyTooSlow: Reading takes longer than `timeout_s`.
            ClientDisconnected: The connection closed before the body was complete.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self.body = await self._receive_body(limit_bytes)
        except TimeoutError:
            raise BodyTooSlow from None

    async def body_pieces(self) -> AsyncIterator[bytes]:
        """Yields the body as it comes, for handlers that keep it elsewhere.

        Raises:
            ClientDisconnected: The connection closed before the body was complete.
        """
        if (body := self.connection.take_body()) is not None:
            yield body
            return
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            if chunk := message.get("body", b""):
                yield chunk
            if not message.get("more_body", False):
                return

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
        """Returns a context that cancels the block on a disconnect, unless `on_disconnect` is set."""
        self._watching = block
        return self

    def __enter__(self) -> None:
        self.connection.on_lost = self._on_disconnect
        if self.connection.lost:
            self._on_disconnect()

    def __exit__(self, *_: object) -> None:
        if self.connection.on_lost == self._on_disconnect:  # the next request on this connection may have begun
            self.connection.on_lost = None

    def leave_connection(self) -> None:
        """Leaves an open connection to its next requests if the response is complete; the work may go on."""
        if self.state is ResponseState.COMPLETE and not self.connection.lost:
            self.__exit__()
            self.connection = PlainAsgiConnection()

    def _on_disconnect(self) -> None:
        if self.state is not ResponseState.COMPLETE:
            if self.on_disconnect is None:
                # A client that leaves pays for what it got; what the death of one of our processes breaks off is free.
                died = self.connection.peer_died
                self._watching.cancel(ReplicaLost(_PEER_DIED) if died else ClientDisconnected())
            else:
                self.on_disconnect()

    async def respond(
        self, body: bytes, *, status: int = 200, content_type: bytes = JSON, headers: Sequence[Header] = ()
    ) -> None:
        """Sends a whole response in one call."""
        further = [*headers, *self.answer_headers]
        if self.late_headers is not None:
            further += self.late_headers(self, status)
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

    def switch_protocol(self, successor: SuccessorProtocol, headers: Sequence[Header]) -> None:
        """Gives the connection to another protocol, after a response with status 101 and these headers.

        Raises:
            InvalidRequest: The client has sent more than the request, or its connection ends with the response.
        """
        lines = encode_lines(self._headers([*headers, *self.answer_headers]))
        if lines is None or not self.connection.hand_over(successor):
            raise InvalidRequest("Send a handshake alone, by HTTP/1.1, and wait for the answer to it.")
        self.state, self.status = ResponseState.COMPLETE, 101
        successor.transport.write(b"HTTP/1.1 101 Switching Protocols\r\n%b\r\n" % lines)

    async def send_error(self, error: MaitredError, headers: Sequence[Header] = ()) -> None:
        """Answers with an error; a stream that has begun is ended with an error event.

        A stream that ends with an error gets no ``[DONE]``, and its last chunk is not marked as the last one: the
        server closes the connection instead. So the client can see from any of these three signs that the answer is
        incomplete.
        """
        request_id = self.context.request_id
        if self.state is ResponseState.STREAMING:
            events = self.error_events
            await self.stream(self.dialect.error_event(error, request_id) if events is None else events(error))
        elif self.state is ResponseState.NOTHING_SENT:
            status, body = self.dialect.error(error, request_id)
            await self.respond(body, status=status, headers=[*error_headers(error), *headers])

    async def stream(self, events: bytes) -> None:
        """Sends encoded events; the first call sends the status line before them.

        The call returns when the connection's buffer has room again: a slow client delays only its own handler.
        """
        if self.state is ResponseState.NOTHING_SENT:
            if self.late_headers is not None:
                self.answer_headers += self.late_headers(self, 0)
            self.state, self.status = ResponseState.STREAMING, 200
            stream_headers = _EVENT_STREAM
            if self.stream_type is not None:
                stream_headers = [(b"content-type", self.stream_type), *_EVENT_STREAM[1:]]
            own_lines = _STREAM if stream_headers is _EVENT_STREAM else encode_lines(stream_headers)
            head = None if own_lines is None else self._head(own_lines, self.answer_headers)
            if head is not None and self.connection.begin(200, head, events):
                self.sent_s = time.monotonic()
                return
            own = [*stream_headers, *self.answer_headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers(own)})
        if self.ready and events:
            self.write(events)
            return
        if events:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self.sent_s = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether the exchange can `write` to its stream without waiting."""
        return self.connection.ready

    def write(self, events: bytes) -> None:
        """Writes events without waiting; call it only while the exchange is `ready`."""
        self.connection.write(events)
        self.sent_s = time.monotonic()

    async def send_comment(self, comment: bytes) -> None:
        """Sends a comment, which is not part of the answer, to keep the connection alive."""
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
        """Returns the response's header lines, its own lines first; None: ASGI's `send` must send them."""
        common = response_head_lines(self.context, self.dialect, explain=self.parsed_head.explain)
        lines = encode_lines(further) if further else b""
        return None if common is None or lines is None else own + lines + common

    def _headers(self, own: Sequence[Header]) -> list[Header]:
        """Returns the headers of an answer one by one."""
        return [*own, *response_headers(self.context, self.dialect, explain=self.parsed_head.explain)]


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit_bytes:,} bytes, the most this server reads.")
