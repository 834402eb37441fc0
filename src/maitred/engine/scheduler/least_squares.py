"""Online linear regression with non-negative coefficients, robust to outliers, with fading by stratum.

Ordinary recursive least squares forgets all observations at one rate. After an hour of decode-only steps it would have
forgotten prefill. Here every observation belongs to a *stratum* of similar observations. Each stratum keeps its own
sums (the normal equations), which fade only when new observations of the same stratum arrive. The fit uses all strata
together, so a frequent kind does not outweigh the others.

The error of an observation is relative to the larger of the observed and the predicted value. So short and long steps
have equal weight. A step that was a hundred times too long, because the machine was busy with other work, has a hundred
times less influence than its error.
"""

from collections.abc import Hashable, Sequence

_SWEEPS = 30
_TINY = 1e-12
_SETTLED = 2e-4
"""Typical relative change of the predictions below which a sweep is the last one."""


class LeastSquares:
    """Learns ``y ~ sum(x[i] * coefficient[i])`` with no coefficient below 0.

    Costs O(d^2) for an observation and O(d^2 * (strata + sweeps)) for a fit, `d` being the number of features.

    Args:
        features: Number of features.
        memory: Number of observations of a stratum that count; older ones fade.
    """

    def __init__(self, features: int, memory: int) -> None:
        self._features = features
        self._fade = 1.0 - 1.0 / memory
        self._strata: dict[Hashable, list[float]] = {}
        """Upper triangle of sum(w x x'), row by row, followed by sum(w y x)."""
        self.coefficients = [0.0] * features

    def predict(self, x: Sequence[float]) -> float:
        """Predicts a value by the latest fit."""
        return sum(a * b for a, b in zip(self.coefficients, x, strict=True))

    def observe(self, stratum: Hashable, x: Sequence[float], y: float, share: float = 1.0) -> None:
        """Adds an observation (`y` > 0) with a weight of `share`; the next `fit` uses it."""
        sums = self._strata.get(stratum)
        if sums is None:
            sums = self._strata[stratum] = [0.0] * (self._features * (self._features + 3) // 2)
        weight = share * max(y, self.predict(x)) ** -2
        fade = self._fade
        position = 0
        for i, a in enumerate(x):
            weighted = weight * a
            for b in x[i:]:
                sums[position] = fade * sums[position] + weighted * b
                position += 1
            sums[position] = fade * sums[position] + weighted * y
            position += 1

    def fit(self) -> None:
        """Finds the coefficients for all observations so far.

        It uses coordinate descent from the previous coefficients. The problem is convex, so the descent ends at the
        optimum. Where the observations allow several optima, the result stays near the previous coefficients.
        """
        total = [sum(column) for column in zip(*self._strata.values(), strict=True)]
        gram, moments = self._unpack(total)
        for _ in range(_SWEEPS):
            moved = 0.0
            for i, row in enumerate(gram):
                if row[i] <= _TINY:
                    continue
                slope = moments[i] - sum(a * b for a, b in zip(row, self.coefficients, strict=True))
                before = self.coefficients[i]
                self.coefficients[i] = max(0.0, before + slope / row[i])
                moved = max(moved, abs(self.coefficients[i] - before) * row[i] ** 0.5)
            # Every observation has the weight 1 / y², so this sum is about their number.
            seen = sum(a * b for a, b in zip(self.coefficients, moments, strict=True))
            if moved <= _SETTLED * seen**0.5:
                break

    def _unpack(self, total: Sequence[float]) -> tuple[list[list[float]], list[float]]:
        gram = [[0.0] * self._features for _ in range(self._features)]
        moments = []
        position = 0
        for i in range(self._features):
            for j in range(i, self._features):
                gram[i][j] = gram[j][i] = total[position]
                position += 1
            moments.append(total[position])
            position += 1
        return gram, moments
