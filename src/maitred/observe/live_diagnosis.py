"""Live diagnosis inside a gateway: the rules of `maitred doctor` on the metrics of the last ten seconds.

It costs nothing while it is not used: metrics are sampled when findings are asked for, and old samples are dropped.
"""

from collections import deque
from collections.abc import Callable, Sequence

from maitred.core.clock import Clock
from maitred.observe.diagnosis.diagnosis import diagnose
from maitred.observe.diagnosis.finding import DiagnosisFinding
from maitred.observe.diagnosis.watch import ScrapeWatcher
from maitred.observe.samples import MetricSamples

_INTERVAL_S = 2.0
_MIN_WINDOW_S = 4.0
"""Shortest window with findings: a gauge at one moment says little."""
_MAX_WINDOW_S = 10.0


class LiveDiagnosis:
    """Diagnosis of the gateway that it runs in.

    Args:
        scrape: Returns all metrics of the gateway now.
        clock: Clock for the times of samples.
    """

    def __init__(self, scrape: Callable[[], MetricSamples], clock: Clock) -> None:
        self._scrape = scrape
        self._clock = clock
        self._scrapes: deque[tuple[float, MetricSamples]] = deque()
        self._findings: Sequence[DiagnosisFinding] | None = None

    def findings(self) -> Sequence[DiagnosisFinding] | None:
        """Returns the causes of delays, most important first; None: the window is still too short."""
        now_s = self._clock.monotonic_s()
        if self._scrapes and now_s - self._scrapes[-1][0] < _INTERVAL_S:
            return self._findings
        while self._scrapes and now_s - self._scrapes[0][0] > _MAX_WINDOW_S:
            self._scrapes.popleft()
        self._scrapes.append((now_s, self._scrape()))
        seconds = now_s - self._scrapes[0][0]
        watcher = ScrapeWatcher([samples for _, samples in self._scrapes], seconds)
        self._findings = diagnose(watcher.snapshot()) if seconds >= _MIN_WINDOW_S else None
        return self._findings
