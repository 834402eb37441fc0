"""Scripted server of Anthropic's Messages API on a real socket, with all possible faults.

Its answers are a list of `Reply` objects, one for each request; the last one repeats. It runs in the event loop of the
test and records the requests::

    async with ScriptedAnthropic([Reply(text("Hello"), cut=True)]) as server:
        ...  # ask server.url
        assert server.asked[0].headers["x-api-key"] == "sk-ant-1"
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maitred.testing.scripted_socket_server import ScriptedSocketServer

Event = Mapping[str, Any]

PING: Event = {"type": "ping"}


@dataclass(frozen=True)
class Reply:
    """Reply to one request.

    Attributes:
        events: Events of the stream; see `text` and `tool_use`. Strings are sent unchanged.
        status: Status of the response; all but 200 send `error`.
        error: Type and message of the error.
        headers: Additional headers of the response.
        cut: Whether the connection closes before the end of the body.
        stall: Whether nothing follows the events, while the connection stays open.
        content_type: Content type of a stream.
    """

    events: Sequence[Event | str] = ()
    status: int = 200
    error: tuple[str, str] = ("api_error", "The script wants it so.")
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    stall: bool = False
    content_type: str = "text/event-stream; charset=utf-8"


@dataclass(frozen=True)
class ReceivedRequest:
    """Received request; `body` is empty if there was none."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


def text(*pieces: str, stop_reason: str = "end_turn", prompt_tokens: int = 10, cached_tokens: int = 0) -> list[Event]:
    """Makes the events of an answer with one text block; each piece counts as one token."""
    return [
        start(prompt_tokens, cached_tokens),
        *block(0, {"type": "text", "text": ""}, *({"type": "text_delta", "text": piece} for piece in pieces)),
        *end(stop_reason, len(pieces)),
    ]


def tool_use(name: str, *pieces: str, id: str = "toolu_1") -> list[Event]:  # noqa: A002 - the API's word
    """Makes the events of an answer that calls one tool, with its arguments in pieces."""
    deltas = ({"type": "input_json_delta", "partial_json": piece} for piece in pieces)
    return [
        start(10, 0),
        *block(0, {"type": "tool_use", "id": id, "name": name, "input": {}}, *deltas),
        *end("tool_use", len(pieces)),
    ]


def start(prompt_tokens: int, cached_tokens: int) -> Event:
    """Makes the first event of an answer."""
    usage = {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": 1,
    }
    message = {"id": "msg_scripted", "type": "message", "role": "assistant", "model": "scripted", "content": []}
    ending = {"stop_reason": None, "stop_sequence": None}
    return {"type": "message_start", "message": {**message, **ending, "usage": usage}}


def block(index: int, opening: Event, *deltas: Event) -> list[Event]:
    """Makes the events of a block, from start to end."""
    return [
        {"type": "content_block_start", "index": index, "content_block": opening},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def end(stop_reason: str, output_tokens: int) -> list[Event]:
    """Makes the last events of an answer."""
    delta = {"stop_reason": stop_reason, "stop_sequence": None}
    usage = {"output_tokens": output_tokens}
    return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]


def error(kind: str, message: str) -> Event:
    """Makes an error event of a stream."""
    return {"type": "error", "error": {"type": kind, "message": message}}


class ScriptedAnthropic(ScriptedSocketServer):
    """Scripted server of the Messages API that runs while its context is open.

    Args:
        replies: Replies to the requests for answers, in order. The list of models is always available.

    Attributes:
        asked: Requests for answers that it has received.
        left: Number of clients that closed their connections before the end of their answers.
        token_count: Answer to requests for the number of tokens of a prompt.
    """

    def __init__(self, replies: Sequence[Reply]) -> None:
        super().__init__()
        self.asked: list[ReceivedRequest] = []
        self.left = 0
        self.token_count: Mapping[str, Any] = {"input_tokens": 42}
        self._replies = list(replies)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        asked = await _read(reader)
        return asked is not None and await self._answer(asked, reader, writer)

    async def _answer(self, asked: ReceivedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request, and returns whether the connection can carry another."""
        if asked.method == "GET":
            models = {"data": [{"type": "model", "id": "scripted", "display_name": "Scripted"}], "has_more": False}
            await _send(writer, 200, json.dumps(models).encode(), {"content-type": "application/json"})
            return True
        reply = self._replies[min(len(self.asked), len(self._replies) - 1)]
        self.asked.append(asked)
        if asked.path.endswith("/count_tokens") and reply.status == 200:
            await _send(writer, 200, json.dumps(self.token_count).encode(), {"content-type": "application/json"})
            return True
        if reply.status != 200:
            body = {"type": "error", "error": dict(zip(("type", "message"), reply.error, strict=True))}
            headers = {"content-type": "application/json", **reply.headers}
            await _send(writer, reply.status, json.dumps(body).encode(), headers)
            return True
        head = {"content-type": reply.content_type, "transfer-encoding": "chunked", **reply.headers}
        await _send(writer, 200, None, head)
        for event in reply.events:
            data = event if isinstance(event, str) else f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(data.encode()), data.encode()))
            await writer.drain()
        if reply.stall:
            # It waits until the client closes the connection.
            await reader.read()
            self.left += 1
            return False
        if reply.cut:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _read(reader: asyncio.StreamReader) -> ReceivedRequest | None:
    """Reads the next request; None if the client has closed the connection."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.splitlines()
    method, path, _ = first.split(" ")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return ReceivedRequest(method, path, headers, json.loads(body) if body else {})


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes | None, headers: Mapping[str, str]) -> None:
    lines = [f"HTTP/1.1 {status} Scripted", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))
    await writer.drain()
