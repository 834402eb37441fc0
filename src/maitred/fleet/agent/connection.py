"""Connection for messages between two processes of one fleet."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from maitred.core.errors import ProtocolViolation
from maitred.wire.frames import FrameReader, encode_frame

M = TypeVar("M")
_log = logging.getLogger(__name__)


class MessageConnection(asyncio.Protocol, Generic[M]):
    """One end of a message connection between two processes of a fleet.

    Messages that are sent within one turn of the event loop are written together at its end. No sender waits for the
    socket to drain: what can pile up is bounded by the number of open requests, and `InFlightLimiter` bounds that.

    Args:
        message_type: The union of messages that the other end sends.
        on_message: Called with each message. Must not raise.
        on_end: Called once when the other end is gone.
        on_open: Called once when messages can be sent.
    """

    def __init__(
        self,
        message_type: Any,  # noqa: ANN401
        on_message: Callable[[M], None],
        on_end: Callable[[], None],
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._reader: FrameReader[M] = FrameReader(message_type)
        self._on_message = on_message
        self._on_end = on_end
        self._on_open = on_open
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, so that messages are delivered."""
        return self._transport is not None

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

    def _write(self) -> None:
        if self._transport is not None and self._unsent:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stores the transport. Implements `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._on_open()

    def data_received(self, data: bytes) -> None:
        """Decodes messages and passes them on; aborts on a broken frame. Implements `asyncio.Protocol`."""
        try:
            for message in self._reader.messages(data):
                self._on_message(message)
        except ProtocolViolation:
            _log.exception("What came from the other end of a message connection cannot be read.")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drops unsent messages and calls `on_end`. Implements `asyncio.Protocol`."""
        self._transport = None
        self._unsent.clear()
        self._on_end()
