"""Clock interface: callers pass the time as an argument.

Scheduling, admission and routing never read a clock; their caller passes the time as an argument. Therefore the
simulator and the tests run the same code as production.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Reads time, in seconds."""

    def monotonic_s(self) -> float:
        """Returns a time that never goes back; only differences between two values have a meaning."""
        ...

    def wall_s(self) -> float:
        """Returns the seconds since the Unix epoch, for values that people read."""
        ...


class SystemClock:
    """The system clock of the machine.

    Its methods are the functions of the standard library themselves, without a wrapper: each request reads the time
    about twenty times.
    """

    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)
