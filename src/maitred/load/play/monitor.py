"""Watches what the tester itself costs while it runs.

A tester that runs out of processor time reads late: its own queue then looks like the server's. So the event loop is
probed every few milliseconds (a probe that comes late dates everything that was read meanwhile as late), and the kernel
is asked how long the tester was ready to run while others had the cores. `cost` makes a verdict of it.
"""

import asyncio
import resource
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from maitred.load.measure.record import LoadTesterSample

PROBE_S = 0.01
SAMPLE_S = 1.0
_SCHEDSTAT = Path("/proc/self/schedstat")
_STATM = Path("/proc/self/statm")


class LoadTesterMonitor:
    """Watches this process while a run lasts. Enter it in the run's event loop.

    Args:
        now_s: The clock of the run.
        count_open: Requests being answered.
        each_sample: Called after each sample, about once a second.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        count_open: Callable[[], int],
        each_sample: Callable[[LoadTesterSample], object],
    ) -> None:
        self.samples: list[LoadTesterSample] = []
        self.lag_s: array[float] = array("d")
        self._now_s = now_s
        self._count_open = count_open
        self._each_sample = each_sample
        self._task: asyncio.Task[None] | None = None
        self._began = (time.process_time(), _starved_s())

    @property
    def cpu_seconds(self) -> float:
        """Processor time since the start."""
        return time.process_time() - self._began[0]

    @property
    def peak_memory_bytes(self) -> int:
        """Most memory that this process ever held."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    async def __aenter__(self) -> "LoadTesterMonitor":
        self._task = asyncio.create_task(self._watch(), name="load monitor")
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        sampled_s, cpu_s, starved_s = self._now_s(), *self._began
        longest_s = 0.0
        while True:
            due_s = self._now_s() + PROBE_S
            await asyncio.sleep(PROBE_S)
            now_s = self._now_s()
            late_s = max(0.0, now_s - due_s)
            self.lag_s.append(late_s)
            longest_s = max(longest_s, late_s)
            span_s = now_s - sampled_s
            if span_s >= SAMPLE_S:
                cpu_now_s, starved_now_s = time.process_time(), _starved_s()
                sample = LoadTesterSample(
                    at_s=now_s,
                    cpu_share=(cpu_now_s - cpu_s) / span_s,
                    starved_share=(starved_now_s - starved_s) / span_s,
                    lag_s=longest_s,
                    open_streams=self._count_open(),
                    memory_bytes=_resident_bytes(),
                )
                self.samples.append(sample)
                self._each_sample(sample)
                sampled_s, cpu_s, starved_s, longest_s = now_s, cpu_now_s, starved_now_s, 0.0


def _starved_s() -> float:
    """Time for which this process was ready to run and had no core; 0 where the kernel does not tell."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _resident_bytes() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0
