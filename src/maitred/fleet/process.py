"""One life of an engine process: started, listened to, ended.

Three things a bare subprocess lacks:

- It cannot outlive us. Its standard input is a pipe that we never write to; the engine ends at the end of that file
  (see `core.lifeline`), which comes however we die.
- It has a session of its own, so that Ctrl-C in a terminal reaches the gateway alone, which lets running answers
  finish before it stops the engine.
- What it prints goes line by line to our log (see `printed`), and the last lines are kept to explain its death.
"""

import asyncio
import logging
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec import Struct

from maitred.core.backoff import BackoffCeiling
from maitred.core.flow import ServiceWeights
from maitred.core.parent_watch import LIFELINE_VARIABLE
from maitred.engine.config import EngineConfig
from maitred.fleet.engine_log import log_line
from maitred.observe.config import LogConfig

LAST_LINES = 20
MAX_LINE_BYTES = 16 * 1024
"""A longer line is cut into several."""

_OUTPUT_GRACE_S = 1.0
"""For the last output of a dead process; only a grandchild that holds the pipe open makes it last."""

_log = logging.getLogger(__name__)


class EngineProcess:
    """A running child. Made by `start`, and over after `stop`, which must be awaited.

    Attributes:
        exited: Done with the exit status (negative: the signal that killed it).
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._stopped = False
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.exited = asyncio.create_task(process.wait(), name=f"engine {process.pid}: exit")
        self._output = asyncio.create_task(self._forward_output(), name=f"engine {process.pid}: output")

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> "EngineProcess":
        """Starts the command with these variables in addition to our own.

        Raises:
            OSError: The system cannot run it.
        """
        spawning = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, LIFELINE_VARIABLE: "1"},
                start_new_session=True,
            ),
            name="engine spawn",
        )
        try:
            return cls(await asyncio.shield(spawning))
        except asyncio.CancelledError:
            # A spawn that is cut off half-way would leave a process that nobody owns; it takes milliseconds to let
            # it finish.
            with suppress(OSError):
                await cls(await spawning).stop(grace_s=0)
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def stop(self, grace_s: float) -> None:
        """Ends it: SIGTERM, and SIGKILL for one that has not exited after `grace_s`. Returns when it is gone."""
        self._stopped = not self.exited.done()
        try:
            self._signal(signal.SIGTERM)
            await asyncio.wait({self.exited}, timeout=grace_s)
        finally:  # also when we are cancelled while we wait
            if not self.exited.done():
                _log.warning("The engine (pid %d) does not stop; it is killed.", self.pid)
            self._signal(signal.SIGKILL)
            if self._process.stdin is not None:
                self._process.stdin.close()
        await self.exited
        await asyncio.wait({self._output}, timeout=_OUTPUT_GRACE_S)
        self._output.cancel()

    def exit_reason(self) -> str:
        """How it ended and what it said last, for an error message."""
        if not self.exited.done():
            ending = "is still running"
        elif self._stopped:
            ending = "was stopped by its supervisor"
        elif (status := self.exited.result()) >= 0:
            ending = f"exited with status {status}"
        else:
            ending = f"was killed by {signal.Signals(-status).name}"
        if not self._last_lines:
            return f"The engine (pid {self.pid}) {ending}. It printed nothing."
        return "\n  ".join([f"The engine (pid {self.pid}) {ending}. Its last lines:", *self._last_lines])

    def _signal(self, number: int) -> None:
        if not self.exited.done():
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _forward_output(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) >= MAX_LINE_BYTES:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._note(line)
        if rest:
            self._note(rest)

    def _note(self, line: bytes) -> None:
        if line := line.rstrip():
            self._last_lines.append(log_line(self.pid, line))


class EngineArgs(Struct, frozen=True, kw_only=True):
    """All of it."""

    engine: EngineConfig
    service: ServiceWeights
    """What the gateway's own queue counts a token as: two fair orders that count differently undo each other."""
    log: LogConfig
    """The gateway's own, but in JSON, which it reads (see `printed`)."""


class Backoff:
    """Doubles the wait with every early death, and forgives after a life that was long enough.

    An engine that dies once an hour is back at once; one that dies on every start does not keep the machine busy. There
    is no jitter: one supervisor starts one engine, so there is nobody to keep apart.

    Args:
        first_s: Wait after the first early death.
        most_s: The wait stops growing here.
        healthy_s: A life of at least this long starts the count anew.
    """

    def __init__(self, *, first_s: float = 0.2, most_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._ceiling = BackoffCeiling(first_s, most_s)
        self._healthy_s = healthy_s
        self._deaths = 0

    def wait_s(self, lived_s: float) -> float:
        """The wait after a life of `lived_s` seconds."""
        self._deaths = 1 if lived_s >= self._healthy_s else self._deaths + 1
        return self._ceiling.after(self._deaths)
