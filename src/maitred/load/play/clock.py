"""The clock of a run: seconds since its start, monotonic."""

import time


class RunClock:
    """Clock of a run, which begins at 0.

    Attributes:
        zero_s: When the run began, by `time.monotonic`; who reads a time for every event subtracts it at once.
    """

    def __init__(self) -> None:
        self.zero_s = time.monotonic()

    def restart(self) -> None:
        """The run begins now."""
        self.zero_s = time.monotonic()

    def now_s(self) -> float:
        """Since the start of the run."""
        return time.monotonic() - self.zero_s
