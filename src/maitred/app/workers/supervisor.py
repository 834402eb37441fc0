"""The process that starts all other processes of a gateway, and restarts them.

::

    supervisor -- engine host     the engines of the `model` section, if any are started here
               -- controller      admission, dispatch, accounting and the admin API
               -- worker 1..N     HTTP, text; each accepts connections from the one listening socket

A process that hangs does not die: one whose heartbeat stops for 20 s is killed, and so started again.

The supervisor decides nothing and holds nothing but the listening socket, so there is nothing in it that could fail. It
has one thread and no event loop, so it may fork at any time: a child has the configuration in memory as it was read
once, and shares what was imported.

A worker that dies is restarted; only its connections are lost. A controller that dies is restarted, too: meanwhile
workers go on with the responses that they have begun, and then send the next controller their grants. A process that
has lived for a while is restarted at once; one that dies soon after every start is restarted at growing intervals. If
the controller or engine host exits with an error at its first start, the gateway exits with that code.

SIGTERM and SIGINT are passed on to all processes: each drains, and then the engine host ends. SIGUSR2 replaces the
workers, one after the other: a successor is ready before its predecessor stops accepting connections, and the
predecessor ends with its last response. SIGHUP goes to the controller, which reads the configuration again; if it has
changed, the workers are replaced.
"""

import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from maitred.app.workers.heartbeat import ProcessHeartbeat, ProcessMonitor
from maitred.app.workers.ipc import CONFIG_CHANGED, READY, REPLACE_WORKERS, RETIRE
from maitred.core.backoff import BackoffCeiling
from maitred.core.errors import CallerError, MaitredError
from maitred.core.parent_watch import LIFELINE_VARIABLE, follow_parent

CONTROLLER = 0
ENGINE_HOST = -1
ProcessMain = Callable[[Collection[int], ProcessHeartbeat], int]
"""The main function of one process: takes the process ids of the running workers and its heartbeat, and returns an exit
code."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HANDLED_SIGNALS = {*_STOP_SIGNALS, signal.SIGCHLD, REPLACE_WORKERS, signal.SIGHUP, READY, CONFIG_CHANGED}
_RESTART_BACKOFF = BackoffCeiling(first_s=0.1, most_s=5.0)
"""Minimum time between two starts of a process, by the number of early deaths in a row."""
_EARLY_DEATH_S = 10.0
_CHECK_INTERVAL_S = 1.0
"""Time between two looks at the heartbeats."""
_ROLE_NAMES = {CONTROLLER: "controller", ENGINE_HOST: "keeper"}
_log = logging.getLogger(__name__)


class Supervisor:
    """Supervises the processes of a gateway until it is told to stop and all of them have ended.

    Args:
        mains: The main function of each process, by role: the controller under 0, workers under their numbers, the
            engine host under -1.
        reload_config: Reads the configuration with which processes start from then on.
        prepare: Imports what the controller and the workers need, so that each starts quickly and shares it with the
            others. The engine host starts before that. It must not start a thread.
    """

    def __init__(
        self,
        mains: Mapping[int, ProcessMain],
        reload_config: Callable[[], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._mains = mains
        self._prepare = prepare
        self._reload_config = reload_config
        self._running: dict[int, int] = {}
        """Process id -> its role."""
        self._stopping_pids: set[int] = set()
        """Processes that were told to stop or to retire."""
        self._restart_due_s: dict[int, float] = {}
        """Role -> when its process is restarted."""
        self._early_deaths: dict[int, int] = {}
        self._started_s: dict[int, float] = {}
        self._pids_to_replace: deque[int] = deque()
        """Processes that are to be replaced, the next one first."""
        self._monitor = ProcessMonitor()
        self._is_stopping = False
        self._exit_code = 0
        self._parent_pipe = os.pipe()

    def run(self) -> int:
        """Runs the supervisor; returns the exit code of the gateway."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        if ENGINE_HOST in self._mains:
            self._start(ENGINE_HOST)
        self._prepare()
        self._start(CONTROLLER)
        while self._running or (self._restart_due_s and not self._is_stopping):
            received = signal.sigtimedwait(_HANDLED_SIGNALS, self._next_wake_in_s())
            if received is not None:
                self._on_signal(received.si_signo, received.si_pid)
            self._kill_hung_processes()
            self._restart_due_processes()
        return self._exit_code

    def _on_signal(self, signal_number: int, pid: int) -> None:
        if signal_number in _STOP_SIGNALS:
            self._stop(signal_number)
        elif signal_number == READY:
            self._on_ready(pid)
        elif signal_number == signal.SIGHUP:
            for running_pid, role in self._running.items():
                if role == CONTROLLER:
                    os.kill(running_pid, signal_number)
        elif signal_number == CONFIG_CHANGED:
            try:
                self._reload_config()
            except MaitredError as error:
                _log.error("Workers begin with the configuration as it was: %s", error.message)
            self._replace_workers()
        elif signal_number == REPLACE_WORKERS:
            self._replace_workers()
        else:
            self._reap()

    def _on_ready(self, pid: int) -> None:
        role = self._running.get(pid)
        if role is None:
            return
        if role == CONTROLLER:
            for worker in self._mains:
                if worker > 0 and worker not in self._running.values() and worker not in self._restart_due_s:
                    self._start(worker)
        elif self._pids_to_replace and self._running.get(self._pids_to_replace[0]) == role:
            self._retire(self._pids_to_replace.popleft())

    def _replace_workers(self) -> None:
        """Marks every running worker for replacement and starts with the first."""
        active_pids = [pid for pid in self._workers if pid not in self._stopping_pids]
        self._pids_to_replace.extend(pid for pid in active_pids if pid not in self._pids_to_replace)
        self._start_successor()

    def _start_successor(self) -> None:
        """Starts the successor of the next worker that is to be replaced, unless another replacement is under way."""
        while self._pids_to_replace and self._pids_to_replace[0] not in self._running:
            self._pids_to_replace.popleft()
        if self._pids_to_replace and not self._stopping_pids and not self._is_stopping:
            role = self._running[self._pids_to_replace[0]]
            # Replacements may be asked for again while a successor starts, or waits for its restart.
            if list(self._running.values()).count(role) == 1 and role not in self._restart_due_s:
                self._start(role)

    def _retire(self, pid: int) -> None:
        self._stopping_pids.add(pid)
        os.kill(pid, RETIRE)

    def _stop(self, signal_number: int) -> None:
        self._is_stopping = True
        self._pids_to_replace.clear()
        for pid, role in self._running.items():
            self._stopping_pids.add(pid)
            if role != ENGINE_HOST:
                os.kill(pid, signal_number)
        self._stop_engine_host()

    def _stop_engine_host(self) -> None:
        """Stops the engine host once no other process is left that could need an engine."""
        if set(self._running.values()) == {ENGINE_HOST}:
            for pid in self._running:
                os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        """Collects the exit status of every process that has ended."""
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._on_exit(pid, os.waitstatus_to_exitcode(status))

    def _on_exit(self, pid: int, code: int) -> None:
        role = self._running.pop(pid)
        lived_s = time.monotonic() - self._started_s.pop(pid)
        self._monitor.remove(pid)
        if pid in self._stopping_pids:
            self._stopping_pids.discard(pid)
            self._start_successor()
            if self._is_stopping:
                self._stop_engine_host()
            if role == CONTROLLER:
                self._exit_code = max(0, code)
            return
        if role <= CONTROLLER and code > 0 and role not in self._early_deaths:
            self._exit_code = code  # its message says why, and a restart would fail in the same way
            self._stop(signal.SIGTERM)
            return
        if pid in self._pids_to_replace:
            self._pids_to_replace.remove(pid)
            if role in self._running.values():
                name = _describe_role(role)
                _log.error("%s (pid %d) ended with %d. Its successor has been started.", name, pid, code)
                self._start_successor()
                return
        self._early_deaths[role] = self._early_deaths.get(role, 0) + 1 if lived_s < _EARLY_DEATH_S else 1
        wait_s = restart_delay_s(self._early_deaths[role], lived_s)
        _log.error("%s (pid %d) ended with %d. It is started again in %.1f s.", _describe_role(role), pid, code, wait_s)
        self._restart_due_s[role] = time.monotonic() + wait_s

    @property
    def _workers(self) -> list[int]:
        """Process ids of the running workers, including those that are leaving."""
        return [pid for pid, role in self._running.items() if role > 0]

    def _next_wake_in_s(self) -> float:
        """Time until the next restart, or until the next look at the heartbeats if that is sooner."""
        soonest_s = min(self._restart_due_s.values(), default=math.inf)
        return min(_CHECK_INTERVAL_S, max(0.0, soonest_s - time.monotonic()))

    def _kill_hung_processes(self) -> None:
        for pid in self._monitor.hung_pids(time.monotonic()):
            _log.error("%s (pid %d) has hung for too long. It is killed.", _describe_role(self._running[pid]), pid)
            os.kill(pid, signal.SIGKILL)

    def _restart_due_processes(self) -> None:
        if self._is_stopping:
            return
        for role in [role for role, due_s in self._restart_due_s.items() if due_s <= time.monotonic()]:
            del self._restart_due_s[role]
            self._start(role)

    def _start(self, role: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        workers, heartbeat = self._workers, ProcessHeartbeat()
        pid = os.fork()
        if pid:
            self._monitor.add(pid, heartbeat)
            self._running[pid] = role
            self._started_s[pid] = time.monotonic()
            return
        code = 1
        try:
            self._init_child(role)
            code = self._mains[role](workers, heartbeat)
        except MaitredError as error:
            from maitred.store.outage import explain_outage  # the supervisor itself needs no database

            sys.stderr.write(f"{explain_outage(error)}\n")
            code = 2 if isinstance(error, CallerError) else 1
        except BaseException:  # the outermost frame of the process: nothing above could handle it
            _log.exception("%s failed.", _describe_role(role))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _init_child(self, role: int) -> None:
        """Sets up a child: it ends with its supervisor and has a process group of its own.

        So Ctrl-C in a terminal reaches the supervisor only, which passes the signal on.
        """
        Path("/proc/self/comm").write_text(f"mtd-{_ROLE_NAMES.get(role, f'worker-{role}')}")  # for `ps` and `top`
        os.setpgid(0, 0)
        read_end, write_end = self._parent_pipe
        os.dup2(read_end, 0)
        os.close(read_end)
        os.close(write_end)
        follow_parent({LIFELINE_VARIABLE: "1"})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)


def restart_delay_s(early_deaths: int, lived_s: float) -> float:
    """Returns how long to wait before a process that has died is restarted.

    The delay separates two starts, and so counts from the last one. A delay from the death would keep clients from a
    process that works and that something else has killed a few times.

    Args:
        early_deaths: How often in a row it has died soon after its start.
        lived_s: How long it lived the last time.
    """
    return max(0.0, _RESTART_BACKOFF.after(early_deaths) - lived_s)


def _describe_role(role: int) -> str:
    return f"The {_ROLE_NAMES[role]}" if role in _ROLE_NAMES else f"Worker {role}"
