"""Redis for a test or a benchmark: on a Unix socket in its own folder, which is removed at the end."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from maitred.core.secret import Secret
from maitred.testing.server_process import ProgramMissing

START_S = 300.0
KEEPS_NOTHING = ("--save", "", "--appendonly", "no", "--daemonize", "no")


class RedisServer:
    """Redis server that can be killed, frozen and started again; it is empty after each start."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> Secret:
        """URL of the server."""
        return Secret(f"unix://{self._socket}", "{env: REDIS_URL}")

    def start(self) -> None:
        """Starts the empty server, and waits until it answers."""
        self._socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [self._program, "--port", "0", "--unixsocket", self._socket, "--dir", self._folder, *KEEPS_NOTHING],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        give_up_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self.kill()
                raise RuntimeError(f"{self._program} does not start. Run it by hand to see why.")
            time.sleep(0.01)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.settimeout(1.0)
                client.connect(str(self._socket))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False

    def command(self, *words: str) -> None:
        """Sends one command whose answer is a status."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5.0)
            client.connect(str(self._socket))
            client.sendall((" ".join(words) + "\r\n").encode())
            answer = client.recv(1024)
        assert answer.startswith(b"+"), answer

    def kill(self) -> None:
        """Kills the server as `kill -9` does, without notice to clients."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Freezes the server: connections stay open, but get no answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continues a frozen server."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """Runs a Redis server.

    Raises:
        ProgramMissing: Redis is not installed.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise ProgramMissing("redis-server is not installed; scripts/services.sh installs what is needed.")
    # Paths of sockets must be short, and a test's own folder may have a long path.
    with TemporaryDirectory(prefix="redis-", dir="/tmp") as folder:
        server = RedisServer(program, Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.kill()
