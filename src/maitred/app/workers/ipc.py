"""Where the processes of one gateway find each other: a folder of sockets that nobody else can enter."""

import asyncio
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec

from maitred.core.errors import ProtocolViolation
from maitred.wire.frames import FrameReader, encode_frame


@dataclass(frozen=True, slots=True)
class IpcDirectory:
    """Made by `open_house`.

    Attributes:
        folder: Of the sockets.
        supervisor: The process that started the others.
        workers: Those API workers, by their process ids, that were there when this process was started.
    """

    folder: Path
    supervisor: int
    workers: Collection[int] = ()

    @property
    def desk(self) -> Path:
        """Where workers ask the controller."""
        return self.folder / "desk.sock"

    @property
    def edge(self) -> Path:
        """Where the controller speaks HTTP, for what workers pass on."""
        return self.folder / "edge.sock"

    def engine(self, name: str) -> Path:
        """The folder where an engine of the `model` section listens."""
        return self.folder / name

    def ready(self) -> None:
        """Tells the supervisor that this process does its work."""
        os.kill(self.supervisor, READY)

    def changed(self) -> None:
        """Tells the supervisor that another configuration is in force, which workers have to begin with."""
        os.kill(self.supervisor, CHANGED)

    def replace(self) -> None:
        """Tells the supervisor to replace all workers, one after the other."""
        os.kill(self.supervisor, REPLACE)


READY = signal.SIGRTMIN
"""A signal that is queued, and says who sent it."""
CHANGED = signal.SIGRTMIN + 1
"""From the controller: the configuration has changed."""
REPLACE = signal.SIGUSR2
"""To the supervisor, from the controller or whoever operates it: all workers are to be replaced."""
RETIRE = signal.SIGUSR2
"""To a worker: another one takes its place."""


@contextmanager
def open_house() -> Iterator[IpcDirectory]:
    """The folder, for as long as the block lasts."""
    folder = Path(tempfile.mkdtemp(prefix="maitred-house-"))  # with mode 0700
    try:
        yield IpcDirectory(folder, os.getpid())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
