"""When an engine that says nothing is asked whether it is there, and when it is taken for lost. Pure.

The system ends a connection whose other end has vanished, but a process that hangs keeps its connections: the kernel
answers for it. So time is cut into intervals. After the first one without a word the engine is asked (any answer is a
word); after `TICKS` of them it is lost. Intervals are counted, not seconds: if it is this process that was stopped for
a minute, that is one interval, and the engine's words are read before the next one ends.

An engine reads between two steps. Where its measured times foresee a step longer than all that, it is given `STEPS`
times as long.
"""

import math
from enum import Enum, auto

from maitred.core.replica import LoadReport

TICKS = 6
STEPS = 3


class HeartbeatAction(Enum):
    """What to do after an interval."""

    NOTHING = auto()
    ASK = auto()
    GIVE_UP = auto()


class HeartbeatMonitor:
    """Counts silent intervals.

    Args:
        timeout_s: The most time without a word. It takes 5/6 of it at least, and an engine that answers within 2/3 is
            never given up.

    Attributes:
        interval_s: How often to call `tick`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.interval_s = timeout_s / TICKS
        self._silent = 0

    def heard(self) -> None:
        """Something came."""
        self._silent = 0

    def tick(self, load: LoadReport) -> HeartbeatAction:
        """Another interval is over.

        Args:
            load: The engine's last report, which foresees how long a step takes.
        """
        self._silent += 1
        if self._silent == 1:
            return HeartbeatAction.ASK
        step_s = load.times.of(load.step_tokens, 0, chunks=1)
        if self._silent >= max(TICKS, math.ceil(STEPS * step_s / self.interval_s)):
            return HeartbeatAction.GIVE_UP
        return HeartbeatAction.NOTHING
