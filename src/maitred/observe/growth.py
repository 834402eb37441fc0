"""Leak detection: whether memory, tasks, threads or open files of a process grow while its load does not.

The processes are sampled every two minutes over the last two hours, without the first ten minutes of a process: caches
fill then. `maitred.observe.trend` computes the growth; alerts and ``maitred doctor`` decide whether it matters.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.clock import Clock
from maitred.observe.metrics.engines import EngineState, EngineStates
from maitred.observe.trend import GrowthTrend, TrendSample, fit_trend

_INTERVAL_S = 120.0
_MAX_SAMPLES = 60
_WARM_UP_S = 600.0
_HOUR_S = 3600.0
_GATEWAY = "gateway"
_LABELS = ("process", "resource")


@dataclass(slots=True)
class _ProcessGrowth:
    """Samples and trends of one run of one process."""

    restarts: int
    since_s: float
    samples: dict[str, deque[TrendSample]] = field(default_factory=dict)
    trends: dict[str, GrowthTrend] = field(default_factory=dict)
    """Trends as of the last sample: a scrape must not wait for the computation of all slopes."""


class GrowthWatch(Collector):
    """Watches the resources of the gateway's process and of its engines' processes.

    Args:
        in_flight: Requests that are being answered: the gateway's load.
        engines: States of the engines, with their load.
        clock: Clock for the times of samples.
        own_usage: Resources of the gateway's process.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        engines: Callable[[], EngineStates],
        clock: Clock,
        own_usage: Callable[[], Mapping[str, float]],
    ) -> None:
        self._in_flight = in_flight
        self._engines = engines
        self._clock = clock
        self._own_usage = own_usage
        self._processes: dict[str, _ProcessGrowth] = {}

    async def run(self) -> None:
        """Samples periodically until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(_INTERVAL_S)

    def sample(self) -> None:
        """Samples the resources of all processes once."""
        self._record(_GATEWAY, 0, self._in_flight(), self._own_usage())
        for (model, replica), engine in self._engines().items():
            if engine.up and not engine.load.asleep:
                load = engine.load.running + engine.load.waiting
                self._record(f"{model}/{replica}", engine.restarts, load, _engine_usage(engine))

    def collect(self) -> Iterable[Metric]:
        """Collects levels and trends for Prometheus."""
        level = GaugeMetricFamily("maitred_growth_level", "What a process held at the last look.", labels=_LABELS)
        growth = GaugeMetricFamily("maitred_growth_per_hour", "How it grows at comparable load.", labels=_LABELS)
        agreement = GaugeMetricFamily(
            "maitred_growth_trend", "How sure the direction is, from -1 to 1.", labels=_LABELS
        )
        for process, process_growth in self._processes.items():
            for resource, samples in process_growth.samples.items():
                level.add_metric([process, resource], samples[-1].value)
                if (trend := process_growth.trends.get(resource)) is not None:
                    growth.add_metric([process, resource], trend.per_s * _HOUR_S)
                    agreement.add_metric([process, resource], trend.agreement)
        return level, growth, agreement

    def _record(self, process: str, restarts: int, load: float, usage: Mapping[str, float]) -> None:
        now_s = self._clock.monotonic_s()
        process_growth = self._processes.get(process)
        if process_growth is None or process_growth.restarts != restarts:
            process_growth = self._processes[process] = _ProcessGrowth(restarts, now_s)
        is_warm = now_s - process_growth.since_s >= _WARM_UP_S
        for resource, value in usage.items():
            samples = process_growth.samples.setdefault(resource, deque(maxlen=_MAX_SAMPLES))
            if len(samples) == 1 and not is_warm:
                samples.clear()  # before that, only the level is shown
            samples.append(TrendSample(now_s, value, load))
            if (trend := fit_trend(samples)) is not None:
                process_growth.trends[resource] = trend


def _engine_usage(engine: EngineState) -> Mapping[str, float]:
    process = engine.load.process
    return {
        "memory_bytes": float(process.resident_bytes),
        "open_fds": float(process.open_files),
        "threads": float(process.threads),
    }
