"""What this process takes of its machine beyond what `prometheus_client` tells: who waits for a core, and for whom.

How busy an event loop is cannot be read from CPU time alone: on a machine whose cores are taken it gets less than it
needs and looks idle. The kernel also counts how long each thread was ready to run and got no core (``schedstat``: see
*Scheduler Statistics* in the kernel's documentation). Ran and waited together are what the loop would have used.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SELF = Path("/proc/self")


class CpuWaits(Collector):
    """Reads the kernel's counts when somebody scrapes. Make it in the thread of the event loop.

    Where the kernel keeps none there are no such series.
    """

    def __init__(self) -> None:
        self._loop_thread = str(threading.get_native_id())

    def collect(self) -> Iterable[Metric]:
        """Prometheus asks."""
        threads = _threads()
        if self._loop_thread not in threads:
            return
        ran_s, waited_s = threads[self._loop_thread]
        yield CounterMetricFamily("maitred_event_loop_cpu_seconds", "CPU time of the event loop's thread.", ran_s)
        yield CounterMetricFamily(
            "maitred_event_loop_cpu_wait_seconds",
            "Time for which the event loop's thread was ready to run and had no core.",
            waited_s,
        )
        yield CounterMetricFamily(
            "maitred_process_cpu_wait_seconds",
            "The same of all threads, added up.",
            sum(waited for _, waited in threads.values()),
        )


def resources() -> Mapping[str, float]:
    """What this process holds now."""
    process = psutil.Process()
    with process.oneshot():
        return {
            "memory_bytes": float(process.memory_info().rss),
            "open_fds": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }


def _threads() -> dict[str, tuple[float, float]]:
    """Thread -> seconds for which it ran, and for which it waited for a core."""
    times: dict[str, tuple[float, float]] = {}
    with suppress(OSError):
        for thread in (_SELF / "task").iterdir():
            with suppress(OSError, ValueError):  # it has just ended
                ran_ns, waited_ns, _ = map(int, (thread / "schedstat").read_text().split())
                times[thread.name] = ran_ns / 1e9, waited_ns / 1e9
    return times


class WorkerMetrics(Collector):
    """Looks at their processes when somebody scrapes.

    Args:
        processes: Their numbers and process ids.
    """

    def __init__(self, processes: Callable[[], Sequence[tuple[int, int]]]) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        """Prometheus asks."""
        processes = self._processes()
        yield GaugeMetricFamily("maitred_workers", "API workers that are connected.", len(processes))
        cpu_s = CounterMetricFamily("maitred_worker_cpu_seconds", "CPU time, user and system.", labels=["worker"])
        memory = GaugeMetricFamily("maitred_worker_resident_memory_bytes", "Memory in use.", labels=["worker"])
        files = GaugeMetricFamily("maitred_worker_open_fds", "Open files and sockets.", labels=["worker"])
        for number, pid in processes:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times, taken, held = process.cpu_times(), process.memory_info(), process.num_fds()
            except psutil.Error:
                continue  # it has ended since
            labels = [str(number)]
            cpu_s.add_metric(labels, times.user + times.system)
            memory.add_metric(labels, taken.rss)
            files.add_metric(labels, held)
        yield from (cpu_s, memory, files)
