"""How good the predictions are, and a slow correction of them.

What is predicted and what came are compared as a ratio. Its quantiles are exported; its drift is followed by a factor,
for a model of step times knows nothing of the network, the tokeniser, or a neighbour on the same cores. The factor is
slow, bounded, and forgets: predictions that refuse everybody could never be proved wrong.
"""

import math
from bisect import bisect_left, insort
from collections import deque

_STEP = 0.05
"""Of the distance, in logarithms, that one comparison moves the factor."""
_FARTHEST = math.log(4.0)
_FORGET_S = 60.0
"""Without comparisons the factor returns to 1 with this time constant."""
_LEAST_S = 0.005
"""Shorter times are compared as if they were this long: nobody plans by less."""


class Correction:
    """A factor on one sort of prediction."""

    def __init__(self) -> None:
        self._log = 0.0
        self._moved_s = 0.0

    def factor(self, now_s: float) -> float:
        """By what a prediction is to be multiplied."""
        return math.exp(self._now(now_s))

    def compare(self, predicted_s: float, actual_s: float, now_s: float) -> None:
        """Something came.

        Args:
            predicted_s: What had been predicted *without* the factor: it may have changed since, and to correct what
                it was then would make it swing.
            actual_s: What came.
            now_s: Now.
        """
        drift = math.log(max(actual_s, _LEAST_S) / max(predicted_s, _LEAST_S))
        here = self._now(now_s)
        self._log = here + _STEP * (min(_FARTHEST, max(-_FARTHEST, drift)) - here)
        self._moved_s = now_s

    def _now(self, now_s: float) -> float:
        return self._log * math.exp(-max(0.0, now_s - self._moved_s) / _FORGET_S) if self._log else 0.0


class Calibration:
    """The last predictions beside what came.

    Args:
        most: So many are kept.
    """

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._by_time: deque[tuple[float, float]] = deque()
        self._ratios: list[float] = []
        self._errors: list[float] = []
        self.compared = 0
        """In all."""

    def compare(self, predicted_s: float, actual_s: float) -> None:
        """Something came that had been predicted."""
        actual_s, predicted_s = max(actual_s, _LEAST_S), max(predicted_s, _LEAST_S)
        pair = predicted_s / actual_s, abs(predicted_s - actual_s) / actual_s
        if len(self._by_time) == self._most:
            ratio, error = self._by_time.popleft()
            del self._ratios[bisect_left(self._ratios, ratio)]
            del self._errors[bisect_left(self._errors, error)]
        self._by_time.append(pair)
        insort(self._ratios, pair[0])
        insort(self._errors, pair[1])
        self.compared += 1

    def ratio(self, quantile: float) -> float:
        """A quantile of predicted over actual; 1 before anything was compared."""
        return _quantile(self._ratios, quantile, 1.0)

    def error(self, quantile: float) -> float:
        """A quantile of the relative error; 0 before anything was compared."""
        return _quantile(self._errors, quantile, 0.0)


def _quantile(values: list[float], share: float, empty: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)] if values else empty
