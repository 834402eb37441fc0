"""Clock of a run: monotonic seconds since its start."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


class RunClock:
    """Clock of a run, which begins at 0.

    Attributes:
        zero_s: Start of the run by `time.monotonic`; code that reads a time for every event subtracts it directly.
    """

    def __init__(self) -> None:
        self.zero_s = time.monotonic()

    def restart(self) -> None:
        """Sets the start of the run to now."""
        self.zero_s = time.monotonic()

    def now_s(self) -> float:
        """Returns the seconds since the start of the run."""
        return time.monotonic() - self.zero_s


@contextmanager
def calm_collector() -> Iterator[None]:
    """Keeps Python's garbage collector from scanning all records while times are measured.

    Existing objects are frozen, and young objects are collected in large batches; what a run keeps is never garbage.
    Objects that the caller had frozen stay frozen.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()
