"""Watches related processes: the child process ends when its parent ends, even by SIGKILL.

The child's standard input is a pipe, and the parent holds the write end and never writes; the kernel closes the pipe
when the parent ends for any reason. The child reads the pipe, and end of file means that the parent has ended. Linux's
PR_SET_PDEATHSIG would be shorter, but it follows the *thread* that started the child, and loses a parent that dies
before it is set.

In the other direction, a process can tell whether another one has closed a connection or has died.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

LIFELINE_VARIABLE = "MAITRED_PARENT_PIPE"
"""Environment variable that is 1 in a child whose standard input is the parent's pipe."""

START_ID_VARIABLE = "MAITRED_START_ID"
"""Environment variable with the identifier that the parent has given to this start of a child."""

GRACE_S = 5.0
"""Seconds between SIGTERM and the hard exit of an orphaned child."""
_FLAGS = 6
"""Index of the process's flags after its name in ``/proc/PID/stat`` (see proc(5))."""
_EXITING = 0x4
"""Flag of a process that exits. The kernel sets it before it closes the files of the process."""


def follow_parent(environment: Mapping[str, str] = os.environ) -> None:
    """Ends this process soon after its parent has ended. Call it first thing, before anything slow.

    The orphan sends itself SIGTERM, so that its ordinary shutdown runs, and exits hard if that takes too long. The
    function does nothing in a process without the parent's pipe, such as one started by hand.
    """
    if environment.get(LIFELINE_VARIABLE) == "1":
        threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()


def _end_with_parent() -> None:
    while os.read(0, 4096):  # the parent never writes; unexpected input is ignored
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def is_exiting(pid: int) -> bool:
    """Whether the process has ended or is about to; its sockets are closed by then, whatever ends it."""
    try:
        # The name is in parentheses and may have any characters.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return True
    return bool(int(fields[_FLAGS]) & _EXITING)
