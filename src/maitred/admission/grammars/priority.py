"""Scheduling priority of the processes that compile grammars."""

import os
from contextlib import suppress

_NICE = 10


def lower_priority(process: int = 0) -> None:
    """Gives a process a low scheduling priority, unless it has a lower one.

    Args:
        process: Process id; 0: the thread that calls, and the threads that it starts later.
    """
    with suppress(OSError):  # the process has ended
        os.setpriority(os.PRIO_PROCESS, process, max(_NICE, os.getpriority(os.PRIO_PROCESS, process)))
