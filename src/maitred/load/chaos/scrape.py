"""What the server says of itself, followed over its restarts.

Counters begin at 0 whenever their process starts, so a single look at the end of a rehearsal would miss what was
counted before a kill. The follower looks all the time and adds the lives up. What a process counted between the last
look and its death is lost: sums are lower bounds, short by at most one interval per kill.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

INTERVAL_S = 0.25
TIMEOUT_S = 2.0
_ENGINE = "maitred_engine_"


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format as the samples of each name, summed over their labels.

    Raises:
        ValueError: It is not of that format.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return dict(sums)


class Counters:
    """Counters added up over the lives of the processes that count.

    The gateway's and the engine's begin anew independently. A life is over when any counter of its group has gone back.
    """

    def __init__(self) -> None:
        self.latest: Mapping[str, float] = {}
        self._before: defaultdict[str, float] = defaultdict(float)

    def take(self, samples: Mapping[str, float]) -> None:
        """One more look."""
        for engine in (False, True):
            names = [name for name in self.latest if name.endswith("_total") and name.startswith(_ENGINE) == engine]
            if any(samples.get(name, 0.0) < self.latest[name] for name in names):
                for name in names:
                    self._before[name] += self.latest[name]
        self.latest = samples

    def total(self, name: str) -> float | None:
        """The sum over all lives; None: there is no such counter."""
        if name not in self.latest and name not in self._before:
            return None
        return self._before.get(name, 0.0) + self.latest.get(name, 0.0)


class Follower:
    """Looks at ``/metrics`` of a server while it is entered.

    Attributes:
        counters: What was found.
        answers: Whether the last look was answered.
    """

    def __init__(self, url: str) -> None:
        self._address = f"{url}/metrics"
        self._session: aiohttp.ClientSession | None = None
        self._looking: asyncio.Task[None] | None = None
        self.counters = Counters()
        self.answers = False

    async def __aenter__(self) -> "Follower":
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        self._looking = asyncio.create_task(self._look_on(), name="chaos scrape")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._looking is not None
        assert self._session is not None
        self._looking.cancel()
        await asyncio.wait({self._looking})
        await self._session.close()

    async def look(self) -> bool:
        """Looks now; whether the server answered with metrics."""
        assert self._session is not None
        self.answers = False
        with suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._session.get(self._address) as response:
                if response.status == 200:
                    self.counters.take(parse_metrics(await response.text()))
                    self.answers = True
        return self.answers

    async def _look_on(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)
