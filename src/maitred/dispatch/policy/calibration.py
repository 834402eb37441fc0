"""How good the predictions are, and a slow correction of them.

What is predicted and what came are compared as a ratio. Its quantiles are exported; its drift is followed by a factor,
for a model of step times knows nothing of the network, the tokeniser, or a neighbour on the same cores. The factor is
slow, bounded, and forgets: predictions that refuse everybody could never be proved wrong.
"""

import math
from bisect import bisect_left, insort
from collections import deque

_ENOUGH = 16
"""Comparisons from which on the factor is believed in full."""
_FARTHEST = math.log(4.0)
_FORGET_S = 60.0
"""Without comparisons the factor returns to 1 with this time constant."""
_LEAST_S = 0.005
"""Shorter times are compared as if they were this long: nobody plans by less."""


class PredictionCorrection:
    """A factor on one sort of prediction: the median of the last ratios.

    Their mean would follow the few that go far astray, such as a request that just misses a step, and put all others
    wrong.
    """

    def __init__(self) -> None:
        self._drifts = RatioQuantiles(2 * _ENOUGH)
        self._trust = 0.0
        self._moved_s = 0.0

    def factor(self, now_s: float) -> float:
        """By what a prediction is to be multiplied."""
        return math.exp(self._drifts.at(0.5, 0.0) * min(1.0, self._trusted(now_s) / _ENOUGH))

    def compare(self, predicted_s: float, actual_s: float, now_s: float) -> None:
        """Compares a prediction with what came.

        Args:
            predicted_s: What had been predicted *without* the factor: it may have changed since, and to correct what
                it was then would make it swing.
            actual_s: What came.
            now_s: Now.
        """
        drift = math.log(max(actual_s, _LEAST_S) / max(predicted_s, _LEAST_S))
        self._drifts.add(min(_FARTHEST, max(-_FARTHEST, drift)))
        self._trust = min(float(_ENOUGH), self._trusted(now_s) + 1.0)
        self._moved_s = now_s

    def _trusted(self, now_s: float) -> float:
        """How many comparisons there were, less what was forgotten since."""
        return self._trust * math.exp(-max(0.0, now_s - self._moved_s) / _FORGET_S)


class PredictionCalibration:
    """The last predictions beside what came.

    Args:
        most: So many are kept.
    """

    def __init__(self, most: int = 512) -> None:
        self._ratios = RatioQuantiles(most)
        self._errors = RatioQuantiles(most)
        self.compared = 0
        """In all."""

    def compare(self, predicted_s: float, actual_s: float) -> None:
        """Something came that had been predicted."""
        actual_s, predicted_s = max(actual_s, _LEAST_S), max(predicted_s, _LEAST_S)
        self._ratios.add(predicted_s / actual_s)
        self._errors.add(abs(predicted_s - actual_s) / actual_s)
        self.compared += 1

    def ratio(self, quantile: float) -> float:
        """A quantile of predicted over actual; 1 before anything was compared."""
        return self._ratios.at(quantile, 1.0)

    def error(self, quantile: float) -> float:
        """A quantile of the relative error; 0 before anything was compared."""
        return self._errors.at(quantile, 0.0)


class SafetyMargin:
    """How much longer than predicted a wait may be, so that a promise about it is mostly kept.

    Learnt from the last waits, those included that were given up: without them only those would count that turned out
    short enough.
    """

    def __init__(self, kept: float = 0.97, most: int = 256) -> None:
        self._kept = kept
        self._ratios = RatioQuantiles(most)

    def compare(self, predicted_s: float, actual_s: float) -> None:
        """A wait is over, or has been given up after this time."""
        self._ratios.add(max(actual_s, _LEAST_S) / max(predicted_s, _LEAST_S))

    @property
    def factor(self) -> float:
        """From 1 to 2."""
        return min(2.0, max(1.0, self._ratios.at(self._kept, 1.0)))


class RatioQuantiles:
    """Quantiles of the last ratios of outcome to prediction.

    Args:
        most: So many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_time: deque[float] = deque()
        self._by_size: list[float] = []

    def add(self, value: float) -> None:
        """One more; the oldest may go."""
        if len(self._by_time) == self._most:
            del self._by_size[bisect_left(self._by_size, self._by_time.popleft())]
        self._by_time.append(value)
        insort(self._by_size, value)

    def at(self, quantile: float, empty: float) -> float:
        """The value at a quantile; `empty` before there was one."""
        values = self._by_size
        return values[min(int(quantile * len(values)), len(values) - 1)] if values else empty
