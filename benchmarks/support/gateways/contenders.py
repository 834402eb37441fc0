"""A gateway that is compared with others: how it is started, and what its processes take.

`benchmarks.support.gateways.gateway_set` lists them.
"""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from maitred.identity.keys import make_key
from maitred.testing.server_process import free_port

ROOT = Path(__file__).parents[3]
KEY = make_key().plaintext
STOP_S = 10.0
_CPU_CLOCK = 2
"""Of a process: what `clock_getcpuclockid` adds to its id."""


@dataclass(frozen=True)
class Place:
    """Where one is started: its folder, its port, and the server that it passes requests on to."""

    folder: Path
    port: int
    upstream: int

    @property
    def upstream_url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.upstream}"


@dataclass(frozen=True)
class Contender:
    """One gateway.

    Attributes:
        name: For `--gateways`.
        how: What is configured, in words.
        command: Starts it; writes its configuration first.
        environment: Variables for its process.
        headers: Of every request, beside the key.
        installed: Whether it can take part.
        install: Installs it; None: it comes with us, or with the system.
        checks_keys: Whether it refuses a key that it does not know.
        cores: That it may use, from the first one on.
    """

    name: str
    how: Callable[[], str]
    command: Callable[[Place], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    headers: Callable[[Place], Mapping[str, str]] = lambda _: {}
    installed: Callable[[], bool] = lambda: True
    install: Callable[[], None] | None = None
    checks_keys: bool = True
    cores: int = 1


class Running:
    """A gateway's processes.

    Attributes:
        contender: Which one.
        port: Where it listens.
        headers: Of every request, beside the key.
    """

    def __init__(self, contender: Contender, folder: Path, upstream: int) -> None:
        folder.mkdir()
        place = Place(folder, free_port(), upstream)
        self.contender = contender
        self.port = place.port
        self.headers = contender.headers(place)
        self.log = folder / "log"
        cores = sorted(os.sched_getaffinity(0))[: contender.cores]
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "BENCH_KEY": KEY}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, cores)), *contender.command(place)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **paths, **contender.environment},
                cwd=folder,
            )

    def __enter__(self) -> "Running":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What has ended by itself has been waited for, and is no process any more.
        if not self.ended:
            processes = self.processes()
            self._process.terminate()
            _, left = psutil.wait_procs(processes, STOP_S)
            for process in left:
                process.kill()
        self._process.wait()

    def cpu_s(self) -> float:
        """CPU time of its processes up to now."""
        return sum(time.clock_gettime((~process.pid << 3) | _CPU_CLOCK) for process in self.processes())

    def memory_mib(self) -> float:
        """What they hold now; of what they share, each its part."""
        return float(sum(process.memory_full_info().pss for process in self.processes())) / 2**20

    @property
    def ended(self) -> bool:
        """Whether it is over with it."""
        return self._process.poll() is not None

    def last_words(self) -> str:
        """What it printed last."""
        return self.log.read_text(errors="replace")[-1500:]

    def processes(self) -> list[psutil.Process]:
        """The one that was started, and its children."""
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]
