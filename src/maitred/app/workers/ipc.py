"""IPC between the processes of one gateway: a private folder of Unix sockets, connections, and signals."""

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
class IpcFolder:
    """The folder of sockets of one gateway, made by `open_ipc`.

    Attributes:
        path: Path of the folder.
        supervisor_pid: The process id of the supervisor, which started the others.
        worker_pids: Process ids of the workers that were running when this process was started.
    """

    path: Path
    supervisor_pid: int
    worker_pids: Collection[int] = ()

    @property
    def controller_ipc_socket(self) -> Path:
        """The Unix socket at which the controller accepts worker connections."""
        return self.path / "desk.sock"

    @property
    def controller_http_socket(self) -> Path:
        """The Unix socket at which the controller speaks HTTP, for requests that workers forward."""
        return self.path / "edge.sock"

    def engine_folder(self, name: str) -> Path:
        """Returns the folder in which an engine of the `model` section listens."""
        return self.path / name

    def notify_ready(self) -> None:
        """Notifies the supervisor that this process is serving."""
        os.kill(self.supervisor_pid, READY)

    def notify_config_changed(self) -> None:
        """Notifies the supervisor that another configuration is in force, with which new workers have to start."""
        os.kill(self.supervisor_pid, CONFIG_CHANGED)

    def request_worker_replacement(self) -> None:
        """Asks the supervisor to replace all workers, one after the other."""
        os.kill(self.supervisor_pid, REPLACE_WORKERS)


READY = signal.SIGRTMIN
"""Signal to the supervisor: this process is serving. It is a real-time signal: queued, and with the sender's id."""
CONFIG_CHANGED = signal.SIGRTMIN + 1
"""Signal of the controller to the supervisor: the configuration has changed."""
REPLACE_WORKERS = signal.SIGUSR2
"""Signal to the supervisor, from the controller or an operator: replace all workers."""
RETIRE = signal.SIGUSR2
"""Signal of the supervisor to a worker: another worker takes its place."""


@contextmanager
def open_ipc() -> Iterator[IpcFolder]:
    """Creates the folder of sockets for as long as the block lasts."""
    folder = Path(tempfile.mkdtemp(prefix="maitred-house-"))  # mkdtemp creates it with mode 0700
    try:
        yield IpcFolder(folder, os.getpid())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


M = TypeVar("M")
_log = logging.getLogger(__name__)


class IpcConnection(asyncio.Protocol, Generic[M]):
    """One end of a message connection between two processes of a gateway.

    Messages that are sent within one turn of the event loop are written together at its end. No sender waits for the
    socket to drain: what can pile up is bounded by the number of open requests, and `InFlightLimiter` bounds that.

    Args:
        message_type: The union of messages that the other end sends.
        on_message: Called with each message. Must not raise.
        on_end: Called once when the other end is gone.
    """

    def __init__(self, message_type: Any, on_message: Callable[[M], None], on_end: Callable[[], None]) -> None:  # noqa: ANN401
        self._reader: FrameReader[M] = FrameReader(message_type)
        self._on_message = on_message
        self._on_end = on_end
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

    def data_received(self, data: bytes) -> None:
        """Decodes messages and passes them on; aborts on a broken frame. Implements `asyncio.Protocol`."""
        try:
            for message in self._reader.messages(data):
                self._on_message(message)
        except ProtocolViolation:
            _log.exception("What came from another process of this gateway cannot be read.")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drops unsent messages and calls `on_end`. Implements `asyncio.Protocol`."""
        self._transport = None
        self._unsent.clear()
        self._on_end()
