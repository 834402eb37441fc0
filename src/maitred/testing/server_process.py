"""A real `maitred serve` in its own process, for tests and benchmarks."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_S = 120.0
STOP_S = 60.0


class ServerProcess:
    """Process of a running server.

    Attributes:
        url: Where it listens, without a trailing slash.
        process: The gateway; its child is the engine.
        log: File with everything it has printed.
    """

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log

    def metrics(self) -> dict[str, float]:
        """Returns the samples of ``GET /metrics`` by name, summed over their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        sums: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                name = sample.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def stop(self) -> int:
        """Ends it as an operator would, with SIGTERM; the exit code. Kills it only when it does not end."""
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
                with urllib.request.urlopen(f"{self.url}/health/ready", timeout=5):
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
) -> Iterator[ServerProcess]:
    """Starts ``maitred serve`` on a free loopback port, waits until it is ready, and stops it at the end.

    Args:
        *arguments: For the command line, such as a model folder.
        settings: Dotted configuration keys and their values.
        environment: Variables on top of this process's own.
        program: What Python runs; it must take the same options.
    """
    with kept_port() as port, tempfile.TemporaryDirectory(prefix="maitred-") as folder:
        command: Sequence[str] = [
            *(sys.executable, *program, *arguments, "--port", str(port)),
            *(f"--set={key}={value}" for key, value in (settings or {}).items()),
        ]
        own = {"MAITRED__STORE__FOLDER": str(Path(folder) / "data")}  # nothing of earlier servers, nothing left
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
    """A loopback port for a server that is yet to start; until the block ends, the system gives it to nobody else.

    It is bound and not listened on, so the server can have it: servers bind with ``SO_REUSEADDR``. A port that was only
    looked for would be anybody's until the server listens, and of two that start at once both would bind it.
    """
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: then it might be another's
        yield int(reserved.getsockname()[1])


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ProgramMissing(RuntimeError):
    """A program is not installed on this machine. The message says how to get it."""
