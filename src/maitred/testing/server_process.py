"""Server process: a real `maitred serve`, for tests and benchmarks."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

STORE_DEADLINE_S = 300.0
"""Time for one access to the store, unless a test sets another."""
READY_S = 300.0
STOP_S = 300.0
_UNASSIGNED_PORTS = range(15_000, 32_000)
"""Ports below Linux's default ``ip_local_port_range``."""


class ServerProcess:
    """Process of a running server.

    Attributes:
        url: Address that it listens at, without a trailing slash.
        process: Process of the gateway; its child is the engine.
        log: File with all output of the process.
    """

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log

    def metrics(self) -> dict[str, float]:
        """Returns the samples of ``GET /metrics`` by name, summed over their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=300) as response:
            lines = response.read().decode().splitlines()
        sums: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                name = sample.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def stop(self) -> int:
        """Stops it with SIGTERM (SIGKILL if it does not end), and returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health/ready", timeout=300):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RuntimeError(f"maitred serve did not become ready. It printed:\n{self.log.read_text()}")


@contextmanager
def serving(
    *arguments: str,
    settings: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "maitred", "serve"),
    python: str = sys.executable,
) -> Iterator[ServerProcess]:
    """Starts ``maitred serve`` on a free loopback port, waits until it is ready, and stops it at the end.

    Args:
        *arguments: Arguments for the command line, such as a model folder.
        settings: Dotted configuration keys and their values.
        environment: Environment variables in addition to those of this process.
        program: Program that Python runs; it must accept the same options.
        python: The Python; by default, the one that runs this.
    """
    with kept_port() as port, tempfile.TemporaryDirectory(prefix="maitred-") as folder:
        command: Sequence[str] = [
            *(python, *program, *arguments, "--port", str(port)),
            *(f"--set={key}={value}" for key, value in (settings or {}).items()),
        ]
        # No settings of earlier servers, nothing left behind, and time for a start on a crowded machine; the bundled
        # model, whatever else is installed
        own = {
            "MAITRED_TINY": "1",
            "MAITRED__STORE__FOLDER": str(Path(folder) / "data"),
            "MAITRED__STORE__DEADLINE_S": str(STORE_DEADLINE_S),
        }
        log = Path(folder) / "serve.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **(environment or {})},
                cwd=folder,
            )
        server = ServerProcess(f"http://127.0.0.1:{port}", process, log)
        try:
            server._wait_until_ready()
            yield server
        finally:
            server.stop()


@contextmanager
def kept_port() -> Iterator[int]:
    """Reserves a loopback port for a server that starts later, until the context ends.

    The port is bound without listening, so the server can bind it too with ``SO_REUSEADDR``. A port that is only looked
    up could be taken by another process before the server listens, and two servers that start at once could both bind
    it.
    """
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        # Only now: earlier, the port could belong to another process
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(reserved.getsockname()[1])


def free_port() -> int:
    """Returns a loopback port that is free now, and that Linux gives to nobody who asks for any port."""
    while True:
        port = secrets.choice(_UNASSIGNED_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ProgramMissing(RuntimeError):
    """Error: a program is not installed on this machine; the message says how to install it."""
