"""A gateway whose own CPU time and memory are measured, before a replica that answers at once.

Gateways run on one core, and everything else (clients, replica, this process) on another where the machine has two, so
that neither waits for the other. CPU time is that of the gateway's process with all its threads, in nanoseconds, so it
holds what is done off the path of requests too, such as the batches of the ledger.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from maitred.core.request import EngineRequest
from maitred.testing.script import ScriptedAnswer
from maitred.testing.scripted_engine import ScriptedEngine
from maitred.testing.server_process import ServerProcess, serving
from maitred.wire.address import UnixAddress

MODEL = "instant"
ROOT = Path(__file__).parents[3]
SERVE = ("-m", "maitred", "serve")
_CPU_CLOCK = 2
"""Of a process: what `clock_getcpuclockid` adds to its id."""


class InstantReplica(ScriptedEngine):
    """Answers every request with the same tokens, in one step, and keeps nothing of it."""

    def __init__(self, address: UnixAddress, *, tokens: int) -> None:
        super().__init__(address=address)
        self._answer = ScriptedAnswer(tokens=list(range(300, 300 + tokens)), tokens_per_step=tokens)

    def answer_to(self, request: EngineRequest) -> ScriptedAnswer:
        """See `ScriptedEngine.answer_to`."""
        return self._answer


class MeasuredGateway:
    """One that runs.

    Attributes:
        port: Where it listens.
        start_s: From starting the process to its readiness.
    """

    def __init__(self, server: ServerProcess, start_s: float) -> None:
        self.port = int(server.url.rpartition(":")[2])
        self.url = server.url
        self.start_s = start_s
        self._pid = server.process.pid

    def cpu_s(self) -> float:
        """CPU time of the process up to now."""
        return time.clock_gettime((~self._pid << 3) | _CPU_CLOCK)

    def rss_mib(self) -> float:
        """Memory that it holds now."""
        return float(psutil.Process(self._pid).memory_info().rss) / 2**20


@asynccontextmanager
async def gateway(
    config: Path, environment: Mapping[str, str], program: Sequence[str] = SERVE, *settings: str
) -> AsyncIterator[MeasuredGateway]:
    """Starts one and stops it at the end.

    Args:
        config: Its configuration.
        environment: With the secrets that the configuration refers to.
        program: What Python runs.
        *settings: More of its command line.
    """
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))), **environment}
    started_s = time.perf_counter()
    # The replica is in this process, and a gateway is not ready before it has met its replica.
    context = serving("--config", str(config), *settings, environment=paths, program=program)
    server = await asyncio.to_thread(context.__enter__)
    try:
        start_s = time.perf_counter() - started_s
        apart(server.process.pid)
        yield MeasuredGateway(server, start_s)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def apart(pid: int) -> None:
    """Gives a gateway the first core, and this process the others."""
    cores = sorted(os.sched_getaffinity(pid))
    if len(cores) > 1:
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, cores[:1])
        os.sched_setaffinity(0, cores[1:])


def write_config(path: Path, replica: UnixAddress, **sections: Any) -> None:  # noqa: ANN401 - any section
    """Writes a configuration that serves the replica; YAML reads JSON."""
    path.write_text(
        json.dumps(
            {
                "log": {"level": "warning"},
                "model": {"engine_address": str(replica), "served_name": MODEL},
                **sections,
            }
        )
    )
