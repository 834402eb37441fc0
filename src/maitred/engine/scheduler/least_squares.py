"""A linear model that is learnt while it is used: non-negative, deaf to outliers, forgetful of the right things.

Ordinary recursive least squares forgets at one rate. After an hour of steps that only decode it would know nothing of
prefill any more. Here every observation belongs to a *stratum*, observations of the same kind, and each stratum keeps
sums of its own (the normal equations) that fade only as new observations of the same kind come in. The fit is over the
strata together, so a kind of which much is seen does not drown the others either.

An observation's error counts relative to what was observed or predicted, whichever is more. So short and long
ones matter alike, and one that was a hundred times too long, because the machine did something else meanwhile, pulls
a hundred times less than its error would.
"""

from collections.abc import Hashable, Sequence

_SWEEPS = 30
_TINY = 1e-12
_SETTLED = 2e-4
"""A sweep that changes predictions by less than this, relatively and as a rule, was the last."""


class LeastSquares:
    """Learns ``y ~ sum(x[i] * coefficient[i])`` with no coefficient below 0.

    Costs O(d^2) for an observation and O(d^2 * (strata + sweeps)) for a fit, `d` being the number of features.

    Args:
        features: How many there are.
        memory: Observations of one stratum that count: older ones fade.
    """

    def __init__(self, features: int, memory: int) -> None:
        self._features = features
        self._fade = 1.0 - 1.0 / memory
        self._strata: dict[Hashable, list[float]] = {}
        """The upper triangle of sum(w x x') and then sum(w y x), row by row."""
        self.coefficients = [0.0] * features

    def predict(self, x: Sequence[float]) -> float:
        """Predicts a value by the latest fit."""
        return sum(a * b for a, b in zip(self.coefficients, x, strict=True))

    def observe(self, stratum: Hashable, x: Sequence[float], y: float, share: float = 1.0) -> None:
        """Takes an observation in (`y` > 0), or one that counts as a share of one; `fit` makes it count."""
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

        Coordinate descent from the previous coefficients: convex, so it ends at the optimum, and where the observations
        leave a choice it stays near what it said before.
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
            # Every observation has a weight of one over its square, so this sum is about their number.
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
