"""Processes by role: finds the process that has a role of the plan now.

A role is looked up at each use, because processes die and are replaced during a rehearsal. A process is never found by
its name alone: it is one that chaos has started, one that the plan names by its id, or a descendant of these.
"""

import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from maitred.core.errors import Unavailable
from maitred.load.chaos.plan import GATEWAY, ProcessRole


class Processes:
    """Processes of one installation, found by role.

    Args:
        roles: Name -> rule to find the process (`plan.roles`).
        gateway_pid: Returns the current id of the process that was started or named; None: there is none.
    """

    def __init__(self, roles: Mapping[str, ProcessRole], gateway_pid: Callable[[], int | None]) -> None:
        self._roles = roles
        self._gateway_pid = gateway_pid

    def find(self, name: str) -> psutil.Process:
        """Returns the process that has a role now.

        Raises:
            Unavailable: No process has the role, or several could have it.
        """
        role = self._roles[name]
        try:
            if role.child_of is not None:
                return self._below(name, role)
            process = psutil.Process(self._pid(name, role))
            if process.status() != psutil.STATUS_ZOMBIE:
                return process
        except psutil.NoSuchProcess:
            pass
        raise Unavailable(f"No process plays the role {name!r} now.")

    def tree(self) -> list[psutil.Process]:
        """Returns the gateway and its descendants; empty: there is no gateway."""
        pid = self._gateway_pid()
        with suppress(psutil.NoSuchProcess):
            if pid is not None:
                root = psutil.Process(pid)
                return [root, *root.children(recursive=True)]
        return []

    def _pid(self, name: str, role: ProcessRole) -> int:
        if role.pid_file is not None:
            try:
                return int(Path(role.pid_file).read_text())
            except (OSError, ValueError) as error:
                raise Unavailable(f"The role {name!r} cannot be found: {role.pid_file} holds no id: {error}.") from None
        pid = self._gateway_pid() if name == GATEWAY else None
        if pid is None:
            raise Unavailable(f"No process plays the role {name!r} now.")
        return pid

    def _below(self, name: str, role: ProcessRole) -> psutil.Process:
        assert role.child_of is not None
        part = role.command_contains or ""
        found = [child for child in self.find(role.child_of).children(recursive=True) if part in _command(child)]
        pids = {child.pid for child in found}
        # Children of a matching process often match too; the topmost process is the right one.
        tops = [child for child in found if child.ppid() not in pids]
        if len(tops) == 1:
            return tops[0]
        if not tops:
            raise Unavailable(f"No process below {role.child_of!r} has {part!r} in its command line now.")
        listed = "; ".join(f"{child.pid}: {_command(child)[:80]}" for child in tops)
        raise Unavailable(
            f"Several processes below {role.child_of!r} could be {name!r}. Set command_contains so that one is meant: "
            f"{listed}."
        )


def _command(process: psutil.Process) -> str:
    """Returns the command line; empty for a process that has just ended."""
    try:
        return shlex.join(process.cmdline())
    except psutil.Error:
        return ""
