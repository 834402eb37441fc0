"""Forecast of the demand for a model: level, daily and weekly profile, and bursts; it measures its own error."""

import msgspec

from maitred.scaling.demand import ArrivalWindow, RequestMix


class ForecastRange(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second at a time to come: the middle of the distribution and a band of 90 %."""

    low: float
    mean: float
    high: float


class DemandForecast:
    """Forecast of the requests per second that will arrive, and the mix of their sizes.

    Args:
        start_s: Seconds since the Unix epoch, or since any midnight, at the first window: profiles need the time of day.
    """

    def __init__(self, *, start_s: float = 0.0) -> None:
        raise NotImplementedError

    def observe(self, window: ArrivalWindow) -> None:
        """Takes what has arrived. Windows come in order; their lengths may differ."""
        raise NotImplementedError

    def at(self, in_s: float, quantile: float = 0.5) -> float:
        """Returns a quantile of the mean requests per second around the time `in_s` seconds from now."""
        raise NotImplementedError

    def range(self, in_s: float) -> ForecastRange:
        """Returns the band of 90 % around the forecast for `in_s` seconds from now."""
        raise NotImplementedError

    def return_chance(self, requests_per_s: float, within_s: float) -> float:
        """Returns the probability that the demand reaches this rate within so many seconds, from earlier returns."""
        raise NotImplementedError

    @property
    def coverage(self) -> float | None:
        """Share of the outcomes that the 90 % band has covered lately; None: there are too few."""
        raise NotImplementedError

    @property
    def mix(self) -> RequestMix | None:
        """Sizes of recent requests; None: there has been none."""
        raise NotImplementedError
