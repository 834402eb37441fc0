"""What the tester itself costs, and whether it was the limit.

A tester that runs out of processor time reads late: its own queue then looks like the server's. So the event loop is
probed every few milliseconds (a probe that comes late dates everything that was read meanwhile as late), and the kernel
is asked how long the tester was ready to run while others had the cores.
"""

import asyncio
import resource
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from maitred.load.cost import Limit, TesterCost
from maitred.load.record import RunData, Sample

PROBE_S = 0.01
SAMPLE_S = 1.0
BUSY = 0.8
"""Share of a core above which the tester's own work, rather than its neighbours', explains a late probe."""
STARVED = 0.02
"""Share of the time without a core above which the neighbours explain the late probes of a tester that is not busy."""
TOLERATED_S = 0.002
TOLERATED_SHARE = 0.03
"""A figure may be off by the larger of the two before the tester calls itself the limit."""
TOLERATED_SEND_S = 0.02
"""For requests that went out late: a timer's own grain and a burst of simultaneous ones stay below it."""

_SCHEDSTAT = Path("/proc/self/schedstat")
_STATM = Path("/proc/self/statm")


class Monitor:
    """Watches this process while a run lasts. Enter it in the run's event loop.

    Args:
        now_s: The clock of the run.
        count_open: Requests being answered.
        each_sample: Called after each sample, about once a second.
    """

    def __init__(
        self, now_s: Callable[[], float], count_open: Callable[[], int], each_sample: Callable[[Sample], object]
    ) -> None:
        self.samples: list[Sample] = []
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

    async def __aenter__(self) -> "Monitor":
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
                sample = Sample(
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


def judge(data: RunData) -> TesterCost:
    """What the tester cost, and whether it, or the machine it shared, was the limit of the run.

    A percentile of a latency can be wrong by as much as the event loop's lag at the same rank, so each is held against
    the other: where the lag is more than 3 % of the time that it dates (and more than 2 ms), the figures are not the
    server's alone. The same for requests that went out later than they were due.
    """
    lag = np.frombuffer(data.lag_s, dtype=np.float64) if data.lag_s else np.zeros(1)
    send = np.asarray([record.late_s for record in data.records] or [0.0])
    ttft = np.asarray([r.arrivals_s[0] - r.intended_s for r in data.records if r.arrivals_s])
    gaps = [np.diff(np.frombuffer(record.arrivals_s)) for record in data.records if len(record.arrivals_s) > 1]
    itl = np.concatenate(gaps) if gaps else np.zeros(0)
    shares = np.asarray([s.cpu_share for s in data.samples] or [0.0])
    starved = np.asarray([s.starved_share for s in data.samples] or [0.0])

    late = _worst(lag, {"between tokens": itl, "to the first token": ttft})
    send_p99_s = float(np.quantile(send, 0.99))
    send_bound_s = max(TOLERATED_SEND_S, TOLERATED_SHARE * float(np.quantile(ttft, 0.5)) if ttft.size else 0.0)
    reason = late
    if not reason and send_p99_s > send_bound_s:
        reason = f"one request in a hundred went out {send_p99_s * 1e3:.0f} ms or more after it was due"
    limit: Limit = "none"
    verdict = "The tester kept up: its own delays are too small to show in the figures."
    if reason:
        # The cause is what took the processor in the seconds with the longest delays.
        worst = [s for s in data.samples if s.lag_s >= np.quantile([s.lag_s for s in data.samples], 0.75)]
        cpu_share = float(np.mean([s.cpu_share for s in worst])) if worst else 0.0
        starved_share = float(np.mean([s.starved_share for s in worst])) if worst else 0.0
        if cpu_share < BUSY and starved_share > STARVED:
            limit = "machine"
            verdict = (
                f"The machine was the limit, not only the server: {reason}, because others had the cores "
                f"({starved_share:.0%} of the time the tester was ready to run and had to wait). Give the tester a "
                "core of its own, or another machine; until then the figures are upper bounds."
            )
        else:
            limit = "tester"
            verdict = (
                f"The tester was the limit, not the server: {reason}, at {cpu_share:.0%} of a core. Use less load per "
                "tester; until then the figures are upper bounds."
            )
    return TesterCost(
        cpu_seconds=data.cpu_seconds,
        cpu_share=data.cpu_seconds / data.seconds if data.seconds else 0.0,
        cpu_share_max=float(shares.max()),
        starved_share=float(starved.mean()),
        lag_p50_s=float(np.quantile(lag, 0.5)),
        lag_p99_s=float(np.quantile(lag, 0.99)),
        lag_max_s=float(lag.max()),
        send_delay_p50_s=float(np.quantile(send, 0.5)),
        send_delay_p99_s=send_p99_s,
        send_delay_max_s=float(send.max()),
        peak_open=max((s.open_streams for s in data.samples), default=0),
        peak_memory_bytes=data.peak_memory_bytes,
        limit=limit,
        verdict=verdict,
    )


def _worst(lag: "np.typing.NDArray[np.float64]", times: dict[str, "np.typing.NDArray[np.float64]"]) -> str:
    """The first percentile of a time that the lag at the same rank may have changed, as words; empty if none."""
    for name, values in times.items():
        for rank in (0.5, 0.95, 0.99):
            if values.size:
                late_s, value_s = float(np.quantile(lag, rank)), float(np.quantile(values, rank))
                if late_s > max(TOLERATED_S, TOLERATED_SHARE * value_s):
                    return (
                        f"p{rank * 100:g} of the time {name} ({value_s * 1e3:.1f} ms) may be {late_s * 1e3:.1f} ms off"
                    )
    return ""


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
