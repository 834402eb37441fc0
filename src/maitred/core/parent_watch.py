"""A child process that cannot outlive its parent, even one that was killed with SIGKILL.

The parent keeps the write end of a pipe on the child's standard input and never writes; the kernel closes it with the
parent, whatever ended it. The child reads: the end of the file is the parent's death. Linux's PR_SET_PDEATHSIG would
be shorter, but it follows the *thread* that started the child, and loses a parent that dies before it is set.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping

LIFELINE_VARIABLE = "MAITRED_PARENT_PIPE"
"""Set to 1 in the environment of a child whose standard input is its lifeline."""

GRACE_S = 5.0
"""Between the polite end of an orphan and the certain one."""


def follow_parent(environment: Mapping[str, str] = os.environ) -> None:
    """Ends this process soon after its parent has ended. Call it first thing, before anything slow.

    The orphan sends itself SIGTERM, so that its ordinary shutdown runs, and exits hard if that takes too long. Does
    nothing in a process that was not started with a lifeline, such as one run by hand.
    """
    if environment.get(LIFELINE_VARIABLE) == "1":
        threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()


def _end_with_parent() -> None:
    while os.read(0, 4096):  # nobody writes; whatever came would be a mistake to ignore
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
