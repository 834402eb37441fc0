"""IPC between the processes of one gateway: a private folder of Unix sockets, and signals."""

import os
import shutil
import signal
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


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

    @property
    def agent_socket(self) -> Path:
        """The Unix socket at which the engine host takes orders."""
        return self.path / "agent.sock"

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
