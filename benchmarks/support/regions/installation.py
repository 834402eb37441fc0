"""What runs in the regions: an agent with an engine and a gateway in each, Redis and PostgreSQL in the first of them.

Each agent dials the gateways of all regions; the gateway of its own region orders its engine.

Redis and PostgreSQL listen on Unix sockets, which every namespace sees; so that the lines between the regions decide
who reaches them, gateways know only an address of the first region, from which bytes are passed on.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.support.installation import MODEL, START_S, Key, Organisation, declared
from benchmarks.support.regions.namespaces import RegionNetwork, end_process, inside
from maitred.testing.postgres_server import PostgresServer, postgres_server
from maitred.testing.redis_server import redis_server

GATEWAY_PORT, ENGINE_PORT, AGENT_PORT, REDIS_PORT, POSTGRES_PORT = 8000, 9100, 9300, 6379, 5432
_CHUNK_BYTES = 65_536
_KILL_S = 10.0


class Region:
    """One region: its agent with an engine, its gateway, and how to ask it.

    Attributes:
        joined_s: From the start of its gateway until it was ready.
    """

    def __init__(
        self,
        name: str,
        network: RegionNetwork,
        folder: Path,
        config: Path,
        environment: Mapping[str, str],
        operator: str,
    ) -> None:
        self.name = name
        self.namespace = network.regions[name]
        self.address = network.address(name)
        self.joined_s = 0.0
        self._network, self._folder, self._config, self._environment = network, folder, config, environment
        self._operator = operator
        self._agent: subprocess.Popen[bytes] | None = None
        self._processes = ExitStack()

    def start_agent(self, secret: Path, sequences: int) -> None:
        """Starts the agent, which dials all gateways; it is not awaited."""
        words = ["agent", "--name", self.name, "--region", self.name, "--zone", self.name, "--max-replicas", "1"]
        place = ["--listen-host", self.address, "--first-port", str(ENGINE_PORT)]
        gateways = [f"--gateway={self._network.address(region)}:{AGENT_PORT}" for region in self._network.regions]
        settings = {
            "engine_link.secret.file": secret,
            "engine_link.allow_plaintext": "true",
            "engine.max_sequences": sequences,
            "engine.threads": 1,
            "engine.kv_memory_bytes": "64MiB",
            "engine.guests": 0,
        }
        given = [f"--set={key}={value}" for key, value in settings.items()]
        self._agent = self._start("agent", [*words, *place, *gateways, *given])

    def start_gateway(self) -> None:
        """Starts the gateway, and waits until it is ready."""
        began_s = time.monotonic()
        words = ["serve", "--host", self.address, "--port", str(GATEWAY_PORT), "--config", str(self._config)]
        settings = [f"--set=region={self.name}", f"--set=agents.listen=tcp:{self.address}:{AGENT_PORT}"]
        process = self._start("gateway", [*words, *settings])
        while not self.is_ready():
            if process.poll() is not None or time.monotonic() - began_s > START_S:
                raise RuntimeError(f"A gateway does not start:\n{self.log('gateway')}")
            time.sleep(0.05)
        self.joined_s = time.monotonic() - began_s

    def _start(self, program: str, words: Sequence[str]) -> "subprocess.Popen[bytes]":
        self._folder.mkdir(exist_ok=True)
        command = self._network.command(self.name, [sys.executable, "-m", "maitred", *words])
        own = {"MAITRED__STORE__FOLDER": str(self._folder / "data")}
        with (self._folder / f"{program}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment, **own},
                cwd=self._folder,
            )
        self._processes.callback(end_process, process)
        return process

    def log(self, program: str) -> str:
        """Returns the end of what a program printed."""
        return (self._folder / f"{program}.log").read_text()[-3000:]

    def kill_engine(self) -> None:
        """Kills the engine as ``kill -9`` does; its agent starts it again."""
        assert self._agent is not None
        (engine,) = [
            child
            for child in psutil.Process(self._agent.pid).children(recursive=True)
            if any("local_engine" in word for word in child.cmdline())
        ]
        engine.kill()
        engine.wait(_KILL_S)

    def get(self, path: str) -> bytes:
        """Returns the body of an answer of the gateway."""
        request = urllib.request.Request(self.url(path), headers={"authorization": f"Bearer {self._operator}"})
        with inside(self.namespace), urllib.request.urlopen(request, timeout=30) as response:
            body: bytes = response.read()
        return body

    def url(self, path: str) -> str:
        """Returns the URL of a path of the gateway."""
        return f"http://{self.address}:{GATEWAY_PORT}{path}"

    def is_ready(self) -> bool:
        """Whether the gateway would answer a request."""
        try:
            self.get("/health/ready")
        except OSError:
            return False
        return True

    def is_whole(self) -> bool:
        """Whether nothing is away for the gateway."""
        try:
            return bool(json.loads(self.get("/health/ready"))["status"] == "ok")
        except OSError:
            return False

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        lines = self.get("/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].split(" ")[0] == name)

    def stop(self) -> None:
        """Ends all processes."""
        self._processes.close()


@contextmanager
def regions_installed(
    network: RegionNetwork,
    organisations: Mapping[str, Organisation],
    settings: Mapping[str, Any],
    *,
    sequences: int,
) -> Iterator[tuple[dict[str, Region], PostgresServer, str]]:
    """Starts everything, and yields the regions, the database server and the name of the database.

    Raises:
        ProgramMissing: Redis or PostgreSQL is not installed.
    """
    first = next(iter(network.regions))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="maitred-", dir="/tmp")))
        redis = stack.enter_context(redis_server())
        postgres = stack.enter_context(postgres_server())
        database = postgres.database().rpartition("/")[2]
        home = network.address(first)
        pass_on(network.regions[first], home, REDIS_PORT, redis.url.reveal().removeprefix("unix://"), stack)
        pass_on(network.regions[first], home, POSTGRES_PORT, str(postgres.socket), stack)
        secret = folder / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        environment: dict[str, str] = {}
        operator = Key(scopes=["admin"])
        config = folder / "maitred.yaml"
        text = {
            "log": {"level": "warning"},
            **settings,
            "engine_link": {"secret": {"file": str(secret)}, "allow_plaintext": True},
            "model": {"backend": "agents", "replicas": 1, "served_name": MODEL},
            "store": {"url": f"postgresql://maitred@{home}:{POSTGRES_PORT}/{database}"},
            "counters": {"url": f"redis://{home}:{REDIS_PORT}/0", **settings.get("counters", {})},
            "tenants": declared({**organisations, "staff": Organisation({"operator": operator})}, environment),
        }
        for number, part in enumerate(("store", "counters")):
            environment[f"URL_{number}"] = text[part]["url"]
            text[part] = {**text[part], "url": {"env": f"URL_{number}"}}
        config.write_text(json.dumps(text))
        regions = {
            name: Region(name, network, folder / name, config, environment, operator.secret) for name in network.regions
        }
        for region in regions.values():
            stack.callback(region.stop)
            region.start_agent(secret, sequences)
        for region in regions.values():
            region.start_gateway()
        yield regions, postgres, database


def pass_on(namespace: str, address: str, port: int, path: str, stack: ExitStack) -> None:
    """Passes the bytes of every connection to an address on to a Unix socket, in threads of this process."""
    with inside(namespace):
        listener = socket.create_server((address, port))
    stack.callback(listener.close)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server = socket.socket(socket.AF_UNIX)
                server.connect(path)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=_copy, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
