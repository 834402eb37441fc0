"""A lean client: sends one request, reads its answer to the end or leaves before, and says what became of it.

It knows a whole answer from a cut one, which is what accounts are held against: an answer is whole when its finish
reason, its usage and, of a stream, ``[DONE]`` have come.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from maitred.load.play.client.connection import ConnectionFailed, LoadConnection
from maitred.load.play.client.origin import Origin
from maitred.load.play.client.pool import ConnectionPool
from maitred.load.play.clock import RunClock
from maitred.wire.sse import SSESplitter

CONNECT_S = 5.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class _Error(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    text: str = ""
    delta: _Delta | None = None
    message: _Delta | None = None

    @property
    def words(self) -> str:
        """Its text, in whichever shape it came."""
        part = self.delta or self.message
        return self.text or (part.content if part is not None else "") or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode


def _do_nothing() -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class Call:
    """One request.

    Attributes:
        leaves_after_s: The client hangs up so long after it has sent it.
        headers: Besides those that every request has.
    """

    request_id: str
    key: str
    body: Mapping[str, object]
    path: str = COMPLETIONS
    leaves_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Reply:
    """What became of it. Times are seconds by the client's clock; NaN: it did not come to that.

    Attributes:
        status: 0 if no response came.
        headers: Of the response, names in lower case.
        code: Of an error, also one in the middle of a stream.
        message: Of the same.
        should_retry: What ``x-should-retry`` says.
        text: Of all that came.
        done: A stream's ``[DONE]`` has come.
        whole: The answer came to its end.
        left: The client has hung up.
        refused_connection: Nobody listened, so nothing was sent.
        sent_s: When the request was sent.
        ended_s: When nothing more came, or the client left.
        arrivals_s: When each piece of a stream's text came.
    """

    request_id: str
    status: int = 0
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    code: str = ""
    message: str = ""
    should_retry: bytes = b""
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    done: bool = False
    whole: bool = False
    left: bool = False
    refused_connection: bool = False
    sent_s: float = float("nan")
    ended_s: float = float("nan")
    arrivals_s: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def seconds(self) -> float:
        """From its sending to its end."""
        return self.ended_s - self.sent_s


class Client:
    """Calls one gateway. Nothing is sent twice: a request may have been served although its connection broke.

    Args:
        url: Where it listens.
        patience_s: Whoever names no time leaves after this; nothing may take so long.
        clock: Of all times in replies; clients that are compared share one.

    Attributes:
        when_done: Called the moment the last event of a stream is read.
    """

    def __init__(self, url: str, *, patience_s: float, clock: RunClock | None = None) -> None:
        self.when_done: Callable[[], None] = _do_nothing
        self.clock = clock or RunClock()
        origin = Origin.parse(url)
        self._origin = origin
        self._pool = ConnectionPool(origin, (origin.host, origin.port), connect_timeout_s=CONNECT_S, clock=self.clock)
        self._patience_s = patience_s

    async def ask(self, call: Call) -> Reply:
        """Sends a request once. Whoever cancels this hangs up."""
        reply = Reply(call.request_id)
        await self.ask_into(call, reply)
        return reply

    async def ask_into(self, call: Call, reply: Reply) -> None:
        """The same for a reply that can be looked at meanwhile."""
        body = msgspec.json.encode(call.body)
        headers = {
            "Authorization": f"Bearer {call.key}",
            "X-Request-Id": call.request_id,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **call.headers,
        }
        data = self._origin.head("POST", call.path, headers) + b"\r\n" + body
        reply.sent_s = self.clock.now_s()
        try:
            await self._send(data, reply, call.leaves_after_s or self._patience_s)
        finally:
            reply.ended_s = self.clock.now_s()

    def close(self) -> None:
        """Closes what is idle."""
        self._pool.close()

    async def _send(self, data: bytes, reply: Reply, leaves_after_s: float) -> None:
        reader = _Reader(reply, self)
        connection: LoadConnection | None = None
        try:
            connection = await self._pool.take()
            async with asyncio.timeout(leaves_after_s):
                await connection.request(data, reader)
            reader.end()
        except ConnectionFailed as failure:
            reply.refused_connection = connection is None
            reply.code = reply.code or "connection"
            reply.message = reply.message or str(failure)
        except TimeoutError:
            reply.left = True
        finally:
            if connection is not None:
                self._pool.release(connection)


class _Reader:
    """Takes the response apart; see `maitred.load.play.client.connection.ResponseReader`."""

    def __init__(self, reply: Reply, client: Client) -> None:
        self._reply = reply
        self._client = client
        self._cutter: SSESplitter | None = None
        self._body = bytearray()
        self._finished = self._done = False

    def head(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None:
        self._reply.status = status
        self._reply.headers = headers
        self._reply.should_retry = headers.get(b"x-should-retry", b"")
        if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._cutter = SSESplitter()

    def body(self, data: bytes, now_s: float) -> None:
        if self._cutter is None:
            self._body += data
            return
        for event in self._cutter.feed(data):
            if event == b"[DONE]":
                self._done = self._reply.done = True
                self._client.when_done()
            elif self._take(event):
                self._reply.arrivals_s.append(now_s)

    def end(self) -> None:
        """The response has come to its end."""
        if self._cutter is None:
            self._take(bytes(self._body))
            self._done = True
        reply = self._reply
        reply.whole = reply.status == 200 and self._done and self._finished and not reply.code

    def _take(self, data: bytes) -> bool:
        """Whether there is text in it."""
        chunk = _chunk(data)
        self._finished |= any(choice.finish_reason for choice in chunk.choices)
        if chunk.usage is not None:
            self._reply.prompt_tokens = chunk.usage.prompt_tokens
            self._reply.output_tokens = chunk.usage.completion_tokens
        if chunk.error is not None:
            self._reply.code = chunk.error.code or "error"
            self._reply.message = chunk.error.message
        words = "".join(choice.words for choice in chunk.choices)
        self._reply.text += words
        return bool(words)
