"""Connection for messages between two processes of one fleet."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from maitred.core.errors import ProtocolViolation
from maitred.replica.engine.client import KEEPALIVE_OPTIONS
from maitred.wire.frames import FrameReader, encode_frame
from maitred.wire.link.credentials import Credentials, channel_binding
from maitred.wire.link.handshake import AGENT_LINK, MAGIC, DialerHandshake, ListenerHandshake

STRANGER_S = 10.0
"""Time in seconds that a connection may stay open without a completed handshake."""

M = TypeVar("M")
_log = logging.getLogger(__name__)


class MessageConnection(asyncio.Protocol, Generic[M]):
    """One end of a message connection between two processes of a fleet.

    Messages that are sent within one turn of the event loop are written together at its end. No sender waits for the
    socket to drain: what can pile up is bounded by the number of open requests, and `InFlightLimiter` bounds that.

    If there is a secret, both ends first prove that they know it (see `maitred.wire.link.handshake`).

    Args:
        message_type: The union of messages that the other end sends.
        on_message: Called with each message. Must not raise.
        on_end: Called once when the other end is gone.
        on_open: Called once when messages can be sent.
        credentials: Secret that the other end must know, and the binding of a listener.
        listens: Whether this end was dialed.

    Attributes:
        fault: Why the connection was ended, or could not be used; empty: nobody has said.
    """

    def __init__(
        self,
        message_type: Any,  # noqa: ANN401
        on_message: Callable[[M], None],
        on_end: Callable[[], None],
        on_open: Callable[[], None] = lambda: None,
        *,
        credentials: Credentials = Credentials(),  # noqa: B008 - frozen
        listens: bool = False,
    ) -> None:
        self.fault = ""
        self._reader: FrameReader[M] = FrameReader(message_type)
        self._on_message = on_message
        self._on_end = on_end
        self._on_open = on_open
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._credentials = credentials
        self._listens = listens
        self._handshake: ListenerHandshake | DialerHandshake | None = None
        self._is_proven = False
        self._is_first = True
        """Whether nothing has come from the other end yet."""

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, so that messages are delivered."""
        return self._transport is not None and self._is_proven

    @property
    def peer(self) -> str:
        """Address of the other end, for messages; empty if it has none."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else ""

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message; drops it if the other end is gone."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._write)
        self._unsent.append(encode_frame(message))

    def close(self) -> None:
        """Closes the connection after it has written the messages that were sent before."""
        if self._transport is not None:
            self._write()
            self._transport.close()

    def reject(self, fault: str) -> None:
        """Closes the connection for this reason, after it has written the messages that were sent before."""
        self.fault = self.fault or fault
        self.close()

    def _write(self) -> None:
        if self._transport is not None and self._unsent and self._is_proven:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the handshake, if there is a secret. Implements `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            for option in KEEPALIVE_OPTIONS:
                sock.setsockopt(*option)
        secret = self._credentials.secret
        if secret is None:
            self._open()
            return
        if self._listens:
            self._handshake = ListenerHandshake(secret, self._credentials.binding, kind=AGENT_LINK)
            self._transport.write(self._handshake.opening)
        else:
            tls = transport.get_extra_info("ssl_object")
            certificate = None if tls is None else tls.getpeercert(binary_form=True)
            binding = b"" if certificate is None else channel_binding(certificate)
            self._handshake = DialerHandshake(secret, binding, kind=AGENT_LINK)
        asyncio.get_running_loop().call_later(STRANGER_S, self._drop_stranger)

    def _open(self) -> None:
        self._is_proven = True
        self._on_open()

    def _drop_stranger(self) -> None:
        if not self._is_proven:
            self.reject("the other end has not shown in time that it knows the secret (engine_link.secret)")

    def data_received(self, data: bytes) -> None:
        """Decodes messages and passes them on; aborts on a broken frame. Implements `asyncio.Protocol`."""
        if self.fault:
            return
        try:
            if not self._is_proven and not (data := self._continue_handshake(data)):
                return
            if self._is_first and data.startswith(MAGIC):
                raise ProtocolViolation("it asks for a secret, and this end has none; set engine_link.secret")
            self._is_first = False
            for message in self._reader.messages(data):
                if not self.fault:
                    self._on_message(message)
        except ProtocolViolation as violation:
            self.fault = violation.message
            _log.error("What came from the other end of a message connection cannot be used: %s", violation.message)
            if self._transport is not None:
                self._transport.abort()

    def _continue_handshake(self, data: bytes) -> bytes:
        """Continues the handshake and returns the bytes that follow it."""
        assert self._transport is not None
        match self._handshake:
            case ListenerHandshake() as handshake:
                proven = handshake.feed(data)
                if proven is None:
                    return b""
                proof, rest = proven
                self._transport.write(proof)
            case DialerHandshake() as handshake:
                self._transport.write(handshake.feed(data))
                if handshake.rest is None:
                    return b""
                rest = handshake.rest
            case None:
                return data
        self._handshake = None
        self._open()
        return rest

    def connection_lost(self, exc: Exception | None) -> None:
        """Drops unsent messages and calls `on_end`. Implements `asyncio.Protocol`."""
        if not self.fault and isinstance(self._handshake, DialerHandshake) and self._handshake.proof_sent:
            self.fault = "the other end has another engine_link.secret"
        self._transport = None
        self._unsent.clear()
        self._on_end()
