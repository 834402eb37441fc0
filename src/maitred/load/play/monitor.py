"""Monitor of the tester's own cost during a run.

A tester without enough processor time reads late, and its own queue then looks like the server's. So the event loop is
probed every few milliseconds: if a probe is late, everything that was read meanwhile has late time stamps. The kernel
also reports how long the tester was ready to run while other processes used the cores. `cost` derives a verdict from
both.
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
    """Monitor of this process during a run. It must be entered in the event loop of the run.

    Args:
        now_s: Returns the time of the run's clock.
        count_open: Returns the number of requests that are being answered.
        each_sample: Callback after each sample, about once a second.
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
        """Peak memory of this process."""
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
    """Returns how long this process was ready to run without a core; 0 if the kernel does not tell."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _resident_bytes() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0
