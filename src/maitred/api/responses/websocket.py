"""WebSockets of the Responses API: OpenAI's mode in which one connection carries many turns.

Each event `response.create` is a request of its own, with its own id, authentication, reservation and outcome
(`maitred.api.responses.turn`). The turns of a lane run one after the other, and lanes run beside each other. A
WebSocket on which nothing runs has no task.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import msgspec
from wsproto.frame_protocol import CloseReason

from maitred.api.config import ServerConfig, WebSocketConfig
from maitred.api.dialect import OPENAI, error_headers
from maitred.api.exchange import HttpExchange, Scope
from maitred.api.http.websocket import MessageHandler, WebSocketProtocol, accept_headers
from maitred.api.in_flight import InFlightLimiter
from maitred.api.responses.turn import RecentResponses, ResponsesTurn, turn_scope
from maitred.api.routes import Route
from maitred.core.clock import Clock
from maitred.core.errors import (
    Draining,
    InvalidRequest,
    MaitredError,
    QueueFull,
    Saturated,
    Unauthenticated,
    WebSocketExpired,
)
from maitred.core.tenancy import Principal
from maitred.core.tenancy import Scope as KeyScope
from maitred.wire.responses.client_events import (
    CreateEvent,
    SteerEvent,
    decode_client_event,
    encode_error_message,
    encode_steer_failure,
)

log = logging.getLogger(__name__)

_DRAIN_RETRY_S = 2.0
_REVOKED = "This API key was revoked, or has expired. What was generated until then is billed."
_NORMAL, _GOING_AWAY, _POLICY, _INTERNAL = (
    CloseReason.NORMAL_CLOSURE,
    CloseReason.GOING_AWAY,
    CloseReason.POLICY_VIOLATION,
    CloseReason.INTERNAL_ERROR,
)


class ResponsesWebSocket(MessageHandler):
    """One WebSocket: its lanes, their turns, and how it ends.

    Args:
        sockets: All open WebSockets, with their settings.
        principal: The principal of the handshake.
        scope: The scope of the handshake.

    Attributes:
        principal: The principal of the handshake.
        protocol: The connection.
    """

    def __init__(self, sockets: "ResponsesWebSockets", principal: Principal, scope: Scope) -> None:
        config = sockets.config
        self.principal = principal
        self.protocol = WebSocketProtocol(
            self,
            max_message_bytes=sockets.max_body_bytes,
            message_timeout_s=sockets.body_timeout_s,
            ping_s=config.ping_s,
            stall_grace_s=sockets.stall_grace_s,
        )
        self._sockets = sockets
        self._scope = turn_scope(scope)
        self._recent = RecentResponses(config.max_lanes, config.max_remembered_bytes)
        self._lanes: dict[str, deque[CreateEvent]] = {}
        """Lanes that run a turn, with those that wait for it."""
        self._running: set[ResponsesTurn] = set()
        self._queued_bytes = 0
        self._end: tuple[CloseReason, MaitredError] | None = None
        """Close code and error of a WebSocket that takes no more turns; None: it takes them."""
        self._lifetime = asyncio.get_running_loop().call_later(config.lifetime_s, self._expire)

    # --- what comes ---

    def on_message(self, message: bytes) -> None:
        """Handles an event of the client: a turn begins at once, or waits for its lane."""
        stream_id = ""
        try:
            event = decode_client_event(message)
            if isinstance(event, SteerEvent):
                self.protocol.send(encode_steer_failure(event))
                return
            stream_id = event.stream_id
            if self._end is None:
                self._add(event)
            else:
                self._send_error(self._end[1], stream_id)
        except MaitredError as error:
            self._send_error(error, stream_id)

    def _add(self, event: CreateEvent) -> None:
        """Starts a turn, or adds it to those that wait in its lane.

        Raises:
            QueueFull: Too many lanes run, or too many turns wait.
        """
        config = self._sockets.config
        lane = self._lanes.get(event.stream_id)
        if lane is None:
            if len(self._lanes) >= config.max_lanes:
                raise QueueFull(
                    f"This WebSocket runs {config.max_lanes} lanes at once. Wait until one has ended, or open another.",
                    param="stream_id",
                )
            self._lanes[event.stream_id] = deque()
            task = asyncio.get_running_loop().create_task(self._run_lane(event), name="lane of a WebSocket")
            self.protocol.tasks.add(task)
            task.add_done_callback(self.protocol.tasks.discard)
            return
        if len(lane) >= config.max_queued_turns or self._queued_bytes + len(event.body) > self._sockets.max_body_bytes:
            raise QueueFull("As many turns wait here as may. Send the next one when a turn has ended.")
        lane.append(event)
        self._queued_bytes += len(event.body)

    async def _run_lane(self, event: CreateEvent) -> None:
        """Runs a turn, and then those that have come for its lane meanwhile."""
        lane = self._lanes[event.stream_id]
        try:
            while not self.protocol.is_lost:
                await self._run_turn(event)
                if not lane:
                    break
                event = lane.popleft()
                self._queued_bytes -= len(event.body)
        except Exception:  # it is a fault of the server, whose end the client must see
            log.exception("A turn failed.")
            self.protocol.close(_INTERNAL, "The server failed.")
        finally:
            self._queued_bytes -= sum(len(waiting.body) for waiting in lane)
            del self._lanes[event.stream_id]
            self._close_if_ended()

    async def _run_turn(self, event: CreateEvent) -> None:
        started_s = self._sockets.clock.monotonic_s()
        turn = ResponsesTurn(self.protocol, self._scope, event, recent=self._recent, started_s=started_s)
        self._running.add(turn)
        try:
            await self.protocol.app.serve(turn)
        finally:
            self._running.discard(turn)

    def _send_error(self, error: MaitredError, stream_id: str = "") -> None:
        """Sends a message about an error that belongs to no turn."""
        status, body = OPENAI.error(error, "")
        headers = {name.decode("ascii"): value.decode("ascii") for name, value in error_headers(error)}
        detail = msgspec.json.decode(body)["error"]
        self.protocol.send(encode_error_message(status, detail, headers, stream_id=stream_id))

    # --- the end ---

    def on_shutdown(self) -> None:
        """Takes no more turns, and closes the WebSocket when none runs."""
        self._end_with(_GOING_AWAY, Draining(retry_after_s=_DRAIN_RETRY_S))

    def _expire(self) -> None:
        self._end_with(_NORMAL, WebSocketExpired())

    def _end_with(self, code: CloseReason, error: MaitredError) -> None:
        self._end = self._end or (code, error)
        self._close_if_ended()

    def _close_if_ended(self) -> None:
        if self._end is not None and not self._lanes:
            code, error = self._end
            if not isinstance(error, Draining):
                self._send_error(error)
            self.protocol.close(code, error.message)

    def revoke(self) -> None:
        """Ends the WebSocket, whose key is no longer valid, with all its turns."""
        error = Unauthenticated(_REVOKED)
        self._send_error(error)
        self.protocol.close(_POLICY, error.message)
        self._cancel_turns()

    def on_lost(self) -> None:
        """Cancels all turns: nobody reads their answers."""
        self._lifetime.cancel()
        self._sockets.remove(self)
        self._cancel_turns()

    def _cancel_turns(self) -> None:
        for lane in self._lanes.values():
            self._queued_bytes -= sum(len(event.body) for event in lane)
            lane.clear()
        for turn in list(self._running):
            if turn.connection.on_lost is not None:
                turn.connection.on_lost()


class ResponsesWebSockets:
    """All open WebSockets of the Responses API, and the route that opens them.

    Args:
        server: Settings of the HTTP server.
        in_flight: The limiter of requests in flight; a WebSocket ends when it is closed.
        clock: Clock for the times in request contexts.

    Attributes:
        config: Settings of WebSockets.
        max_body_bytes: Largest size of a message.
        body_timeout_s: Longest time that a message may take to arrive.
        stall_grace_s: How long a client may go without reading the data sent to it.
        clock: Clock for the times in request contexts.
    """

    def __init__(self, server: ServerConfig, in_flight: InFlightLimiter, clock: Clock) -> None:
        self.clock = clock
        self._in_flight = in_flight
        self._by_owner: dict[str, set[ResponsesWebSocket]] = {}
        """WebSockets by the key that opened them, with its tenant."""
        self.reconfigure(server)
        in_flight.watch_close(self._drain)

    def reconfigure(self, server: ServerConfig) -> None:
        """Applies new settings; WebSockets that are open keep their lifetime and their memory."""
        self.config: WebSocketConfig = server.websocket
        self.max_body_bytes = server.max_body_bytes
        self.body_timeout_s = server.body_timeout_s
        self.stall_grace_s = server.stall_grace_s

    @property
    def count(self) -> int:
        """Number of open WebSockets."""
        return sum(map(len, self._by_owner.values()))

    def routes(self) -> list[Route]:
        """Returns the route of the handshake."""
        return [
            Route(
                *("GET", "/v1/responses", self.open, "Open a WebSocket, over which responses are created."),
                needs=KeyScope.INFERENCE,
                upgrades=True,
            )
        ]

    async def open(self, exchange: HttpExchange) -> None:
        """Answers a handshake; the connection is a WebSocket from then on."""
        headers = accept_headers(exchange.header)
        if exchange.header(b"idempotency-key") is not None:
            raise InvalidRequest(
                "A WebSocket takes no Idempotency-Key: its turns are many requests. Leave it out, or use POST.",
                param="Idempotency-Key",
            )
        if self._in_flight.draining:
            raise Draining(retry_after_s=_DRAIN_RETRY_S)
        principal = exchange.principal
        if len(self._by_owner.get(_owner(principal), ())) >= self.config.max_per_key:
            raise Saturated(
                f"This key has {self.config.max_per_key} WebSockets open, as many as one may. Close one, or use POST."
            )
        socket = ResponsesWebSocket(self, principal, exchange.scope)
        try:
            exchange.switch_protocol(socket.protocol, headers)
        except InvalidRequest:
            socket.on_lost()
            raise
        self._by_owner.setdefault(_owner(principal), set()).add(socket)

    def remove(self, socket: ResponsesWebSocket) -> None:
        """Removes a WebSocket that has ended; a second call does nothing."""
        owner = _owner(socket.principal)
        owned = self._by_owner.get(owner)
        if owned is not None:
            owned.discard(socket)
            if not owned:
                del self._by_owner[owner]

    def close_revoked(self, holds: Callable[[Principal], bool]) -> None:
        """Ends all WebSockets whose key is no longer valid.

        Args:
            holds: Returns whether a request of this principal would still be accepted; called once for each key.
        """
        for owned in list(self._by_owner.values()):
            if not holds(next(iter(owned)).principal):
                for socket in list(owned):
                    socket.revoke()

    def drain_peer(self, pid: int) -> None:
        """Ends the WebSockets that a process has passed on which is to end: each when none of its turns runs."""
        for socket in self._all():
            if socket.protocol.peer_pid == pid:
                socket.on_shutdown()

    def _drain(self) -> None:
        for socket in self._all():
            socket.on_shutdown()

    def _all(self) -> list[ResponsesWebSocket]:
        return [socket for owned in self._by_owner.values() for socket in owned]


def _owner(principal: Principal) -> str:
    return principal.owners[-1]
