"""Leaks: whether memory, tasks, threads or open files of a process grow while its load does not.

Looked at every two minutes over the last two hours, the first ten minutes of a process left out: caches fill then.
What grows is told by `maitred.observe.trend`; whether that is worth a word is for alerts and for ``maitred doctor``.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.clock import Clock
from maitred.observe.metrics.engines import Engines, EngineState
from maitred.observe.trend import GrowthTrend, TrendSample, fit_trend

_EVERY_S = 120.0
_MOST_SAMPLES = 60
_WARM_UP_S = 600.0
_HOUR_S = 3600.0
_GATEWAY = "gateway"
_LABELS = ("process", "resource")


@dataclass(slots=True)
class _Followed:
    """One life of one process."""

    born: int
    since_s: float
    samples: dict[str, deque[TrendSample]] = field(default_factory=dict)
    trends: dict[str, GrowthTrend] = field(default_factory=dict)
    """As of the last look: a scrape must not wait for all these slopes."""


class GrowthWatch(Collector):
    """Follows the gateway's process and those of its engines.

    Args:
        in_flight: Requests that are being answered: the gateway's load.
        engines: The engines, with theirs.
        clock: The time of looks.
        own: What the gateway's process holds.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        engines: Callable[[], Engines],
        clock: Clock,
        own: Callable[[], Mapping[str, float]],
    ) -> None:
        self._in_flight = in_flight
        self._engines = engines
        self._clock = clock
        self._own = own
        self._followed: dict[str, _Followed] = {}

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(_EVERY_S)

    def sample(self) -> None:
        """Looks once."""
        self._take(_GATEWAY, 0, self._in_flight(), self._own())
        for (model, replica), engine in self._engines().items():
            if engine.up and not engine.load.asleep:
                load = engine.load.running + engine.load.waiting
                self._take(f"{model}/{replica}", engine.restarts, load, _held(engine))

    def collect(self) -> Iterable[Metric]:
        """Prometheus asks."""
        level = GaugeMetricFamily("maitred_growth_level", "What a process held at the last look.", labels=_LABELS)
        growth = GaugeMetricFamily("maitred_growth_per_hour", "How it grows at comparable load.", labels=_LABELS)
        agreement = GaugeMetricFamily(
            "maitred_growth_trend", "How sure the direction is, from -1 to 1.", labels=_LABELS
        )
        for process, followed in self._followed.items():
            for resource, looks in followed.samples.items():
                level.add_metric([process, resource], looks[-1].value)
                if (trend := followed.trends.get(resource)) is not None:
                    growth.add_metric([process, resource], trend.per_s * _HOUR_S)
                    agreement.add_metric([process, resource], trend.agreement)
        return level, growth, agreement

    def _take(self, process: str, born: int, load: float, held: Mapping[str, float]) -> None:
        now_s = self._clock.monotonic_s()
        followed = self._followed.get(process)
        if followed is None or followed.born != born:
            followed = self._followed[process] = _Followed(born, now_s)
        warm = now_s - followed.since_s >= _WARM_UP_S
        for resource, value in held.items():
            looks = followed.samples.setdefault(resource, deque(maxlen=_MOST_SAMPLES))
            if len(looks) == 1 and not warm:
                looks.clear()  # only the level is told before
            looks.append(TrendSample(now_s, value, load))
            if (trend := fit_trend(looks)) is not None:
                followed.trends[resource] = trend


def _held(engine: EngineState) -> Mapping[str, float]:
    process = engine.load.process
    return {
        "memory_bytes": float(process.resident_bytes),
        "open_fds": float(process.open_files),
        "threads": float(process.threads),
    }
