"""The doctor's rounds in a gateway itself, for whoever watches it live: the same rules, on the last ten seconds.

Nobody pays for it while nobody watches: a look is taken when somebody asks, and looks that are too old are forgotten.
"""

from collections import deque
from collections.abc import Callable, Sequence

from maitred.core.clock import Clock
from maitred.observe.diagnosis.diagnosis import diagnose
from maitred.observe.diagnosis.finding import DiagnosisFinding
from maitred.observe.diagnosis.watch import ScrapeWatcher
from maitred.observe.samples import MetricSamples

_EVERY_S = 2.0
_LEAST_S = 4.0
"""A gauge at one moment says little."""
_LAST_S = 10.0


class LiveDiagnosis:
    """Looks at the gateway that it is in.

    Args:
        look: All of its metrics, now.
        clock: The time.
    """

    def __init__(self, look: Callable[[], MetricSamples], clock: Clock) -> None:
        self._scrape = look
        self._clock = clock
        self._scrapes: deque[tuple[float, MetricSamples]] = deque()
        self._found: Sequence[DiagnosisFinding] | None = None

    def findings(self) -> Sequence[DiagnosisFinding] | None:
        """What holds requests up, most important first; None: it was not watched for long enough to say."""
        now_s = self._clock.monotonic_s()
        if self._scrapes and now_s - self._scrapes[-1][0] < _EVERY_S:
            return self._found
        while self._scrapes and now_s - self._scrapes[0][0] > _LAST_S:
            self._scrapes.popleft()
        self._scrapes.append((now_s, self._scrape()))
        seconds = now_s - self._scrapes[0][0]
        watch = ScrapeWatcher([samples for _, samples in self._scrapes], seconds)
        self._found = diagnose(watch.vitals()) if seconds >= _LEAST_S else None
        return self._found
