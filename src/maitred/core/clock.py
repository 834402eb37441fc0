"""Time as an argument.

Decisions (scheduling, admission, routing) never read a clock; whoever drives them passes the time in. This
is what lets the simulator and the tests run the same code as production.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Reads time, in seconds."""

    def monotonic_s(self) -> float:
        """A time that only moves forward; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch, for what people read."""
        ...


class SystemClock:
    """The machine's own clock.

    Its methods are the functions of the standard library themselves: a request asks for the time some twenty times.
    """

    monotonic_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)
