"""Evidence about a rare event's rate, which may be looked at after every trial: pure code.

`BelowTest` shows that a rate is below a limit, `AboveDetector` notices that it has come to lie above. Both multiply
likelihood ratios, bets at fair odds under the hypothesis, so errors stay bounded under any rule of stopping (Ville's
inequality; Shafer, "Testing by betting", Journal of the Royal Statistical Society A, 2021). A fixed number of trials
would need the Clopper-Pearson bound; where it is asked after each trial, that bound errs far more often than it says.
"""

import math

_BISECTIONS = 40


class BelowTest:
    """Test of the hypothesis that a rate is at least `limit`, by a mixture of bets on lower rates.

    The evidence after n trials with x events is the mean, over alternatives q < limit, of the likelihood of q over that
    of `limit`: an e-process under the hypothesis. It depends on n and x alone, so there is nothing else to be kept.
    The alternative 0 reaches a confidence first as long as nothing happens; others catch up where events are rare.

    Args:
        limit: Limit of the rate.
        confidence: Probability of no error, over all times at which the test may be asked.
    """

    def __init__(self, limit: float, confidence: float) -> None:
        self._limit = limit
        self._confidence = confidence
        self._fewest: list[int] = []
        """For each number of events, trials that are enough."""

    def is_below(self, trials: int, events: int) -> bool:
        """Whether the evidence says that the rate is below the limit."""
        return trials >= self.fewest_trials(events)

    def fewest_trials(self, events: int) -> int:
        """Returns after how many trials with so many events the rate is shown to be below the limit."""
        while len(self._fewest) <= events:
            here = len(self._fewest)
            low = self._fewest[-1] if self._fewest else 0
            high = max(2 * low, 64)
            while not _is_below(high, here, self._limit, self._confidence):
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if _is_below(middle, here, self._limit, self._confidence) else (middle, high)
            self._fewest.append(high)
        return self._fewest[events]


def upper_bound(trials: int, events: int, confidence: float) -> float:
    """Returns the least limit that a rate is shown to be below by `BelowTest`; 1: none yet."""
    low, high = events / max(1, trials), 1.0
    if low >= 1.0:
        return 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _is_below(trials, events, middle, confidence) else (middle, high)
    return high


_ALTERNATIVES = ((0.0, 0.3), (0.2, 0.35), (0.45, 0.35))
"""Rates that are bet on, as parts of the limit, and the parts of the stake."""


def _is_below(trials: int, events: int, limit: float, confidence: float) -> bool:
    terms = []
    for part, stake in _ALTERNATIVES:
        if part or not events:
            absent, present = _log_ratios(part * limit, limit)
            terms.append(math.log(stake) + (trials - events) * absent + (events * present if events else 0.0))
    most = max(terms)
    return most + math.log(sum(math.exp(term - most) for term in terms)) >= -math.log1p(-confidence)


class AboveDetector:
    """Detector of the moment from which on a rate lies above a limit (Page, "Continuous inspection schemes", 1954).

    For each alternative above the limit it keeps the likelihood ratio of the trials since the time that speaks most for
    a change (a cumulated sum). While the rate stays at or below the limit, the mean number of trials to a false alarm
    is at least `alarm_ratio` for a single alternative, and in practice many times that, since the rate that is served
    lies clearly below.

    Args:
        limit: Limit of the rate.
        alarm_ratio: Likelihood ratio at which it raises the alarm.
        sums: State of a former detector.

    Attributes:
        sums: Logarithm of the likelihood ratio for each alternative; never negative.
    """

    ALTERNATIVES = (2.0, 4.0)
    """Rates after a change, in units of the limit."""

    def __init__(self, limit: float, *, alarm_ratio: float, sums: tuple[float, ...] = ()) -> None:
        self.sums = sums or tuple(0.0 for _ in self.ALTERNATIVES)
        self._alarm = math.log(alarm_ratio)
        self._steps = [_log_ratios(min(ratio * limit, (1 + limit) / 2), limit) for ratio in self.ALTERNATIVES]

    def add(self, happened: bool) -> bool:
        """Adds a trial and returns whether the rate has come to lie above the limit."""
        self.sums = tuple(max(0.0, s + step[happened]) for s, step in zip(self.sums, self._steps, strict=True))
        return max(self.sums) >= self._alarm


def _log_ratios(rate: float, limit: float) -> tuple[float, float]:
    """Returns the log-likelihood ratios of a trial without and one with the event."""
    return math.log1p(-rate) - math.log1p(-limit), math.log(rate / limit) if rate else -math.inf
