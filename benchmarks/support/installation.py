"""One installation for benchmarks that break it: an engine that outlives its gateways, and what they share.

    client -> gateway 0 --+--> engine (scripted or real)
           -> gateway 1 --+--> Redis, PostgreSQL (if they are shared)

Every part is a real process. A gateway can be killed and started again: it comes back at its address, with its folder.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil

from maitred.core.parent_watch import LIFELINE_VARIABLE
from maitred.core.replica import LoadReport
from maitred.core.secret import Secret
from maitred.identity.keys import make_key
from maitred.replica.engine.client import EngineClient
from maitred.store.config import StoreConfig
from maitred.testing.postgres_server import postgres_server
from maitred.testing.redis_server import RedisServer, redis_server
from maitred.testing.script import EngineScript
from maitred.testing.server_process import free_port
from maitred.wire.address import Address, UnixAddress

MODEL = "maitred-tiny"
START_S = 120.0
STOP_S = 30.0


@dataclass
class Key:
    """A key that the configuration declares; its `secret` is made anew for each installation."""

    scopes: Sequence[str] = ("inference",)
    limits: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    secret: str = ""

    def __post_init__(self) -> None:
        made = make_key()
        self.id, self.secret = made.public_id, made.plaintext


@dataclass
class Organisation:
    """A tenant that the configuration declares."""

    keys: Mapping[str, Key]
    limits: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    teams: Mapping[str, "Organisation"] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What an installation consists of.

    Attributes:
        organisations: Id -> organisation.
        settings: Further sections of the configuration.
        script: Of the engine; None: the real one.
        engine_address: Of an engine that runs already; None: one is started.
        engine: Further arguments of the real one.
        gateways: How many.
        shared: Whether they share a Redis and a PostgreSQL; one gateway needs neither.
    """

    organisations: Mapping[str, Organisation]
    settings: Mapping[str, Any] = field(default_factory=dict)
    script: EngineScript | None = None
    engine_address: Address | None = None
    engine: Sequence[str] = ()
    gateways: int = 1
    shared: bool = False


class Gateway:
    """One `maitred serve`, at one address, over any number of lives."""

    def __init__(self, folder: Path, config: Path, environment: Mapping[str, str]) -> None:
        self.store_folder = folder / "data"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.log = folder / "serve.log"
        self.lives = 0
        self.controllers_killed = 0
        self._config = config
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Starts it, and waits until it is ready."""
        self._launch()
        self.lives += 1
        await self.until_ready()

    def _launch(self) -> None:
        command = [sys.executable, "-m", "maitred", "serve", "--port", str(self._port), "--config", str(self._config)]
        own = {"MAITRED__STORE__FOLDER": str(self.store_folder)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment, **own},
            )

    async def until_ready(self) -> None:
        """Waits until it would answer a request."""
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(self._ready):
                if self._process is None or self._process.poll() is not None:
                    raise RuntimeError(f"The gateway has ended. It printed:\n{self.log.read_text()[-3000:]}")
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        """As by ``kill -9``. Processes that it has started end with it, and let go of its address."""
        assert self._process is not None
        below = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(below, STOP_S)

    @property
    def controllers(self) -> list[psutil.Process]:
        """The process that decides for its workers, if it has any."""
        assert self._process is not None
        children = psutil.Process(self._process.pid).children()
        return [child for child in children if child.name() == "mtd-controller"]

    async def replace_controller(self) -> None:
        """Kills it, and waits for the next one."""
        (controller,) = self.controllers
        controller.kill()
        self.controllers_killed += 1
        await asyncio.to_thread(controller.wait, STOP_S)
        await self.until_ready()

    def stop(self) -> int:
        """Ends it as an operator would; the exit code."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None

    def get(self, path: str, key: str = "") -> bytes:
        """The body of an answer."""
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=30) as response:
            body: bytes = response.read()
        return body

    def metrics(self) -> dict[str, float]:
        """The samples of ``/metrics`` with their labels, as they stand there."""
        lines = self.get("/metrics").decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {sample: float(value) for sample, _, value in pairs}

    def _ready(self) -> bool:
        try:
            self.get("/health/ready")
        except (urllib.error.URLError, OSError):
            return False
        return True


class Installation:
    """What `installed` has started.

    Attributes:
        store: Where the ledger is, for whoever opens it besides the gateways.
        redis: If it is shared.
    """

    def __init__(
        self, engine: Address, gateways: Sequence[Gateway], store: StoreConfig, redis: RedisServer | None
    ) -> None:
        self.gateways = gateways
        self.store = store
        self.redis = redis
        self._engine = engine

    @asynccontextmanager
    async def engine_link(self) -> AsyncIterator[EngineClient]:
        """A connection of one's own to the engine, which reports every step to everyone."""
        link = EngineClient(self._engine)
        await link.connect(START_S)
        try:
            yield link
        finally:
            link.close()

    async def engine_load(self) -> LoadReport:
        """What the engine itself has counted since it started."""
        async with self.engine_link() as link:
            return link.load()


@asynccontextmanager
async def installed(plan: Plan) -> AsyncIterator[Installation]:
    """Starts all of it; nothing is left of it afterwards.

    Raises:
        ProgramMissing: Redis or PostgreSQL is not installed.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="maitred-", dir="/tmp")))
        environment: dict[str, str] = {}
        redis = database = None
        if plan.shared:
            redis = stack.enter_context(redis_server())
            database = stack.enter_context(postgres_server()).database()
            environment |= {"REDIS_URL": redis.url.reveal(), "DATABASE_URL": database}
        address = plan.engine_address or UnixAddress(str(folder / "engine.sock"))
        if plan.engine_address is None:
            _start_engine(plan, address, folder, stack)
        config = folder / "maitred.yaml"
        config.write_text(json.dumps(_config_of(plan, address, environment)))
        gateways = []
        for number in range(plan.gateways):
            own = folder / f"gateway-{number}"
            own.mkdir()
            gateway = Gateway(own, config, environment)
            gateways.append(gateway)
            stack.callback(gateway.stop)
            await gateway.start()
        store = StoreConfig(folder=str(gateways[0].store_folder))
        if database is not None:
            store = StoreConfig(folder=str(folder / "reader"), url=Secret(database, "{env: DATABASE_URL}"))
        yield Installation(address, gateways, store, redis)


def _start_engine(plan: Plan, address: Address, folder: Path, stack: AsyncExitStack) -> None:
    program = ["maitred", "engine", *plan.engine]
    if plan.script is not None:
        scripted = folder / "script.json"
        scripted.write_bytes(msgspec.json.encode(plan.script))
        program = ["maitred.testing.scripted_engine", "--script", f"@{scripted}"]
    with (folder / "engine.log").open("wb") as log:
        engine = subprocess.Popen(
            [sys.executable, "-m", *program, "--listen", str(address)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, LIFELINE_VARIABLE: "1"},
        )

    def end() -> None:
        engine.terminate()
        try:
            engine.wait(STOP_S)
        finally:
            engine.kill()
            engine.wait()

    stack.callback(end)


def declared(organisations: Mapping[str, Organisation], environment: dict[str, str]) -> dict[str, Any]:
    """The `tenants` section of a configuration; the secrets go into the environment."""
    tenants: dict[str, Any] = {}
    for id_, organisation in organisations.items():
        keys = {}
        for name, key in organisation.keys.items():
            variable = f"KEY_{id_}_{name}".upper().replace("-", "_")
            environment[variable] = key.secret
            keys[name] = {"secret": {"env": variable}, "scopes": list(key.scopes), "limits": dict(key.limits)}
        tenants[id_] = {"weight": organisation.weight, "limits": dict(organisation.limits), "keys": keys}
        if organisation.teams:
            tenants[id_]["teams"] = declared(organisation.teams, environment)
    return tenants


def _config_of(plan: Plan, engine: Address, environment: dict[str, str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "log": {"level": "warning"},
        **plan.settings,
        "model": {"engine_address": str(engine), "served_name": MODEL},
        "tenants": declared(plan.organisations, environment),
    }
    if plan.shared:
        config["store"] = {"url": {"env": "DATABASE_URL"}}
        config["counters"] = {**config.get("counters", {}), "url": {"env": "REDIS_URL"}}
    return config
