"""Errors of forecasts for one horizon: the band around a forecast comes from how wrong earlier ones were."""

from bisect import bisect_left, insort
from collections import deque

from maitred.scaling.forecast_snapshot import ErrorsSnapshot

_KEPT = 1_024
"""Errors that are kept."""
_FEW = 40
"""With fewer errors than this, a guess of their spread is used."""
_TAIL = 0.05
"""Share of outcomes that the band leaves out on each side."""
_STEP = 0.005
"""How much an outcome moves the level of the band: a few hundred outcomes bring it where it must be."""
_MEMORY = 1 / 500
"""Weight of the newest outcome in the coverage."""


class ForecastErrors:
    """Recent errors of one forecast, in the order of their size, and the coverage of the 90 % band.

    Quantiles of recent errors alone cover too little where the errors grow. Adaptive conformal inference corrects the
    level at which quantiles are taken until the band covers what it should (I. Gibbs and E. Candès, "Adaptive Conformal
    Inference Under Distribution Shift", NeurIPS 2021). Each side of the band has its own level.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._lower_tail = self._upper_tail = _TAIL
        self._covered = 0.0
        self._weight = 0.0

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def coverage(self) -> float | None:
        """Share of the recent outcomes in the band; None: there are too few."""
        return self._covered / self._weight if len(self._recent) >= _FEW else None

    def observe(self, error: float, spread: float) -> None:
        """Takes the error of a forecast whose outcome is known now.

        Args:
            error: Outcome less forecast.
            spread: Standard deviation of the error that is assumed while there are few.
        """
        low, high = self.quantile(_TAIL, spread), self.quantile(1 - _TAIL, spread)
        self._weight += _MEMORY * (1 - self._weight)
        self._covered += _MEMORY * ((low <= error <= high) - self._covered)
        if len(self._recent) >= _FEW:
            self._lower_tail = min(0.5, max(-0.05, self._lower_tail + _STEP * (_TAIL - (error < low))))
            self._upper_tail = min(0.5, max(-0.05, self._upper_tail + _STEP * (_TAIL - (error > high))))
        if len(self._recent) >= _KEPT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(error)
        insort(self._sorted, error)

    def snapshot(self) -> ErrorsSnapshot:
        """Returns what was learnt."""
        return ErrorsSnapshot(
            recent=[*self._recent],
            lower_tail=self._lower_tail,
            upper_tail=self._upper_tail,
            covered=self._covered,
            weight=self._weight,
        )

    def restore(self, snapshot: ErrorsSnapshot) -> None:
        """Goes on from a snapshot."""
        self._recent, self._sorted = deque(snapshot.recent[-_KEPT:]), sorted(snapshot.recent[-_KEPT:])
        self._lower_tail, self._upper_tail = snapshot.lower_tail, snapshot.upper_tail
        self._covered, self._weight = snapshot.covered, snapshot.weight

    def quantile(self, quantile: float, spread: float) -> float:
        """Returns a quantile of the errors, corrected by what the band has covered; `spread` as for `observe`."""
        count = len(self._sorted)
        if count < _FEW:
            return spread * normal_quantile(quantile)
        if quantile >= 0.5:
            return self._tail_error(_correct(1 - quantile, self._upper_tail), upper=True)
        return self._tail_error(_correct(quantile, self._lower_tail), upper=False)

    def _tail_error(self, tail: float, *, upper: bool) -> float:
        """Returns the error that a share `tail` of the errors exceeds; beyond the largest if `tail` is below 0."""
        errors = self._sorted
        place = tail * (len(errors) + 1) - 1
        beyond = 1.0
        if place < 0:
            # Beyond the largest error: as much further as its distance from the middle tells.
            beyond, place = 1.0 + min(1.0, -20.0 * tail) if tail < 0 else 1.0, 0.0
        index = min(int(place), len(errors) - 2)
        share = min(1.0, place - index)
        if upper:
            error = errors[-1 - index] * (1 - share) + errors[-2 - index] * share
        else:
            error = errors[index] * (1 - share) + errors[index + 1] * share
        if beyond > 1.0:
            middle = errors[len(errors) // 2]
            error = middle + beyond * (error - middle)
        return error


def _correct(tail: float, band_tail: float) -> float:
    """Returns the share at which a tail is taken: fully corrected at the edge of the band, and not in the middle."""
    if tail >= _TAIL:
        return tail + (band_tail - _TAIL) * (0.5 - tail) / (0.5 - _TAIL)
    return band_tail * tail / _TAIL if band_tail > 0 else band_tail


def normal_quantile(quantile: float) -> float:
    """Returns a quantile of the standard normal distribution, by Tukey's lambda of 0.135, to a few thousandths."""
    quantile = min(0.9999, max(0.0001, quantile))
    return float((quantile**0.135 - (1 - quantile) ** 0.135) / 0.1975)
