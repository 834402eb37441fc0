"""Installation under test, from its start to its end; or an installation that runs already."""

import asyncio
import os
import secrets
import shlex
import signal
import socket
import tempfile
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from textwrap import indent
from types import TracebackType

import aiohttp
import psutil

from maitred.core.errors import ConfigInvalid, Unavailable
from maitred.load.chaos import plan as plans
from maitred.load.chaos.clock import FakeClock
from maitred.load.chaos.link import TcpLink
from maitred.load.chaos.processes import Processes

LAST_LINES = 20
POLL_S = 0.05
ORPHAN_S = 8.0
"""Time for child processes to end after the started process; maitred's engine allows itself 5 s."""
_UNASSIGNED_PORTS = range(15_000, 32_000)
"""Ports below Linux's default ``ip_local_port_range``."""


class RunningInstallation:
    """Installation of a plan. Entering starts it and waits until it is ready; leaving stops it.

    Args:
        installation: Section `installation` of the plan.
        clock: Fake clock, if the plan makes the clock jump.

    Attributes:
        url: Address of the server itself, without any link in between.
        clients_url: Address that the load is sent to.
        links: TCP links by name.
        processes: Processes of the installation by role.
        log: Output of the started process.
        exit_code: Exit code of the started process after the end; None: chaos did not start it, or had to kill it.
        leftovers: Command lines of the processes that it left behind, after the end.
    """

    def __init__(self, installation: plans.Installation, *, clock: FakeClock | None = None) -> None:
        self._plan = installation
        self.clock = clock
        self._process: Process | None = None
        self._seen: set[psutil.Process] = set()
        self._stack = AsyncExitStack()
        self._port = free_port() if installation.serve and "{port}" in installation.serve else None
        self.url = (installation.url or f"http://127.0.0.1:{self._port}").rstrip("/").removesuffix("/v1")
        self.clients_url = self.url
        self.links: dict[str, TcpLink] = {}
        self.processes = Processes(plans.roles(installation), lambda: self.pid)
        self.log = Path(os.devnull)
        self.exit_code: int | None = None
        self.leftovers: list[str] = []

    @property
    def pid(self) -> int | None:
        """The gateway's process id; None while it does not run."""
        if self._plan.serve is None:
            return self._plan.pid
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def started_here(self) -> bool:
        """Whether chaos starts and stops the installation."""
        return self._plan.serve is not None

    async def __aenter__(self) -> "RunningInstallation":
        try:
            own = self.url.partition("://")[2]
            own = own if ":" in own else f"{own}:80"
            for name, link in self._plan.links.items():
                self.links[name] = await self._stack.enter_async_context(TcpLink(link.listen, link.to or own))
            if self._plan.clients_through is not None:
                self.clients_url = f"http://{self.links[self._plan.clients_through].address}"
            if self.started_here:
                folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="maitred-chaos-"))
                self.log = Path(folder) / "serve.log"
                await self.start()
            await self.wait_until_ready()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def start(self) -> None:
        """Starts the process; also restarts it after a kill.

        Raises:
            ConfigInvalid: The system cannot run the command.
        """
        assert self._plan.serve is not None
        environment: Mapping[str, str] = self.clock.environment() if self.clock is not None else {}
        with self.log.open("ab") as output:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command(self._plan.serve),
                    stdin=DEVNULL,
                    stdout=output,
                    stderr=STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,  # Ctrl-C is for the tester, which stops the process in order
                )
            except OSError as error:
                raise ConfigInvalid(f"installation.serve: the command cannot be run: {error}.") from None

    async def wait_until_ready(self) -> None:
        """Waits until the server reports that it is ready for requests.

        Raises:
            Unavailable: The process ended, or it was not ready in time; the message has its last lines.
        """
        address = self.url + self._plan.ready
        deadline_s = time.monotonic() + self._plan.start_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() < deadline_s:
                if self._process is not None and self._process.returncode is not None:
                    raise Unavailable(f"The installation ended with {self._process.returncode}.{self._obituary()}")
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(address) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(POLL_S)
        raise Unavailable(f"{address} did not answer 200 within {self._plan.start_s:g} s.{self._obituary()}")

    def note_processes(self) -> None:
        """Notes the current processes, to check at the end whether all of them have ended."""
        if self.started_here:
            self._seen.update(self.processes.tree())

    async def stop(self) -> None:
        """Stops the started process by SIGTERM, or by SIGKILL if needed. A second call does nothing."""
        process = self._process
        if process is None:
            return
        self.note_processes()
        self._process = None
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._plan.stop_s):
                    self.exit_code = await process.wait()
            except TimeoutError:
                self.leftovers.append(f"it did not end within {self._plan.stop_s:g} s and was killed")
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        else:
            self.exit_code = process.returncode
        await self._end_orphans()

    def last_lines(self) -> str:
        """Returns the last lines that the installation printed; empty if chaos did not start it."""
        text = self.log.read_text(errors="replace") if self.log.is_file() else ""
        return "\n".join(text.strip().splitlines()[-LAST_LINES:])

    def _obituary(self) -> str:
        lines = self.last_lines()
        return f" It printed last:\n{indent(lines, '  ')}" if lines else " It printed nothing."

    def _command(self, command: str) -> list[str]:
        filled = command.replace("{port}", str(self._port))
        for name, link in self.links.items():
            filled = filled.replace(f"{{link.{name}}}", link.address)
        return shlex.split(filled)

    async def _end_orphans(self) -> None:
        deadline_s = time.monotonic() + ORPHAN_S
        while any(map(_alive, self._seen)) and time.monotonic() < deadline_s:  # noqa: ASYNC110 - they are not ours
            await asyncio.sleep(POLL_S)
        for process in filter(_alive, self._seen):
            with suppress(psutil.Error):
                self.leftovers.append(f"process {process.pid} outlived it: {shlex.join(process.cmdline())[:100]}")
                process.kill()

    async def _end(self) -> None:
        try:
            await self.stop()
        finally:
            await self._stack.aclose()


def free_port() -> int:
    """Returns a loopback port that is free now, and that Linux gives to nobody who asks for any port."""
    while True:
        port = secrets.choice(_UNASSIGNED_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
