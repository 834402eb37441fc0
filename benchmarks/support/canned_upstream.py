"""An OpenAI-compatible server that costs nearly nothing: the model's name says how it answers, and answers are ready.

It is an `asyncio.Protocol` that writes bytes made beforehand, so that it is never what a gateway waits for.
`maitred.testing.scripted_openai` is the one that can do more, and costs more::

    instant   all at once: a whole answer, or a stream of as many tokens as were asked for and its usage
    paced     the first token at once and each further one `PACE_S` later, never early
    failing   status 500

Every token is the text `WORD`, which is nowhere else in an answer: whoever counts it counts tokens, however a gateway
writes its events.
"""

import asyncio
import math
from functools import cache, partial
from typing import Any, cast

import msgspec

INSTANT, PACED, FAILING = MODELS = ("instant", "paced", "failing")
WORD = b" word"
PACE_S = 0.05
WHOLE_TOKENS = 16
WINDOW_TOKENS = 1 << 20
_SLOT_S = 0.001
"""Streams whose next tokens are due within it share a timer."""
_HEAD = "HTTP/1.1 {}\r\ncontent-type: {}\r\n"
_LENGTH, _CHUNKED = b"content-length: ", b"transfer-encoding: chunked"
_LAST = b"0\r\n\r\n"


class _Asked(msgspec.Struct, frozen=True):
    """What it reads of a request."""

    model: str
    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_read = msgspec.json.Decoder(_Asked).decode


class CannedUpstream:
    """A server on a free port.

    Attributes:
        port: Where it listens.
        requests: Answered, or begun to be.
        streaming: Paced streams that are under way.
    """

    def __init__(self) -> None:
        self.port = 0
        self.requests = 0
        self.streaming = 0
        self._due: dict[int, list[_Connection]] = {}
        self._opened: set[_Connection] = set()

    async def __aenter__(self) -> "CannedUpstream":
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(partial(_Connection, self), "127.0.0.1", 0, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *fault: object) -> None:
        self._server.close()
        for connection in list(self._opened):
            connection.transport.abort()

    @property
    def connections(self) -> int:
        """That are open."""
        return len(self._opened)

    def pace(self, connection: "_Connection", due_s: float) -> None:
        """Has a connection go on with its stream at this time of the loop."""
        slot = math.ceil(due_s / _SLOT_S)
        if slot not in self._due:
            self._due[slot] = []
            self._loop.call_at(slot * _SLOT_S, self._go_on, slot)
        self._due[slot].append(connection)

    def _go_on(self, slot: int) -> None:
        for connection in self._due.pop(slot):
            connection.go_on()


class _Connection(asyncio.Protocol):
    """One that is kept; a request at a time."""

    def __init__(self, upstream: CannedUpstream) -> None:
        self._upstream = upstream
        self._buffer = b""
        self._events: tuple[bytes, ...] = ()
        self._sent = 0
        self._due_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._upstream._opened.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream._opened.discard(self)
        if self._events:
            self._events = ()
            self._upstream.streaming -= 1

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        while (head := buffer.find(b"\r\n\r\n") + 4) > 3:
            body = _body(buffer, head)
            if body is None:
                break
            content, end = body
            self._answer(buffer[:4], content)
            buffer = buffer[end:]
        self._buffer = buffer

    def go_on(self) -> None:
        """Sends the next token; the end with the last."""
        if not self._events:
            return
        self.transport.write(self._events[self._sent])
        self._sent += 1
        if self._sent < len(self._events):
            self._due_s += PACE_S
            self._upstream.pace(self, self._due_s)
        else:
            self._events = ()
            self._upstream.streaming -= 1

    def _answer(self, method: bytes, body: bytes) -> None:
        if method == b"GET ":
            self.transport.write(_MODELS)
            return
        asked = _read(body)
        self._upstream.requests += 1
        tokens = asked.max_completion_tokens or asked.max_tokens or WHOLE_TOKENS
        if asked.model == FAILING:
            self.transport.write(_FAILURE)
        elif not asked.stream:
            self.transport.write(_whole(tokens))
        elif asked.model == INSTANT:
            self.transport.write(_at_once(tokens))
        else:
            self._upstream.streaming += 1
            self._events, self._sent = paced_events(tokens), 0
            self._due_s = asyncio.get_running_loop().time()
            self.go_on()


def _body(buffer: bytes, head: int) -> tuple[bytes, int] | None:
    """A request's body and its end, once it is there."""
    fields = buffer[:head].lower()
    at = fields.find(_LENGTH)
    if at >= 0:
        end = head + int(fields[at + len(_LENGTH) : fields.index(b"\r", at)])
        return (buffer[head:end], end) if len(buffer) >= end else None
    if _CHUNKED not in fields:
        return b"", head
    body = b""
    while (line := buffer.find(b"\r\n", head)) >= 0:
        size = int(buffer[head:line], 16)
        head = line + 2 + size + 2
        if len(buffer) < head:
            return None
        if size == 0:
            return body, head
        body += buffer[line + 2 : head - 2]
    return None


def _with_length(status: str, content: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(content)
    head = _HEAD.format(status, "application/json").encode()
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 220, "completion_tokens": tokens, "total_tokens": 220 + tokens}


def _chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    return _event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def _event(fields: dict[str, Any]) -> bytes:
    head = {"id": "chatcmpl-abc123", "object": "chat.completion.chunk", "created": 1763760000, "model": INSTANT}
    return b"data: %b\n\n" % msgspec.json.encode(head | fields)


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


@cache
def paced_events(tokens: int) -> tuple[bytes, ...]:
    """A stream as it goes over the wire, cut where tokens are: the head with the first, the end with the last."""
    word = _framed(_chunk({"content": WORD.decode()}))
    first = _HEAD.format("200 OK", "text/event-stream").encode() + b"transfer-encoding: chunked\r\n\r\n"
    first += _framed(_chunk({"role": "assistant", "content": ""})) + word
    last = _chunk({}, "length") + _event({"choices": [], "usage": _usage(tokens)}) + b"data: [DONE]\n\n"
    end = _framed(last) + _LAST
    return (first + end,) if tokens == 1 else (first, *([word] * (tokens - 2)), word + end)


@cache
def _at_once(tokens: int) -> bytes:
    return b"".join(paced_events(tokens))


@cache
def _whole(tokens: int) -> bytes:
    message = {"role": "assistant", "content": WORD.decode() * tokens}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    head = {"id": "chatcmpl-abc123", "object": "chat.completion", "created": 1763760000, "model": INSTANT}
    return _with_length("200 OK", {**head, "choices": [choice], "usage": _usage(tokens)})


_FAILURE = _with_length("500 Internal Server Error", {"error": {"message": "It failed.", "type": "server_error"}})
_MODELS = _with_length(
    "200 OK",
    {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": WINDOW_TOKENS} for name in MODELS]},
)
