"""Scrapes of the server's metrics, followed over its restarts.

Counters begin at 0 whenever their process starts. A single scrape at the end of a rehearsal would therefore miss what
was counted before a kill. The poller scrapes repeatedly and adds up the counts of all process lifetimes. What a process
counted between the last scrape and its death is lost: sums are lower bounds, too low by at most one interval per kill.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

import aiohttp

from maitred.observe.samples import MetricSeries, parse_metrics

INTERVAL_S = 0.25
TIMEOUT_S = 10.0
_OF_ENGINES = {"maitred_engine_": ("model", "replica"), "vllm:": ("model_name", "engine")}
"""Prefix of the counters of engines, whose labels name the engine."""
_KEPT_BY_THE_GATEWAY = frozenset({"maitred_engine_restarts_total"})
"""Counters about engines that the gateway keeps: the restart of an engine does not reset them."""


def process_of(series: MetricSeries) -> tuple[str, str]:
    """Returns the process that counts a series: an engine's model and replica, or empty for the gateway."""
    for beginning, (model, replica) in _OF_ENGINES.items():
        if series.name.startswith(beginning) and series.name not in _KEPT_BY_THE_GATEWAY:
            labels = dict(series.labels)
            return labels.get(model, "?"), labels.get(replica, "?")
    return "", ""


class CounterTotals:
    """Counters that are added up over the lifetimes of their processes.

    The gateway and each engine restart independently, so the series of each process are tracked separately. In a sum
    over engines, the growth of the others would hide a restart. The lifetime of a process is over when any of its
    counters has decreased or disappeared.
    """

    def __init__(self) -> None:
        self._samples: Mapping[MetricSeries, float] = {}
        self._before: defaultdict[str, float] = defaultdict(float)
        self.latest: Mapping[str, float] = {}
        """The last look: the samples of each name, summed over their labels."""

    def take(self, samples: Mapping[MetricSeries, float]) -> None:
        """Adds the samples of one more scrape."""
        counted = {series: value for series, value in self._samples.items() if series.name.endswith("_total")}
        over = {process_of(series) for series, value in counted.items() if samples.get(series, 0.0) < value}
        for series, value in counted.items():
            if process_of(series) in over:
                self._before[series.name] += value
        self._samples = samples
        sums: defaultdict[str, float] = defaultdict(float)
        for series, value in samples.items():
            sums[series.name] += value
        self.latest = dict(sums)

    def total(self, name: str) -> float | None:
        """Returns the sum over all lifetimes; None: there is no such counter."""
        if name not in self.latest and name not in self._before:
            return None
        return self._before.get(name, 0.0) + self.latest.get(name, 0.0)


class MetricsPoller:
    """Poller that scrapes ``/metrics`` of a server while it is entered.

    Attributes:
        counters: Counters that were scraped, added up over restarts.
        answers: Whether the last scrape succeeded.
    """

    def __init__(self, url: str) -> None:
        self._address = f"{url}/metrics"
        self._session: aiohttp.ClientSession | None = None
        self._looking: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self.counters = CounterTotals()
        self.answers = False

    async def __aenter__(self) -> "MetricsPoller":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        self._looking = asyncio.create_task(self._poll_forever(), name="chaos scrape")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._looking is not None
        assert self._session is not None
        self._looking.cancel()
        await asyncio.wait({self._looking})
        await self._session.close()

    async def poll(self) -> bool:
        """Scrapes now, and returns whether the server answered with metrics.

        Two scrapes at once could end in the other order: the older counts would look like those of a new process.
        """
        assert self._session is not None
        async with self._one_at_a_time:
            answered = False
            with suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async with self._session.get(self._address) as response:
                    if response.status == 200:
                        self.counters.take(parse_metrics(await response.text()))
                        answered = True
            self.answers = answered
            return answered

    async def _poll_forever(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(INTERVAL_S)
