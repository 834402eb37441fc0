"""One turn of a WebSocket: a request with its response, which takes the same path as `POST /v1/responses`.

A route handler sees an `HttpExchange`. What it streams as server-sent events goes to the client as messages, one for
each event, and an error of any kind is one message.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from maitred.api.dialect import Header, error_headers
from maitred.api.exchange import KEPT, HttpExchange, ResponseState, Scope
from maitred.api.http.connection import EXTENSION, PlainAsgiConnection
from maitred.api.http.websocket import WebSocketProtocol
from maitred.core.errors import MaitredError
from maitred.wire.responses.client_events import CreateEvent, encode_error_message

_OF_ONE_REQUEST = frozenset(
    {
        *(b"connection", b"upgrade", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding"),
        *(b"expect", b"idempotency-key", b"x-request-id", b"x-stainless-retry-count", b"cache-control"),
        *(b"sec-websocket-accept", b"sec-websocket-extensions", b"sec-websocket-key", b"sec-websocket-protocol"),
        b"sec-websocket-version",
    }
)
"""Headers of a handshake that do not belong to each of its turns. Browsers send ``Cache-Control: no-cache`` with every
handshake."""
_DATA = b"data: "
_BETWEEN = b"\n\n"


def turn_scope(handshake: Scope) -> Scope:
    """Returns the scope that all turns of a WebSocket share: that of a POST with the headers of the handshake."""
    return {
        **handshake,
        "method": "POST",
        "headers": [header for header in handshake["headers"] if header[0] not in _OF_ONE_REQUEST],
        "extensions": {KEPT: {}},
    }


class RecentResponses:
    """Conversations that end with the latest response of each lane of a WebSocket, stored or not.

    Args:
        max_lanes: Most lanes whose latest response is kept.
        max_bytes: Most bytes of all conversations together. A larger one is not kept.
    """

    def __init__(self, max_lanes: int, max_bytes: int) -> None:
        self._max_lanes = max_lanes
        self._max_bytes = max_bytes
        self._by_lane: OrderedDict[str, tuple[str, Sequence[bytes]]] = OrderedDict()
        """Lane -> the id of its response and the conversation, the lane that was used last at the end."""
        self._bytes = 0

    def find(self, response_id: str) -> Sequence[bytes] | None:
        """Returns the conversation that ends with a response, as lists of items in JSON; None: it is not kept."""
        return next((items for found_id, items in self._by_lane.values() if found_id == response_id), None)

    def keep(self, lane: str, response_id: str, conversation: Sequence[bytes]) -> None:
        """Keeps the conversation of a lane in place of the one before, and drops the oldest of other lanes."""
        self._drop(lane)
        size = sum(map(len, conversation))
        if size > self._max_bytes:
            return
        self._by_lane[lane] = response_id, conversation
        self._bytes += size
        while self._bytes > self._max_bytes or len(self._by_lane) > self._max_lanes:
            self._drop(next(iter(self._by_lane)))

    def _drop(self, lane: str) -> None:
        if (kept := self._by_lane.pop(lane, None)) is not None:
            self._bytes -= sum(map(len, kept[1]))


class TurnConnection(PlainAsgiConnection):
    """Connection of one turn: the WebSocket, as far as the turn is concerned.

    Args:
        socket: The WebSocket.
        body: The body of the turn.
    """

    def __init__(self, socket: WebSocketProtocol, body: bytes) -> None:
        self._socket = socket
        self._body = body
        self.on_lost: Callable[[], None] | None = None

    @property
    def lost(self) -> bool:  # type: ignore[override]
        """Whether nothing more can be sent."""
        return self._socket.is_lost

    @property
    def peer_died(self) -> bool:  # type: ignore[override]
        """Whether the process that passed the messages on has died."""
        return self._socket.peer_died

    @property
    def writable(self) -> bool:  # type: ignore[override]
        """Whether a message would be sent without waiting."""
        return self._socket.writable

    @property
    def stalled(self) -> bool:  # type: ignore[override]
        """Whether the connection was cut because its client had stopped reading."""
        return self._socket.stalled

    def take_body(self) -> bytes:  # type: ignore[override]
        """Takes the body, which has arrived completely."""
        body, self._body = self._body, b""
        return body


class ResponsesTurn(HttpExchange):
    """Exchange of one turn.

    Args:
        socket: The WebSocket.
        scope: See `turn_scope`.
        event: What the client has sent.
        recent: The latest responses of the WebSocket.
        started_s: When the turn began, in monotonic seconds.

    Attributes:
        event: What the client has sent.
        recent: The latest responses of the WebSocket.
        connection: The connection of the turn.
    """

    connection: TurnConnection

    def __init__(
        self,
        socket: WebSocketProtocol,
        scope: Scope,
        event: CreateEvent,
        recent: RecentResponses,
        started_s: float,
    ) -> None:
        connection = TurnConnection(socket, event.body)
        extensions = {**scope["extensions"], EXTENSION: connection}
        super().__init__({**scope, "extensions": extensions}, _never_called, _never_called, started_s)
        self.event = event
        self.recent = recent
        self._socket = socket

    @property
    def ready(self) -> bool:
        """Whether the turn can send without waiting."""
        return self.state is ResponseState.STREAMING and self._socket.writable

    async def stream(self, events: bytes) -> None:
        """Sends events as messages, the first one with the headers of a response.

        The call returns when the connection's buffer has room again: a slow client delays its own turns only.
        """
        if self.state is ResponseState.NOTHING_SENT and events:
            self.state, self.status = ResponseState.STREAMING, 200
            self._send_events(events, self._header_values(self.answer_headers))
        else:
            self._send_events(events)
        await self._socket.drain()

    def write(self, events: bytes) -> None:
        """Sends events as messages without waiting."""
        self._send_events(events)

    async def send_comment(self, comment: bytes) -> None:
        """Sends nothing: pings keep a silent WebSocket alive."""
        self.sent_s = time.monotonic()

    async def finish(self, events: bytes = b"") -> None:
        """Sends the last events of the turn."""
        await self.stream(events)
        self.state = ResponseState.COMPLETE

    async def send_error(self, error: MaitredError, headers: Sequence[Header] = ()) -> None:
        """Sends a message about an error, and then what ends a response that has begun. The WebSocket stays open."""
        status, body = self.dialect.error(error, self.context.request_id)
        events, number = b"", None
        if self.state is ResponseState.NOTHING_SENT:
            self.status = status
        elif self.error_events is not None:
            first, _, events = self.error_events(error).partition(_BETWEEN)
            number = msgspec.json.decode(first.partition(_DATA)[2])["sequence_number"]
        self._socket.send(
            encode_error_message(
                status,
                msgspec.json.decode(body)["error"],
                self._header_values([*error_headers(error), *headers]),
                stream_id=self.event.stream_id,
                sequence_number=number,
            )
        )
        self._send_events(events)
        self.state = ResponseState.COMPLETE

    def _send_events(self, events: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Sends server-sent events as messages; each gets the name of the lane, and the first one the headers."""
        members: dict[str, Any] = {"stream_id": self.event.stream_id} if self.event.stream_id else {}
        lane = _members(members)
        first = lane if headers is None else _members({**members, "headers": headers})
        for event in events.split(_BETWEEN):
            data = event.partition(_DATA)[2]
            if data:
                self._socket.send(data[:1] + first + data[1:])
                first = lane
        self.sent_s = time.monotonic()

    def _header_values(self, own: Sequence[Header]) -> dict[str, str]:
        return {name.decode("ascii"): value.decode("latin-1") for name, value in self._headers(own)}


def _members(members: Mapping[str, Any]) -> bytes:
    """Returns members of a JSON object, as they stand before others."""
    return msgspec.json.encode(members)[1:-1] + b"," if members else b""


async def _never_called(*_: object) -> Any:  # noqa: ANN401 - as ASGI's
    raise AssertionError("a turn reads its body and sends its messages itself")
