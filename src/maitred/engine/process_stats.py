"""Resources that an engine's process uses, read once a second at most: a step must not wait for it."""

import math

import psutil

from maitred.core.clock import Clock
from maitred.core.replica import ProcessState
from maitred.engine.nvml import Gpu

_FRESH_S = 1.0


class ProcessStats:
    """Looks at this process, and at the GPU that it computes on.

    Args:
        clock: Says when it is time to look again.
        gpu: None: there is none, or nothing that knows how it is.
    """

    def __init__(self, clock: Clock, gpu: Gpu | None = None) -> None:
        self._clock = clock
        self._gpu = gpu
        self._process = psutil.Process()
        self._looked_s = -math.inf
        self._last = ProcessState()

    def now(self) -> ProcessState:
        """Returns the resources as of a second ago at most."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= _FRESH_S:
            self._looked_s = now_s
            self._last = self._refresh()
        return self._last

    def _refresh(self) -> ProcessState:
        with self._process.oneshot():
            times = self._process.cpu_times()
            return ProcessState(
                times.user + times.system,
                self._process.memory_info().rss,
                self._process.num_fds(),
                self._process.num_threads(),
                None if self._gpu is None else self._gpu.state(),
            )
