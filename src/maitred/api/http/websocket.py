"""WebSocket on a connection whose handshake HTTP has answered (RFC 6455).

`wsproto` reads and writes the frames; this module has the connection: backpressure, pings, limits and the close.

A client that does not read is not read from either, and its turns wait for it; after the stall grace the connection is
cut, as under HTTP. A connection holds one timer and no task while nothing happens on it.

The extension that compresses messages is not offered: it would cost each connection memory, and small messages of a
client could become large ones here.
"""

import asyncio
import base64
import binascii
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, generate_accept_token

from maitred.api.dialect import Header
from maitred.api.http.connection import SuccessorProtocol, reset
from maitred.core.errors import InvalidRequest, UpgradeRequired
from maitred.core.parent_watch import is_exiting

log = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Time that a client gets to answer a close frame."""
_KEY_BYTES = 16


def accept_headers(header: Callable[[bytes], str | None]) -> list[Header]:
    """Returns the headers that accept a handshake.

    Args:
        header: Returns a header of the handshake by its name in lower case.

    Raises:
        UpgradeRequired: The request is no handshake, or one for another version of the protocol.
        InvalidRequest: The handshake has no valid key.
    """
    options = [option.strip().lower() for option in (header(b"connection") or "").split(",")]
    if header(b"upgrade") is None or "upgrade" not in options or header(b"sec-websocket-version") != "13":
        raise UpgradeRequired
    key = header(b"sec-websocket-key") or ""
    try:
        is_key = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except (binascii.Error, ValueError):
        is_key = False
    if not is_key:
        raise InvalidRequest(
            "Sec-WebSocket-Key must be 16 random bytes in base64. A library for WebSockets sends one.",
            param="Sec-WebSocket-Key",
        )
    accept = generate_accept_token(key.encode("ascii"))
    return [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", accept)]


class MessageHandler(ABC):
    """Handler of what a WebSocket receives."""

    @abstractmethod
    def on_message(self, message: bytes) -> None:
        """Handles a whole message of text, in UTF-8."""

    @abstractmethod
    def on_shutdown(self) -> None:
        """Handles the stop of the server: the handler closes the connection when its work is done."""

    @abstractmethod
    def on_lost(self) -> None:
        """Handles the end of the connection, at which nothing more can be sent. It may be called again."""


class WebSocketProtocol(SuccessorProtocol):
    """WebSocket as the server sees it.

    Args:
        handler: Gets the messages.
        max_message_bytes: Largest size of a message.
        message_timeout_s: Longest time that a message may take to arrive.
        ping_s: Silence in seconds after which the client gets a ping, and after as much more is cut off.
        stall_grace_s: How long the client may go without reading the data sent to it.

    Attributes:
        is_lost: Whether nothing more can be sent.
        peer_died: Whether it ended because the process at the other end of a Unix socket has died.
        stalled: Whether the connection was cut because its client did not read.
    """

    def __init__(
        self,
        handler: MessageHandler,
        *,
        max_message_bytes: int,
        message_timeout_s: float,
        ping_s: float,
        stall_grace_s: float,
    ) -> None:
        self._handler = handler
        self._max_message_bytes = max_message_bytes
        self._message_timeout_s = message_timeout_s
        self._ping_s = ping_s
        self._stall_grace_s = stall_grace_s
        self._loop = asyncio.get_running_loop()
        self._frames = Connection(ConnectionType.SERVER)
        self._message = bytearray()
        """Received pieces of a message that is not complete."""
        self._drained: asyncio.Event | None = None
        """Set when the client has read enough; None: it has."""
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the next ping, or of the end of a close."""
        self._patience: asyncio.TimerHandle | None = None
        """Timer of a client that does not read."""
        self._message_timer: asyncio.TimerHandle | None = None
        """Timer of a message that is not complete."""
        self._has_heard = self._has_pinged = False
        """Whether the client has sent anything, and whether it got a ping, since the timer fired last."""
        self._discards = False
        """Whether received data is dropped, because the client has broken the protocol."""
        self.is_lost = False
        self.stalled = False
        self.peer_died = False

    @property
    def writable(self) -> bool:
        """Whether the client reads what it gets, so that a message can be sent without waiting."""
        return self._drained is None and not self.is_lost

    def send(self, message: bytes) -> None:
        """Sends a message of text; does nothing on a connection that is closed or being closed."""
        if self._frames.state is ConnectionState.OPEN and not self.is_lost:
            self._write(TextMessage(message.decode()))

    async def drain(self) -> None:
        """Waits until the client has read enough for more to be sent, or the connection has ended."""
        while self._drained is not None:
            await self._drained.wait()

    def close(self, code: CloseReason, reason: str) -> None:
        """Begins to close the connection: the client gets a close frame, and a limited time to answer it."""
        if self._frames.state is ConnectionState.OPEN and not self.is_lost:
            self._write(CloseConnection(code, reason))
            self._await_close()

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the connection and starts the timer of pings."""
        super().connection_made(transport)
        self._timer = self._loop.call_later(self._ping_s, self._check_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends everything that ran for the client."""
        super().connection_lost(exc)
        for timer in (self._timer, self._patience, self._message_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._patience = self._message_timer = None
        self._end()

    def data_received(self, data: bytes) -> None:
        """Reads the frames that have come."""
        self._has_heard = True
        if self._discards or self.transport.is_closing():
            return
        try:
            self._frames.receive_data(data)
        except LocalProtocolError:
            self.transport.close()  # data behind the end of the close
            return
        self._read_frames()

    def _read_frames(self) -> None:
        """Handles received frames, as long as the client reads what they are answered with."""
        for event in self._frames.events():
            self._on_event(event)
            if self._discards or not self.writable:
                break
        if self._message and self._message_timer is None:
            self._message_timer = self._loop.call_later(self._message_timeout_s, self._give_message_up)

    def eof_received(self) -> None:
        """Ends the connection: a client that sends no more cannot close it properly."""
        self._end()
        self._await_close()

    def pause_writing(self) -> None:
        """Called when the transport holds as much unsent data as it may: nothing more is read, either."""
        self._drained = self._drained or asyncio.Event()
        if not self.transport.is_closing():
            self.transport.pause_reading()
        if self._patience is None:
            self._patience = self._loop.call_later(self._stall_grace_s, self._cut_stalled)

    def resume_writing(self) -> None:
        """Called when the client has read most of it."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._release_writers()
        if self._discards or self.is_lost or self.transport.is_closing():
            return
        self._read_frames()
        if self.writable:
            self.transport.resume_reading()

    def shutdown(self) -> None:
        """Called when the server stops, or accepts no more connections."""
        self._handler.on_shutdown()

    # --- frames ---

    def _on_event(self, event: Event) -> None:
        match event:
            case TextMessage():
                self._message += event.data.encode()
                if len(self._message) > self._max_message_bytes:
                    self._fail(
                        CloseReason.MESSAGE_TOO_BIG, f"A message may have {self._max_message_bytes} bytes at most."
                    )
                elif event.message_finished:
                    message, self._message = bytes(self._message), bytearray()
                    if self._message_timer is not None:
                        self._message_timer.cancel()
                        self._message_timer = None
                    if self._frames.state is ConnectionState.OPEN:
                        self._handler.on_message(message)
            case BytesMessage():
                self._fail(CloseReason.UNSUPPORTED_DATA, "Send text: each message is one JSON object.")
            case Ping():
                if self._frames.state is ConnectionState.OPEN:
                    self._write(event.response())
            case CloseConnection() if self._frames.state is ConnectionState.REMOTE_CLOSING:
                self._write(event.response())
                self._close_transport()
            case CloseConnection() if self._frames.state is ConnectionState.CLOSED:
                self._close_transport()
            case CloseConnection():
                self._fail(CloseReason(event.code), "The frames do not follow RFC 6455.")

    def _give_message_up(self) -> None:
        self._fail(CloseReason.POLICY_VIOLATION, f"A message must arrive within {self._message_timeout_s:g} s.")

    def _fail(self, code: CloseReason, reason: str) -> None:
        """Closes the connection because of what the client has sent; what it goes on to send is dropped."""
        self.close(code, reason)
        self._discards = True
        self._message = bytearray()
        self._end()
        self.transport.write_eof()

    def _write(self, event: Event) -> None:
        self.transport.write(self._frames.send(event))

    # --- the end ---

    def _check_alive(self) -> None:
        """Sends a ping to a client that was silent, and cuts one that has not answered the last ping."""
        is_read = self._drained is None  # while nothing is read, silence means nothing
        if self._has_pinged and not self._has_heard and is_read:
            log.info("A WebSocket is cut: its client has not answered a ping for %g s.", self._ping_s)
            reset(self.transport)
            return
        self._has_pinged = not self._has_heard and is_read
        self._has_heard = False
        if self._has_pinged:
            self._write(Ping())
        self._timer = self._loop.call_later(self._ping_s, self._check_alive)

    def _close_transport(self) -> None:
        """Closes the connection, whose close frames were exchanged, when its last data was sent."""
        self._end()
        self._await_close()
        self.transport.close()

    def _await_close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_CLOSE_S, self.transport.abort)

    def _cut_stalled(self) -> None:
        self.stalled = True
        reset(self.transport)

    def _end(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.peer_died = bool(self.peer_pid) and is_exiting(self.peer_pid)
            self._release_writers()
            self._handler.on_lost()

    def _release_writers(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None:
            drained.set()
