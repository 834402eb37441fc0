"""Metrics of this process beyond those of `prometheus_client`: waits for a CPU core, and worker processes.

CPU time alone does not show the load of an event loop: on a machine without free cores the loop gets less time than it
needs and looks idle. The kernel also counts how long each thread was ready to run and got no core (``schedstat``: see
*Scheduler Statistics* in the kernel's documentation). The sum of both is the time that the loop would have used.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PROC_SELF = Path("/proc/self")


class CpuWaitMetrics(Collector):
    """Metrics of CPU waits, from the kernel's counts. Must be made in the thread of the event loop.

    If the kernel does not provide these counts, the series are missing.
    """

    def __init__(self) -> None:
        self._loop_thread = str(threading.get_native_id())

    def collect(self) -> Iterable[Metric]:
        """Collects CPU times and waits for Prometheus."""
        threads = _thread_times()
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


def process_resources() -> Mapping[str, float]:
    """Returns the resources that this process holds now."""
    process = psutil.Process()
    with process.oneshot():
        return {
            "memory_bytes": float(process.memory_info().rss),
            "open_fds": float(process.num_fds()),
            "threads": float(process.num_threads()),
        }


def _thread_times() -> dict[str, tuple[float, float]]:
    """Returns for each thread the seconds that it ran, and that it waited for a core."""
    times: dict[str, tuple[float, float]] = {}
    with suppress(OSError):
        for thread in (_PROC_SELF / "task").iterdir():
            with suppress(OSError, ValueError):  # the thread has just ended
                ran_ns, waited_ns, _ = map(int, (thread / "schedstat").read_text().split())
                times[thread.name] = ran_ns / 1e9, waited_ns / 1e9
    return times


class WorkerMetrics(Collector):
    """Metrics of the API worker processes.

    Args:
        processes: Returns their numbers and process ids.
    """

    def __init__(self, processes: Callable[[], Sequence[tuple[int, int]]]) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        """Collects the resources of all workers for Prometheus."""
        processes = self._processes()
        yield GaugeMetricFamily("maitred_workers", "API workers that are connected.", len(processes))
        cpu_s = CounterMetricFamily("maitred_worker_cpu_seconds", "CPU time, user and system.", labels=["worker"])
        memory = GaugeMetricFamily("maitred_worker_resident_memory_bytes", "Memory in use.", labels=["worker"])
        files = GaugeMetricFamily("maitred_worker_open_fds", "Open files and sockets.", labels=["worker"])
        for number, pid in processes:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    times, memory_info, open_fds = process.cpu_times(), process.memory_info(), process.num_fds()
            except psutil.Error:
                continue  # the worker has ended meanwhile
            labels = [str(number)]
            cpu_s.add_metric(labels, times.user + times.system)
            memory.add_metric(labels, memory_info.rss)
            files.add_metric(labels, open_fds)
        yield from (cpu_s, memory, files)
