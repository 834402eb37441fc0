"""The process that starts all others of a gateway, and starts them again.

::

    supervisor -- keeper          the engines of the `model` section, if any are started here
               -- controller      everything that is decided, kept and told
               -- worker 1..N     HTTP, text; each accepts connections from the one listening socket

It decides nothing and holds nothing but the listening socket, so there is nothing in it that could fail. It has one
thread and no event loop, which is why it may fork at any time: what it starts has the configuration in memory as it was
read once, and shares what was imported.

A worker that dies is started again; its connections are lost and nothing else. The controller too: meanwhile workers go
on with the answers that they have begun, and then tell the next one of them. Who has lived for a while is started again
at once; who dies soon after every start is started ever more seldom. A controller or keeper that gives up by
itself the first time, such as for an engine that does not start, ends the whole with its exit code.

SIGTERM and SIGINT are handed on to all: everybody drains, and then the keeper ends. SIGUSR2 replaces the workers, one
after the other: the next is there before the one before it stops accepting, and that one ends when its last answer has.
SIGHUP is the controller's, which reads the configuration again; where that changes anything, workers are replaced by
such as begin with it.
"""

import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from maitred.app.workers.ipc import CHANGED, READY, REPLACE, RETIRE
from maitred.core.backoff import BackoffCeiling
from maitred.core.errors import CallerError, MaitredError
from maitred.core.parent_watch import LIFELINE_VARIABLE, follow_parent

CONTROLLER = 0
KEEPER = -1
Part = Callable[[Collection[int]], int]
"""What one process does: told the process ids of the workers that are there, it returns an exit code."""
_STOPS = (signal.SIGTERM, signal.SIGINT)
_HEARD = {*_STOPS, signal.SIGCHLD, REPLACE, signal.SIGHUP, READY, CHANGED}
_APART = BackoffCeiling(first_s=0.1, most_s=5.0)
"""From one start of a process to the next at least, after so many early deaths in a row."""
_EARLY_S = 10.0
_SHORT = {CONTROLLER: "controller", KEEPER: "keeper"}
_log = logging.getLogger(__name__)


class Supervisor:
    """Runs until it is told to stop and everybody has.

    Args:
        parts: What to run, each in a process of its own: the controller under 0, workers under their numbers, a keeper
            under -1.
        read_again: Reads the configuration that parts begin with from then on.
        prepare: Imports what the controller and the workers need, so that each starts quickly and has it in common with
            the others. The keeper starts before that. It must not start a thread.
    """

    def __init__(
        self, parts: Mapping[int, Part], read_again: Callable[[], None], prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._parts = parts
        self._prepare = prepare
        self._read_again = read_again
        self._running: dict[int, int] = {}
        """Process id -> its part."""
        self._leaving: set[int] = set()
        """Processes that were told to end, or to make room for others."""
        self._due: dict[int, float] = {}
        """Part -> when it is started again."""
        self._deaths: dict[int, int] = {}
        self._born_s: dict[int, float] = {}
        self._rolling: deque[int] = deque()
        """Processes that are to be replaced, the next one first."""
        self._stopping = False
        self._code = 0
        self._lifeline = os.pipe()

    def run(self) -> int:
        """Returns the exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        if KEEPER in self._parts:
            self._start(KEEPER)
        self._prepare()
        self._start(CONTROLLER)
        while self._running or (self._due and not self._stopping):
            heard = signal.sigtimedwait(_HEARD, self._until_due_s())
            if heard is not None:
                self._heard(heard.si_signo, heard.si_pid)
            self._start_due()
        return self._code

    def _heard(self, number: int, pid: int) -> None:
        if number in _STOPS:
            self._stop(number)
        elif number == READY:
            self._is_ready(pid)
        elif number == signal.SIGHUP:
            for each, part in self._running.items():
                if part == CONTROLLER:
                    os.kill(each, number)
        elif number == CHANGED:
            try:
                self._read_again()
            except MaitredError as error:
                _log.error("Workers begin with the configuration as it was: %s", error.message)
            self._replace()
        elif number == REPLACE:
            self._replace()
        else:
            self._bury()

    def _is_ready(self, pid: int) -> None:
        part = self._running.get(pid)
        if part is None:
            return
        if part == CONTROLLER:
            for worker in self._parts:
                if worker > 0 and worker not in self._running.values() and worker not in self._due:
                    self._start(worker)
        elif self._rolling and self._running.get(self._rolling[0]) == part:
            self._dismiss(self._rolling.popleft())

    def _replace(self) -> None:
        """Every worker is to be replaced."""
        here = [pid for pid in self._workers if pid not in self._leaving]
        self._rolling.extend(pid for pid in here if pid not in self._rolling)
        self._roll()

    def _roll(self) -> None:
        """Starts the successor of the next worker that is to be replaced, if none is under way."""
        while self._rolling and self._rolling[0] not in self._running:
            self._rolling.popleft()
        if self._rolling and not self._leaving and not self._stopping:
            self._start(self._running[self._rolling[0]])

    def _dismiss(self, pid: int) -> None:
        self._leaving.add(pid)
        os.kill(pid, RETIRE)

    def _stop(self, number: int) -> None:
        self._stopping = True
        self._rolling.clear()
        for pid, part in self._running.items():
            self._leaving.add(pid)
            if part != KEEPER:
                os.kill(pid, number)
        self._close()

    def _close(self) -> None:
        """Once nobody is left who could need an engine, these end as well."""
        if set(self._running.values()) == {KEEPER}:
            for pid in self._running:
                os.kill(pid, signal.SIGTERM)

    def _bury(self) -> None:
        """Takes note of every process that has ended."""
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._ended(pid, os.waitstatus_to_exitcode(status))

    def _ended(self, pid: int, code: int) -> None:
        part = self._running.pop(pid)
        if pid in self._leaving:
            self._leaving.discard(pid)
            self._roll()
            if self._stopping:
                self._close()
            if part == CONTROLLER:
                self._code = max(0, code)
            return
        if part <= CONTROLLER and code > 0 and part not in self._deaths:
            self._code = code  # it has said why, and would say it again
            self._stop(signal.SIGTERM)
            return
        if pid in self._rolling:
            self._rolling.remove(pid)
        lived_s = time.monotonic() - self._born_s.pop(pid)
        self._deaths[part] = self._deaths.get(part, 0) + 1 if lived_s < _EARLY_S else 1
        wait_s = until_again_s(self._deaths[part], lived_s)
        _log.error("%s (pid %d) ended with %d. It is started again in %.1f s.", _name(part), pid, code, wait_s)
        self._due[part] = time.monotonic() + wait_s

    @property
    def _workers(self) -> list[int]:
        """Those that are there, also to end soon."""
        return [pid for pid, part in self._running.items() if part > 0]

    def _until_due_s(self) -> float:
        soonest_s = min(self._due.values(), default=None)
        return 60.0 if soonest_s is None else max(0.0, soonest_s - time.monotonic())

    def _start_due(self) -> None:
        if self._stopping:
            return
        for part in [part for part, due_s in self._due.items() if due_s <= time.monotonic()]:
            del self._due[part]
            self._start(part)

    def _start(self, part: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        workers = self._workers
        pid = os.fork()
        if pid:
            self._running[pid] = part
            self._born_s[pid] = time.monotonic()
            return
        code = 1
        try:
            self._become_child(part)
            code = self._parts[part](workers)
        except MaitredError as error:
            sys.stderr.write(f"{error.message}\n")
            code = 2 if isinstance(error, CallerError) else 1
        except BaseException:  # the end of a process: there is nobody above who could be told
            _log.exception("%s failed.", _name(part))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _become_child(self, part: int) -> None:
        """Ends with its supervisor, and hears signals by itself: Ctrl-C in a terminal is the supervisor's."""
        Path("/proc/self/comm").write_text(f"mtd-{_SHORT.get(part, f'worker-{part}')}")  # for `ps` and `top`
        os.setpgid(0, 0)
        reading, writing = self._lifeline
        os.dup2(reading, 0)
        os.close(reading)
        os.close(writing)
        follow_parent({LIFELINE_VARIABLE: "1"})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)


def until_again_s(deaths: int, lived_s: float) -> float:
    """How long nobody starts a process again that has died early so often in a row, and has lived so long at last.

    It is the starts that are kept apart. A wait for its own sake would keep callers from a process that works, and that
    something else has killed a few times.
    """
    return max(0.0, _APART.after(deaths) - lived_s)


def _name(part: int) -> str:
    return f"The {_SHORT[part]}" if part in _SHORT else f"Worker {part}"
