"""Engine process: one life of an engine, from start to exit.

It adds three things to a bare subprocess:

- It cannot outlive the gateway. Its standard input is a pipe that is never written to; the engine ends at the end of
  that file (see `core.parent_watch`), which comes however the gateway dies.
- It has a session of its own, so that Ctrl-C in a terminal reaches the gateway alone, which lets running answers
  finish before it stops the engine.
- Its output goes line by line to the gateway's log (see `engine_log`), and the last lines are kept to explain its
  death.
"""

import asyncio
import logging
import os
import secrets
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
import psutil
from msgspec import Struct

from maitred.core.backoff import BackoffCeiling
from maitred.core.flow import ServiceWeights
from maitred.core.parent_watch import LIFELINE_VARIABLE, START_ID_VARIABLE
from maitred.core.secret import Secret
from maitred.engine.config import EngineConfig
from maitred.fleet.engine_log import log_line
from maitred.observe.config import LogConfig
from maitred.wire.link.config import LinkConfig

KEPT_LINES = 20
MAX_LINE_BYTES = 16 * 1024
"""Longest line of output; a longer one is cut into several."""

_OUTPUT_GRACE_S = 1.0
"""Time to wait for the last output of a dead process; it passes in full only if a grandchild holds the pipe open."""

_log = logging.getLogger(__name__)


class EngineProcess:
    """Running engine process. Made by `start`, and over after `stop`, which must be awaited.

    Attributes:
        exited: Done with the exit status (negative: the signal that killed it).
        start_id: Identifier of this start, which the process finds in its environment and its hello repeats.
    """

    def __init__(self, process: Process, start_id: str) -> None:
        self.start_id = start_id
        self._process = process
        self._stopped = False
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.exited = asyncio.create_task(process.wait(), name=f"engine {process.pid}: exit")
        self._output_task = asyncio.create_task(self._forward_output(), name=f"engine {process.pid}: output")

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> "EngineProcess":
        """Starts the command with these variables in addition to the gateway's own.

        Raises:
            OSError: The system cannot run the command.
        """
        start_id = secrets.token_hex(8)
        variables = {"PYTHONUNBUFFERED": "1", **environment, LIFELINE_VARIABLE: "1", START_ID_VARIABLE: start_id}
        spawning = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            ),
            name="engine spawn",
        )
        try:
            return cls(await asyncio.shield(spawning), start_id)
        except asyncio.CancelledError:
            # A spawn that is cut off half-way would leave a process without an owner; it takes milliseconds to let it
            # finish.
            with suppress(OSError):
                await cls(await spawning, start_id).stop(grace_s=0)
            raise

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    async def stop(self, grace_s: float) -> None:
        """Ends the process by SIGTERM, and by SIGKILL if it has not exited after `grace_s`. Returns when it is gone."""
        self._stopped = not self.exited.done()
        try:
            self._signal(signal.SIGTERM)
            await asyncio.wait({self.exited}, timeout=grace_s)
        finally:  # also if this task is cancelled while it waits
            if not self.exited.done():
                _log.warning("The engine (pid %d) does not stop; it is killed.", self.pid)
            self._signal(signal.SIGKILL)
            if self._process.stdin is not None:
                self._process.stdin.close()
        await self.exited
        await asyncio.wait({self._output_task}, timeout=_OUTPUT_GRACE_S)
        self._output_task.cancel()

    def exit_reason(self) -> str:
        """Returns how the process ended and its last lines, for an error message."""
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
                self._log_output(line)
        if rest:
            self._log_output(rest)

    def _log_output(self, line: bytes) -> None:
        if line := line.rstrip():
            self._last_lines.append(log_line(self.pid, line))


class EngineArgs(Struct, frozen=True, kw_only=True):
    """Arguments of an engine process, as JSON on its command line."""

    engine: EngineConfig
    service: ServiceWeights
    """Weights by which the gateway's own queue counts a token.

    Two fair queues that count differently undo each other.
    """
    log: LogConfig
    """The gateway's log settings, but in JSON, which the gateway reads (see `engine_log`)."""
    link: LinkConfig | None = None
    """Settings by which gateways on other machines and the engine know each other; None: none connect."""
    region: str | None = None
    """Region of this machine; None: it is not told."""

    def encode(self) -> str:
        """Returns the arguments as text. A secret is a reference there: other users see command lines."""
        return msgspec.json.encode(self, enc_hook=_encode_secret).decode()

    @classmethod
    def decode(cls, text: str) -> "EngineArgs":
        """Decodes what `encode` has made, and reads the secrets.

        Raises:
            msgspec.ValidationError: The text is none, or a secret cannot be read.
        """
        return msgspec.json.decode(text, type=cls, dec_hook=lambda _, reference: Secret.read(reference))


def _encode_secret(secret: object) -> object:
    assert isinstance(secret, Secret)
    return msgspec.yaml.decode(secret.reference)


class Backoff:
    """Back-off of restarts: the wait doubles with every early death, and a long enough life resets it.

    An engine that dies once an hour is back at once; one that dies on every start does not keep the machine busy. There
    is no jitter: one supervisor starts one engine, so there is no herd to spread.

    Args:
        first_s: Wait after the first early death.
        most_s: Longest wait.
        healthy_s: Length of a life that resets the wait.
    """

    def __init__(self, *, first_s: float = 0.2, most_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._ceiling = BackoffCeiling(first_s, most_s)
        self._healthy_s = healthy_s
        self._deaths = 0

    def wait_s(self, lived_s: float) -> float:
        """Returns the wait after a life of `lived_s` seconds."""
        self._deaths = 1 if lived_s >= self._healthy_s else self._deaths + 1
        return self._ceiling.after(self._deaths)


def process_memory_bytes(pid: int) -> int:
    """Measures the memory of a process: its own and its part of shared memory (PSS).

    If the system does not report PSS, the resident memory is used.
    """
    try:
        process = psutil.Process(pid)
        full = process.memory_full_info()
        return int(getattr(full, "pss", 0) or full.rss)
    except psutil.Error:
        return 0
