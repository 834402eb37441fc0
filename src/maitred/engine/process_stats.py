"""Resources that an engine's process uses, read at most once a second because reading delays a step."""

import math

import psutil

from maitred.core.clock import Clock
from maitred.core.replica import ProcessState
from maitred.engine.nvml import Gpu

_FRESH_S = 1.0


class ProcessStats:
    """Reader of the resources of this process and its GPU.

    Args:
        clock: Clock that determines when the resources are read again.
        gpu: GPU to read; None: there is no GPU, or NVML cannot read it.
    """

    def __init__(self, clock: Clock, gpu: Gpu | None = None) -> None:
        self._clock = clock
        self._gpu = gpu
        self._process = psutil.Process()
        self._looked_s = -math.inf
        self._last = ProcessState()

    def now(self) -> ProcessState:
        """Returns the resources, at most one second old."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= _FRESH_S:
            self._looked_s = now_s
            self._last = self._refresh()
        return self._last

    def _refresh(self) -> ProcessState:
        with self._process.oneshot():
            times = self._process.cpu_times()
            return ProcessState(
                cpu_s=times.user + times.system,
                resident_bytes=self._process.memory_info().rss,
                open_files=self._process.num_fds(),
                threads=self._process.num_threads(),
                gpu=None if self._gpu is None else self._gpu.state(),
            )
