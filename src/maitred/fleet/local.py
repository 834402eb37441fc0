"""Engine on this machine: a separate process that is kept alive, behind one client.

    starting --hello--> ready --end of stream | silence--> dead --back-off--> starting

The first start is different from all later ones. If it fails, the command or the model is wrong, and `wait_started`
raises an error with the engine's last output. Once the engine has been ready, or while others serve its model, every
death is followed by a new start.
"""

import asyncio
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from maitred.core.clock import Clock, SystemClock
from maitred.core.errors import ReplicaUnavailable
from maitred.core.flow import ServiceWeights
from maitred.core.replica import ModelCard
from maitred.engine.config import EngineConfig
from maitred.fleet.process import Backoff, EngineArgs, EngineProcess
from maitred.observe.config import LogConfig
from maitred.replica.engine.client import EngineClient
from maitred.scaling.replica_status import ReplicaPhase
from maitred.wire.address import Address, parse_address
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import Credentials

ENGINE_MODULE = "maitred.cli.local_engine"
"""Module that the processes of this installation's engines run."""

MIN_READY_S = 1.0
"""Least result of `predicted_ready_s` while the engine is down.

A start that takes longer than the last one is not yet over, so the prediction is never zero.
"""

MAX_PAUSE_ALONE_S = 5.0
"""Longest pause before a new start while no other engine serves the model: callers wait for this engine then."""
_OTHERS_POLL_S = 1.0
"""Interval at which a long pause checks whether another engine still serves the model."""

EXIT_WAIT_S = 1.0
"""Longest time between the end of the connection and the exit of a process that died, in either order."""

SOCKET_NAME = "engine.sock"
_FOLDER_NAME = re.compile(r"maitred-(\d+)-[0-9a-f]{16}")

_log = logging.getLogger(__name__)


def engine_phase(client: EngineClient, failure_reason: str) -> ReplicaPhase:
    """Returns the phase of an engine that its owner keeps alive or connected."""
    if client.is_ready:
        return ReplicaPhase.SERVING
    return ReplicaPhase.FAILED if failure_reason else ReplicaPhase.STARTING


CommandFactory = Callable[[str], Sequence[str]]
"""Returns the program and its arguments for a given listening address."""


def engine_command(
    model: Path,
    config: EngineConfig,
    weights: ServiceWeights = ServiceWeights(),  # noqa: B008 - frozen
    log: LogConfig = LogConfig(),  # noqa: B008 - frozen
    *,
    link: LinkConfig | None = None,
    region: str | None = None,
) -> CommandFactory:
    """Makes the command of this installation's engine.

    Every setting is passed, so the engine runs with the gateway's settings even if a file or the environment has
    changed since.
    """
    log = msgspec.structs.replace(log, format="json")
    settings = EngineArgs(engine=config, service=weights, log=log, link=link, region=region).encode()
    return lambda address: [sys.executable, "-m", ENGINE_MODULE, str(model), address, settings]


def _remove_stale_folders() -> None:
    """Removes the folders of gateways that were killed and could not do so themselves."""
    for folder in Path(tempfile.gettempdir()).glob("maitred-*"):
        match = _FOLDER_NAME.fullmatch(folder.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)  # folders of other users stay


def socket_address(folder: Path) -> Address:
    """Returns the address of the engine whose socket is in a folder."""
    return parse_address(f"unix:{folder / SOCKET_NAME}")


class LinkAddress(NamedTuple):
    """Address of an engine, with the credentials of this process there."""

    address: Address
    credentials: Credentials


class LocalEngine:
    """Supervisor of one engine process. Entering starts the engine; leaving stops it.

    Entering does not wait: the engine loads its model while the gateway already listens and rejects requests with a
    realistic `Retry-After`. To wait for the engine, or to learn why it cannot start, await `wait_started`.

    Args:
        command: Returns the command to run, such as `engine_command(model, config)`.
        environment: Variables for the engine in addition to the gateway's own.
        start_timeout_s: Time limit from the start of the process to its hello.
        stop_grace_s: Time from SIGTERM to SIGKILL. By then the gateway has drained; there is no work to wait for. An
            engine that hangs gets none.
        expected_start_s: Expected time of a start before one has been measured.
        backoff: Decides when to start again after a death.
        silence_timeout_s: Time after which an engine that sends nothing is ended and started again; None: it never is.
        others_serve: Returns whether other engines serve the model now, so that a pause before a new start may be long.
        retries_first: Returns whether a first start that fails is tried again too; by default it is while others serve.
        clock: Measures starts and lives.
        sleep: Waits for the back-off to pass.
        listens_at: Where the engine listens: in a folder that no other user may enter, which this class makes and
            removes; or at an address. None: in a new folder.

    Attributes:
        client: The replica. It stays the same over restarts.
        restarts: Starts after the first one.
        failure_reason: Reason of the last death until the next start begins; empty otherwise.
        on_transition: Called when a start begins, and when the engine is ready or has died.
        check_process: Called with the process id of an engine that is ready, before it gets a request; raises
            ReplicaUnavailable to end it.
    """

    def __init__(
        self,
        command: CommandFactory,
        *,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 600.0,
        stop_grace_s: float = 5.0,
        expected_start_s: float = 10.0,
        backoff: Backoff | None = None,
        silence_timeout_s: float | None = None,
        others_serve: Callable[[], bool] = lambda: False,
        retries_first: Callable[[], bool] | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        listens_at: Path | LinkAddress | None = None,
    ) -> None:
        self._command = command
        self._environment = environment or {}
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._expected_start_s = expected_start_s
        self._backoff = backoff or Backoff()
        self._others_serve = others_serve
        self._retries_first = retries_first or others_serve
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._ready_at_s = self._clock.monotonic_s() + expected_start_s
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._first_start: asyncio.Future[None] | None = None
        # No other user can enter a folder with mode 0700, and mkdir fails if another process made the folder first.
        self._folder_may_exist = isinstance(listens_at, Path)
        new_folder = Path(tempfile.gettempdir()) / f"maitred-{os.getpid()}-{secrets.token_hex(8)}"
        self._folder = listens_at if isinstance(listens_at, Path) else new_folder
        self._address, credentials = (
            listens_at
            if isinstance(listens_at, LinkAddress)
            else LinkAddress(socket_address(self._folder), Credentials())
        )
        self.client = EngineClient(
            self._address,
            expected_downtime_s=self.predicted_ready_s,
            credentials=credentials,
            silence_timeout_s=silence_timeout_s,
            check_card=self._check_card,
        )
        self.restarts = 0
        self.failure_reason = ""
        self.on_transition: Callable[[], None] = lambda: None
        self.check_process: Callable[[int], None] = lambda pid: None

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while no process runs."""
        return None if self._process is None else self._process.pid

    @property
    def phase(self) -> ReplicaPhase:
        """Phase of its process: starting, serving, or failed until the next start begins."""
        return engine_phase(self.client, self.failure_reason)

    def predicted_ready_s(self) -> float:
        """Returns the seconds until the engine should be ready.

        The prediction adds the remaining back-off and the last measured start.
        """
        if self.client.is_ready:
            return 0.0
        return max(MIN_READY_S, self._ready_at_s - self._clock.monotonic_s())

    async def wait_started(self) -> None:
        """Waits until the engine has been ready once.

        Raises:
            ReplicaUnavailable: The first start failed; the message holds the engine's last lines.
        """
        assert self._first_start is not None, "enter the engine first"
        await asyncio.shield(self._first_start)

    async def __aenter__(self) -> "LocalEngine":
        _remove_stale_folders()
        self._folder.mkdir(mode=0o700, exist_ok=self._folder_may_exist)
        self._first_start = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(self._first_start), name="engine supervisor")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._supervisor is not None
        self._supervisor.cancel()
        try:
            await asyncio.wait({self._supervisor})
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        if error is None and not self._supervisor.cancelled():
            self._supervisor.result()  # an error of the supervisor itself must be raised

    # --- the supervisor ---

    async def _supervise(self, first_start: asyncio.Future[None]) -> None:
        try:
            while True:
                try:
                    ready_s, reason = await self._run_once(first_start)
                except Exception as error:  # whatever it is, nobody would start the engine again
                    _log.exception("The supervisor of the engine has failed, and starts it again.")
                    ready_s, reason = 0.0, f"Its supervisor has failed: {error}"
                self.failure_reason = reason
                if not first_start.done() and not self._retries_first():
                    raise ReplicaUnavailable(f"The engine did not start: {reason}")
                wait_s = self._backoff.wait_s(ready_s)
                _log.error("%s\nIt was ready for %.1f s and is started again in %.1f s.", reason, ready_s, wait_s)
                self._ready_at_s = self._clock.monotonic_s() + wait_s + self._expected_start_s
                self.on_transition()
                await self._wait_backoff(wait_s)
                self.restarts += 1
                self.failure_reason = ""
                self.on_transition()
        except Exception as error:
            if first_start.done():
                raise
            first_start.set_exception(error)
            first_start.exception()  # marked as retrieved: `wait_started` need not be awaited
        finally:
            first_start.cancel()

    async def _wait_backoff(self, wait_s: float) -> None:
        """Waits for the back-off to pass, but no longer than `MAX_PAUSE_ALONE_S` while no other engine serves."""
        pause_s = min(wait_s, MAX_PAUSE_ALONE_S)
        while pause_s > 0:
            await self._sleep(pause_s)
            wait_s -= pause_s
            pause_s = min(wait_s, _OTHERS_POLL_S) if self._others_serve() else 0.0

    async def _run_once(self, first_start: asyncio.Future[None]) -> tuple[float, str]:
        """Runs one life of the engine, from start to death.

        Returns:
            The seconds for which the engine was ready, and the reason of its end.
        """
        self._remove_socket()
        started_s = self._clock.monotonic_s()
        try:
            process = await EngineProcess.start(self._command(str(self._address)), self._environment)
        except OSError as error:
            return 0.0, f"The system cannot run its command: {error}"
        self._process = process
        self.client.start_id = process.start_id
        grace_s = self._stop_grace_s
        try:
            await self._connect(process)
            ready_since_s = self._clock.monotonic_s()
            self._expected_start_s = ready_since_s - started_s
            _log.info("The engine (pid %d) was ready after %.1f s.", process.pid, self._expected_start_s)
            if not first_start.done():
                first_start.set_result(None)
            self.on_transition()
            reason = self.failure_reason = await self._wait_lost(process)
            self.on_transition()
            ready_s = self._clock.monotonic_s() - ready_since_s
            self._ready_at_s = ready_since_s + ready_s + self._expected_start_s
            await asyncio.wait({process.exited}, timeout=EXIT_WAIT_S)
            grace_s = 0.0  # It lives without its connection: it hangs, and callers wait for the next one.
        except (ReplicaUnavailable, OSError) as failure:
            ready_s, reason = 0.0, str(failure)
        finally:
            self.client.close()
            await process.stop(grace_s)
            self._process = None
        return ready_s, f"{reason}\n{process.exit_reason()}"

    def _remove_socket(self) -> None:
        """Removes the socket that a killed engine has left, so that the next engine can bind its own."""
        (self._folder / SOCKET_NAME).unlink(missing_ok=True)

    async def _connect(self, process: EngineProcess) -> None:
        """Connects the client, unless the process exits before.

        Raises:
            ReplicaUnavailable: The process exited, sent no hello in time, or is not an engine of this version.
            OSError: Its address cannot be looked up, or the connection broke off.
        """
        connecting = asyncio.create_task(self.client.connect(self._start_timeout_s), name="engine hello")
        try:
            await asyncio.wait({connecting, process.exited}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise ReplicaUnavailable("It exited before it listened.")
            connecting.result()
        finally:
            connecting.cancel()

    async def _wait_lost(self, process: EngineProcess) -> str:
        """Waits until the connection or the process has ended; returns the reason, with the connection closed."""
        losing = asyncio.create_task(self.client.wait_lost(), name="engine lost")
        try:
            await asyncio.wait({losing, process.exited}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({losing}, timeout=EXIT_WAIT_S)
            self.client.close()  # something else may hold the connection of a process that is gone
            return losing.result() if losing.done() else "its process has exited"
        finally:
            losing.cancel()

    def _check_card(self, card: ModelCard) -> None:
        assert self._process is not None
        self.check_process(self._process.pid)
