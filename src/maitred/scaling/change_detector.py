"""Detector of changes of a rate: arrivals of the last seconds that chance does not explain.

Once a second, sums over the last seconds are held against the rate from before them. Their weights grow with time,
which is the matched filter of a flank: it sees one at 0.87 of the deviation that a plain sum needs, and a step at 1.06
of it. The deviation is the signed root of the deviance, which is normal in both tails even where counts are small. Its
variance is measured for each length, because bursts last longer than a second; that of Poisson counts is the least.

Long windows overlap for longer, so a day has fewer of them that are independent. Each length has the bound that chance
exceeds equally often, so a long window needs a smaller deviation than a short one.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist

_SPANS_S = (6, 8, 11, 16, 23, 32, 45, 64, 90)
"""Lengths of the windows."""
MOST_SPAN_S = _SPANS_S[-1]
_FALSE_PER_DAY = 1 / 30
_OVERLAP = 5.0
"""Windows that end in each second exceed a bound as often as so many times their number that do not overlap."""
_DAY_S, _MEMORY_S = 86_400.0, 3_600.0
_MOST_SQUARE, _CLIPPED_MEAN = 9.0, 0.99
"""Largest square of a deviation that counts for the variances, in units of them, and the mean of those of chance."""


class ChangeDetector:
    """Holds arrivals of the last seconds against what was expected before them.

    Args:
        false_per_day: Changes upwards that are found in a day of constant load, and as many downwards.

    Attributes:
        variances: Variance of the deviation for each length; that of Poisson counts is 1.
        expected: Requests per second that were expected before each of the last seconds, since the last change.
    """

    def __init__(self, *, false_per_day: float = _FALSE_PER_DAY) -> None:
        share = false_per_day / len(_SPANS_S)
        self._bounds = [-NormalDist().inv_cdf(share * span_s / (_OVERLAP * _DAY_S)) for span_s in _SPANS_S]
        self.variances = [1.0] * len(_SPANS_S)
        self.expected: deque[float] = deque(maxlen=MOST_SPAN_S)

    def change(self, totals: Sequence[float], expected: float, known_s: float) -> tuple[float, int] | None:
        """Returns the rate since a change and the seconds of its window; None: chance explains what has come.

        The rate is the mean over the window with growing weights: two thirds of the height of a flank that fills it.

        Args:
            totals: Requests up to the end of each of the last seconds.
            expected: Requests per second that were expected before the last second.
            known_s: Seconds of which the expected rate is the mean, more or less.
        """
        self.expected.append(expected)
        last, most = totals[-1], 1.0
        found: tuple[float, int] | None = None
        weighted, age = 0.0, 0
        for index, span_s in enumerate(_SPANS_S):
            if span_s > len(self.expected) or span_s >= len(totals):
                break
            for back in range(age + 2, span_s + 2):
                weighted += last - totals[-back]
            age = span_s
            rate = 2 * weighted / (span_s * (span_s + 1))
            worth_s = 1.5 * span_s * (span_s + 1) / (2 * span_s + 1)
            root = _deviation(rate * worth_s, self.expected[-span_s] * worth_s) / math.sqrt(1 + worth_s / known_s)
            variance = max(1.0, self.variances[index])
            square = min(root * root, _MOST_SQUARE * variance) / _CLIPPED_MEAN
            self.variances[index] += (square - self.variances[index]) / _MEMORY_S
            share = abs(root) / (math.sqrt(variance) * self._bounds[index])
            if share > most:
                most, found = share, (rate, span_s)
        return found


def _deviation(count: float, expected: float) -> float:
    """Returns the signed root of the deviance of a Poisson count."""
    expected = max(expected, 1e-9)
    deviance = (count * math.log(count / expected) if count > 0 else 0.0) - count + expected
    return math.copysign(math.sqrt(max(0.0, 2 * deviance)), count - expected)
