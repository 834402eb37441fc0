"""The clock of a run: seconds since its start, monotonic."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


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


@contextmanager
def calm_collector() -> Iterator[None]:
    """Keeps Python's garbage collector from walking all records while times are taken.

    What exists is set aside, and young objects are collected in large lots; what a run keeps is not garbage anyway.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
