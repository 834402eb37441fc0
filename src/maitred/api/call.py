"""One HTTP request and its answer, on raw ASGI.

A framework's response classes cost more per streamed chunk than all our own work on it, and they decide too early
when the status line goes out. Here a handler sees three things: the body, one way to answer at once, and one way to
stream.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from maitred.api.account import account_headers
from maitred.api.connection import Watch, connection_of
from maitred.api.dialect import OPENAI, Dialect
from maitred.api.errors import Header, clamped_headers, headers_of
from maitred.api.headers import Headers
from maitred.api.interrupt import ClientLeft, Interruptible
from maitred.core.answer import Tally
from maitred.core.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, MaitredError
from maitred.core.ids import request_id_from
from maitred.core.tenancy import ANONYMOUS, Principal

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
_MOST_PARAMETERS = 50
"""Of a query."""
_PIECE_BYTES = 64 * 1024
"""Of a whole answer: what is handed to the connection at once, and so lies in its buffer at most."""


class Progress(Enum):
    """How far the answer is."""

    NOTHING_SENT = auto()
    STREAMING = auto()
    SENDING = auto()
    """A whole answer, of which the client has a part."""
    COMPLETE = auto()


class Call:
    """One request with its answer.

    Attributes:
        path: Decoded, without the query.
        method: Upper case.
        header: What its headers say.
        tally: What is known of this request so far.
        parameter: The part of the path that its route leaves open.
        dialect: Of the API that was called.
        body: What was read.
        status: The status that was sent; 0 before.
        answer_headers: Sent with the answer, whatever it will be.
        connection: What it goes out on.
        retries: How often the client has sent the same request before, as far as can be told.
        sent_s: When a stream last sent something, monotonic; 0 before.
        on_left: Called when the client leaves, for work that goes on without it; None: leaving ends the work.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, started_s: float) -> None:
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.parameter = ""
        self.dialect: Dialect = OPENAI
        self.body = b""
        self.status = 0
        self.answer_headers: list[Header] = []
        self.connection = connection_of(scope)
        self.retries = 0
        self.sent_s = 0.0
        self.on_left: Callable[[], None] | None = None
        self.progress = Progress.NOTHING_SENT
        self.header = Headers(scope["headers"])
        self._query: bytes = scope.get("query_string", b"")
        self._receive = receive
        self._send = send
        explain = self.header(b"x-maitred-explain")
        self._explain = explain is not None and explain.strip().lower() in ("true", "1")
        self.tally = Tally(request_id_from(self.header(b"x-request-id")), started_s)

    @property
    def principal(self) -> Principal:
        """Who calls."""
        return self.tally.principal or ANONYMOUS

    @property
    def query(self) -> list[tuple[str, str]]:
        """The parameters of the query, decoded, in their order.

        Raises:
            InvalidRequest: They are not UTF-8, or too many.
        """
        try:
            text = self._query.decode("ascii")
            return parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MOST_PARAMETERS)
        except ValueError as error:
            raise InvalidRequest(
                f"The query of this address cannot be read. Send at most {_MOST_PARAMETERS} parameters, as "
                "percent-encoded UTF-8."
            ) from error

    async def read_body(self, limit_bytes: int, timeout_s: float) -> None:
        """Reads the whole body; chunked or not, no more than the limit is ever held.

        Raises:
            BodyTooLarge: It is longer than `limit_bytes`.
            BodyTooSlow: It takes longer than `timeout_s`.
            ClientLeft: The connection closed before the body was complete.
        """
        # Most have come whole before they begin.
        body = self.connection.take_body()
        if body is None:
            try:
                async with asyncio.timeout(timeout_s):
                    body = await self._received(limit_bytes)
            except TimeoutError:
                raise BodyTooSlow from None
        elif len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        self.body = body

    async def _received(self, limit_bytes: int) -> bytes:
        announced = self.header(b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > limit_bytes:
            raise _too_large(limit_bytes)
        chunks: list[bytes] = []
        received_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunk = message.get("body", b"")
            received_bytes += len(chunk)
            if received_bytes > limit_bytes:
                raise _too_large(limit_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def watched(self, block: Interruptible) -> Watch:
        """Ends the block that makes the answer when the client leaves, unless that goes on without it."""
        return Watch(self.connection, partial(self._left, block))

    def _left(self, block: Interruptible) -> None:
        if self.progress is not Progress.COMPLETE:
            if self.on_left is None:
                block.interrupt(ClientLeft())
            else:
                self.on_left()

    async def respond(
        self, body: bytes, *, status: int = 200, content_type: bytes = JSON, headers: Sequence[Header] = ()
    ) -> None:
        """Answers at once."""
        head = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
        self.progress = Progress.SENDING
        head = self._head(status, head)
        if len(body) <= _PIECE_BYTES and self.connection.answer(status, head, body):
            self.progress = Progress.COMPLETE
            return
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        rest = memoryview(b"" if self.method == "HEAD" else body)
        while len(rest) > _PIECE_BYTES:
            await self._send({"type": "http.response.body", "body": bytes(rest[:_PIECE_BYTES]), "more_body": True})
            rest = rest[_PIECE_BYTES:]
        self.progress = Progress.COMPLETE
        await self._send({"type": "http.response.body", "body": bytes(rest)})

    async def refuse(self, error: MaitredError, headers: Sequence[Header] = ()) -> None:
        """Answers with an error; in the middle of a stream, breaks it off with an error event.

        A stream that is broken off gets no ``[DONE]``, and its last chunk is never marked as the last: the server
        closes the connection instead. So a client that looks at any of the three knows that the answer is not whole.
        """
        request_id = self.tally.request_id
        if self.progress is Progress.STREAMING:
            await self.stream(self.dialect.error_event(error, request_id))
        elif self.progress is Progress.NOTHING_SENT:
            status, body = self.dialect.error(error, request_id)
            await self.respond(body, status=status, headers=[*headers_of(error), *headers])

    async def stream(self, events: bytes) -> None:
        """Sends encoded events; the first call sends the status line before them.

        Returns when the connection's buffer has room again: a client that reads slowly holds up its own handler,
        and nobody else.
        """
        if self.progress is Progress.NOTHING_SENT:
            self.progress = Progress.STREAMING
            head = self._head(200, _EVENT_STREAM)
            if self.connection.begin(200, head, events):
                self.sent_s = time.monotonic()
                return
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
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
        """What `stream` does where it need not wait; only while it is `ready`."""
        self.connection.write(events)
        self.sent_s = time.monotonic()

    async def comment(self, comment: bytes) -> None:
        """Sends something that is no part of the answer, only to be heard of."""
        await self.stream(comment)

    async def finish(self, events: bytes = b"") -> None:
        """Ends a stream as complete."""
        events += self.dialect.done
        if self.ready:
            self.progress = Progress.COMPLETE
            self.connection.end(events)
            return
        await self.stream(events)
        self.progress = Progress.COMPLETE
        await self._send({"type": "http.response.body", "body": b""})

    def _head(self, status: int, headers: Sequence[Header]) -> list[Header]:
        self.status = status
        tally = self.tally
        return [
            *headers,
            *self.answer_headers,
            (b"x-request-id", tally.request_id.encode("ascii")),
            *self.dialect.head(tally),
            *clamped_headers(tally.clamped_max_tokens),
            *account_headers(tally, explain=self._explain),
        ]


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit_bytes:,} bytes, the most this server reads.")
