"""Where the processes of one gateway find each other: a folder of sockets that nobody else can enter."""

import os
import shutil
import signal
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


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
