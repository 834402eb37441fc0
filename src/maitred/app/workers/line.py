"""A Unix socket between a worker and the controller: messages in, messages out, several of them in one system call."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from maitred.core.errors import ProtocolViolation
from maitred.wire.frames import FrameReader, encode_frame

M = TypeVar("M")
_log = logging.getLogger(__name__)


class IpcConnection(asyncio.Protocol, Generic[M]):
    """One end.

    What is told within one turn of the event loop goes out at its end, together. Nothing waits for the socket to
    drain: what can pile up is bounded by the requests that are open, and these by the gate.

    Args:
        expected: What the other end says.
        heard: Told of each message. Must not raise.
        ended: Told once when the other end is gone.
    """

    def __init__(self, expected: Any, heard: Callable[[M], None], ended: Callable[[], None]) -> None:  # noqa: ANN401
        self._reader: FrameReader[M] = FrameReader(expected)
        self._heard = heard
        self._ended = ended
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    @property
    def open(self) -> bool:
        """Whether anybody hears what is told."""
        return self._transport is not None

    def tell(self, message: msgspec.Struct) -> None:
        """Sends a message; one that nobody hears any more is dropped."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(encode_frame(message))

    def close(self) -> None:
        """Ends it; what was told before still goes out."""
        if self._transport is not None:
            self._send()
            self._transport.close()

    def _send(self) -> None:
        if self._transport is not None and self._unsent:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            for message in self._reader.messages(data):
                self._heard(message)
        except ProtocolViolation:
            _log.exception("What came from another process of this gateway cannot be read.")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._unsent.clear()
        self._ended()
