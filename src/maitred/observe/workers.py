"""What the API workers of a gateway take of its machine, where it has any."""

from collections.abc import Callable, Iterable, Sequence

import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


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
