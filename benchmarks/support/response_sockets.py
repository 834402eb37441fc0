"""WebSockets of the Responses API: opens them, takes turns on them, and cuts them in the middle of an answer."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from benchmarks.support.installation import MODEL

OPEN_S = 300.0
"""Longest time for a handshake, for thousands of sockets that are opened at once."""
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@dataclass
class TurnResult:
    """One turn as its client saw it.

    Attributes:
        response: As the last event shows it.
        code: Of an error.
        retry_after_s: Time after which an error says that to ask again can help.
        ttft_s: Time from the request to the first text.
        is_whole: Whether the last event came.
    """

    response: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    retry_after_s: float = 0.0
    ttft_s: float = float("nan")
    is_whole: bool = False


@asynccontextmanager
async def response_socket(url: str, key: str) -> AsyncIterator[ClientConnection]:
    """Opens a WebSocket of a gateway."""
    headers = {"Authorization": f"Bearer {key}"}
    address = url.replace("http", "ws", 1) + "/v1/responses"
    options: dict[str, Any] = {"compression": None, "ping_interval": None, "max_size": None, "open_timeout": OPEN_S}
    async with connect(address, additional_headers=headers, **options) as socket:
        yield socket


async def take_turn(socket: ClientConnection, body: Mapping[str, Any], *, cuts: bool = False) -> TurnResult:
    """Takes a turn, and reads its events to the last one.

    Args:
        socket: The WebSocket.
        body: Of the request, without the model.
        cuts: Whether the client drops the connection when it has read the first text.
    """
    turn = TurnResult()
    sent_s = time.perf_counter()
    await socket.send(json.dumps({"type": "response.create", "model": MODEL, **body}))
    while not turn.is_whole:
        event = json.loads(await socket.recv())
        if event["type"] == "response.output_text.delta" and turn.ttft_s != turn.ttft_s:
            turn.ttft_s = time.perf_counter() - sent_s
            if cuts:
                socket.transport.abort()
                return turn
        turn.response = event.get("response", turn.response)
        turn.is_whole = event["type"] in _ENDS
        if event["type"] == "error":
            turn.code = event["error"]["code"]
            turn.retry_after_s = float(event["error"]["headers"].get("retry-after", 0))
    return turn
