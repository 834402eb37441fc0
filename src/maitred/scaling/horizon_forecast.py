"""Forecasts of the demand for one horizon: a mixture of those that compete, weighted by how wrong they were."""

import math
from bisect import bisect_left, insort
from collections import deque

from maitred.scaling.forecast_errors import ForecastErrors
from maitred.scaling.forecast_snapshot import HorizonSnapshot

BIN_S = 5.0
"""Seconds of the bins in which arrivals are counted."""
_ERROR_MEMORY_S = 86_400.0
"""Time constant of the errors by which forecasts are mixed."""
_KEPT_RETURNS = 1_024
_UNSEEN = 0.25
"""Returns that are assumed beside those seen, among one more time."""


class HorizonForecast:
    """Forecasts for one horizon: competing ones, how wrong each was, their mixture and its errors.

    Args:
        seconds: The horizon.

    Attributes:
        seconds: The horizon.
        forecast: The mixture, as the square root of a rate.
        errors: Errors of the mixture.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.forecast = 0.0
        self.errors = ForecastErrors()
        self._bins = max(1, round(seconds / BIN_S))
        self._every = max(1, self._bins // 8)
        """Outcomes of neighbouring bins are nearly the same: only one in so many is kept."""
        self._pending: deque[tuple[int, float, list[float]]] = deque()
        self._squares: list[float] = []
        self._settled = 0
        self._awaited: deque[tuple[int, float]] = deque()
        self._returns: deque[float] = deque()
        self._sorted_returns: list[float] = []
        self._highest = 0.0

    def forecast_from(self, at: int, forecasts: list[float], at_least: float) -> None:
        """Mixes the competing forecasts, to `at_least` so much, and keeps them until their outcome is known."""
        if not self._squares:
            self._squares = [0.0] * len(forecasts)
        least = min(self._squares)
        if least <= 0:
            self.forecast = forecasts[1]
        else:
            # Squared errors in units of the least are log-likelihoods of as many outcomes as are independent.
            independent = min(self._settled, _ERROR_MEMORY_S / BIN_S) / (self._bins + 2)
            weights = [math.exp(-0.5 * independent * (square / least - 1)) for square in self._squares]
            self.forecast = sum(map(float.__mul__, weights, forecasts)) / sum(weights)
        self.forecast = max(self.forecast, at_least)
        self._pending.append((at + self._bins, self.forecast, forecasts))

    def settle(self, at: int, outcome: float, levels: deque[float], spread: float) -> None:
        """Compares what was forecast for now with what has come."""
        if self._pending and self._pending[0][0] <= at:
            _, forecast, forecasts = self._pending.popleft()
            self._settled += 1
            memory = max(1 / self._settled, BIN_S / _ERROR_MEMORY_S)
            for index, one in enumerate(forecasts):
                self._squares[index] += memory * ((outcome - one) ** 2 - self._squares[index])
            if at % self._every == 0:
                self.errors.observe(outcome - forecast, spread)
        if self._awaited and self._awaited[0][0] <= at:
            _, highest = self._awaited.popleft()
            self._add_return(max(levels[index] for index in range(-self._bins, 0)) - highest)

    def await_return(self, at: int, highest: float) -> None:
        """Keeps the highest forecast up to this horizon, until it is known how high the level came."""
        if at % self._every == 0:
            self._awaited.append((at + self._bins, highest))
        self._highest = highest

    def snapshot(self) -> HorizonSnapshot:
        """Returns what was learnt."""
        return HorizonSnapshot(
            forecast=self.forecast,
            highest=self._highest,
            settled=self._settled,
            squares=[*self._squares],
            errors=self.errors.snapshot(),
            returns=[*self._returns],
        )

    def restore(self, snapshot: HorizonSnapshot) -> None:
        """Goes on from a snapshot. What is forecast now has no outcome there."""
        self.forecast, self._highest, self._settled = snapshot.forecast, snapshot.highest, snapshot.settled
        self._squares = [*snapshot.squares]
        self.errors.restore(snapshot.errors)
        self._returns, self._sorted_returns = deque(snapshot.returns), sorted(snapshot.returns)

    def _add_return(self, rise: float) -> None:
        if len(self._returns) >= _KEPT_RETURNS:
            del self._sorted_returns[bisect_left(self._sorted_returns, self._returns.popleft())]
        self._returns.append(rise)
        insort(self._sorted_returns, rise)

    def return_chance(self, root: float) -> float | None:
        """Returns the share of earlier times when the level rose by as much as it would have to now."""
        rises = self._sorted_returns
        # Times that overlap say nothing new.
        independent = len(rises) * self._every / self._bins
        if independent < 1:
            return None
        share = 1 - bisect_left(rises, root - self._highest) / len(rises)
        return (share * independent + _UNSEEN) / (independent + 1)
