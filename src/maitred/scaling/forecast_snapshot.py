"""Snapshot of what a forecast has learnt, so that it outlives the process."""

import msgspec

VERSION = 2
"""Version of the snapshots. One of another version says nothing."""


class ProfileSnapshot(msgspec.Struct, frozen=True):
    """Usual rates of a profile, and what is known of the slot that has not ended."""

    rates: list[float | None]
    slot: int
    sum: float
    seconds: float


class ErrorsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Recent errors of a forecast, oldest first, with the levels and the coverage of its band."""

    recent: list[float]
    lower_tail: float
    upper_tail: float
    covered: float
    weight: float


class HorizonSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture for one horizon, the errors of those that compete, and the returns of the demand."""

    forecast: float
    highest: float
    settled: int
    squares: list[float]
    errors: ErrorsSnapshot
    returns: list[float]


class ForecastSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Knowledge of a forecast that outlives its process. Forecasts whose outcome is not known yet are left out."""

    version: int = VERSION
    window_s: float
    silent_s: float
    """Seconds since the last arrival."""
    bins: int
    totals: list[float]
    """Requests up to the end of each of the last seconds."""
    broken_bins: int
    """For how many more bins the last break counts."""
    levels: list[float]
    level_history: list[float]
    trends: list[tuple[float, float]]
    """Level and slope of each."""
    known_s: float
    """Seconds of which the longest average is the mean, more or less."""
    variances: list[float]
    """Variances of the counts, by the length in which changes are looked for."""
    expected: list[float]
    """Rates that were expected before each of the last seconds, since the last change."""
    profiles: list[ProfileSnapshot]
    horizons: list[HorizonSnapshot]
    sizes: list[float]
    """Sums over recent requests."""
