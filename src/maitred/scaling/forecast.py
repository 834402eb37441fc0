"""Forecast of the demand for a model: level, trend, daily and weekly profile, and bursts; it measures its own error.

Several simple forecasts compete: short, middle and long averages, a damped trend, and the middle average carried along
the profile of the day and of the week. For each horizon they are mixed by how well they have forecast lately (Bayesian
model averaging with a fading memory). The band around the mixture is that of the errors that it made, so bursts that
nothing foretells make it as wide as they were.

All is computed with square roots of rates: the square root of a Poisson count has the same variance at any rate (M. S.
Bartlett, 1936), so errors at night tell something of those at noon.
"""

import math
from bisect import bisect_left
from collections import deque

import msgspec

from maitred.scaling.change_detector import MOST_SPAN_S, ChangeDetector
from maitred.scaling.demand import ArrivalWindow, RequestMix
from maitred.scaling.demand_profile import DemandProfile
from maitred.scaling.forecast_errors import normal_quantile
from maitred.scaling.forecast_snapshot import VERSION, ForecastSnapshot
from maitred.scaling.horizon_forecast import BIN_S, HorizonForecast

_HORIZONS_S = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0)
_LEVEL_MEMORIES_S = (15.0, 60.0, 600.0)
"""Time constants of the averages."""
_TRENDS_S = ((30.0, 90.0, 180.0), (10.0, 10.0, 60.0))
"""Time constants of level and slope of the trends, and how far the slope carries: trends are damped."""
_BROKEN_S = 60.0
"""For how long after a break upwards the highest of the forecasts counts, and the ramp."""
_MIX_MEMORY_S = 240.0
_MIX_REQUESTS = 200
"""So many requests are remembered for the mix, however long ago they came."""
_DAY_S = 86_400.0
_MOST_PROFILE_RATIO = 8.0
_STEP_S, _STEPS = 1.0, 5
"""Length of the parts of a bin in which changes are looked for, and their number."""
_LEARNING_BINS = 12
"""In the first bins no change is found: too little is known."""
_RAMP_S, _FLANK_S = 20, 10.0
"""Seconds from which a ramp is drawn, and for how long the line of the change that was found counts beside it."""
_MOST_RAMP_S, _MOST_RAMP_RATIO = 45.0, 2.5
"""For how long a ramp goes on at most, and how far: a step looks like one at first."""
_GUESSED_GROWTH = 0.1
"""Standard deviation of a rate's change that is assumed while few errors are known, as a share of the rate."""


class ForecastRange(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second at a time to come: the middle of the distribution and a band of 90 %."""

    low: float
    mean: float
    high: float


class DemandForecast:
    """Forecast of the requests per second that will arrive, and the mix of their sizes.

    Args:
        start_s: Seconds since the Unix epoch at time 0 of the windows: profiles need the time of day and of the week.
    """

    def __init__(self, *, start_s: float = 0.0) -> None:
        self._start_s = start_s
        self.window_s = 10.0
        """Time over which a rate is averaged where it is compared with a forecast: about as long as a request runs."""
        self._bins = 0
        self._count = self._elapsed_s = 0.0
        """Requests and seconds of the step that has not ended."""
        self._steps = 0
        """Steps of the bin that has not ended."""
        self._totals: deque[float] = deque([0.0], maxlen=MOST_SPAN_S + 2)
        """Requests up to the end of each of the last steps."""
        self._levels = [0.0] * len(_LEVEL_MEMORIES_S)
        self._level_history: deque[float] = deque(maxlen=round(_HORIZONS_S[-1] / BIN_S) + 1)
        self._trends = [_Trend(*constants) for constants in _TRENDS_S]
        self._known_s = 0.0
        """Seconds of which the longest average is the mean, more or less."""
        self._changes = ChangeDetector()
        self._broken_until_bin = 0
        self._flank_s, self._flank = math.inf, (0.0, 0.0)
        """Seconds since a flank was found, its height then, and its slope."""
        self._profiles = (DemandProfile(_DAY_S, 96), DemandProfile(7 * _DAY_S, 168))
        self._horizons = [HorizonForecast(seconds) for seconds in _HORIZONS_S]
        self._sizes = _SizeSums()
        self._last_arrival_s = -math.inf
        self._surge_at, self._last_surge = (-1, 0.0), 0.0
        self._now_s = 0.0

    def observe(self, window: ArrivalWindow) -> None:
        """Takes what has arrived. Windows come in order; their lengths may differ."""
        self._sizes.add(window)
        if window.requests:
            self._last_arrival_s = window.start_s + window.length_s
        if window.length_s <= 0:
            self._count += window.requests
        left_s, start_s = window.length_s, window.start_s
        while left_s > 1e-9:
            part_s = min(left_s, _STEP_S - self._elapsed_s)
            self._count += window.requests * part_s / window.length_s
            self._elapsed_s += part_s
            start_s += part_s
            left_s -= part_s
            if self._elapsed_s >= _STEP_S - 1e-9:
                self._close_step(self._start_s + start_s)
        self._now_s = window.start_s + window.length_s

    def _close_step(self, at_s: float) -> None:
        self._totals.append(self._totals[-1] + self._count)
        self._count = self._elapsed_s = 0.0
        self._steps += 1
        self._flank_s += _STEP_S
        usual, known_s = self._levels[-1], max(BIN_S, self._known_s)
        is_whole = self._steps == _STEPS
        if is_whole:
            self._steps = 0
            self._bins += 1
            self._average(at_s)
        change = self._changes.change(self._totals, usual, known_s)
        if self._bins <= _LEARNING_BINS:
            self._changes.expected.clear()
        elif change is not None:
            self._break_levels(usual, *change)
        if is_whole:
            self._forecast_anew(at_s)
        elif self._bins < self._broken_until_bin:
            for horizon in self._horizons:
                forecasts = self._forecasts(at_s, horizon.seconds)
                horizon.forecast = max(horizon.forecast, self._least(forecasts, horizon.seconds))

    def _average(self, at_s: float) -> None:
        """Takes the rate of a bin into the averages."""
        rate = self._mean_rate(BIN_S)
        for index, memory_s in enumerate(_LEVEL_MEMORIES_S):
            # In the beginning and after a break the average is the plain mean since then.
            weight = max(BIN_S / (BIN_S + self._known_s), -math.expm1(-BIN_S / memory_s))
            self._levels[index] += weight * (rate - self._levels[index])
        self._known_s = min(self._known_s + BIN_S, 2 * _LEVEL_MEMORIES_S[-1])
        for trend in self._trends:
            trend.observe(rate, self._bins)
        for profile in self._profiles:
            profile.observe(at_s - BIN_S, rate, BIN_S)

    def _forecast_anew(self, at_s: float) -> None:
        """Settles the forecasts for now, and makes new ones."""
        self._level_history.append(math.sqrt(self._levels[1]))
        outcome = math.sqrt(self._mean_rate(self.window_s))
        highest = 0.0
        for horizon in self._horizons:
            horizon.settle(self._bins, outcome, self._level_history, self._spread(horizon.forecast))
            forecasts = self._forecasts(at_s, horizon.seconds)
            is_broken = self._bins < self._broken_until_bin
            horizon.forecast_from(self._bins, forecasts, self._least(forecasts, horizon.seconds) if is_broken else 0.0)
            highest = max(highest, horizon.forecast)
            horizon.await_return(self._bins, highest)

    def _least(self, forecasts: list[float], in_s: float) -> float:
        """Returns the least that is forecast after a break upwards, as the square root of a rate."""
        least = max(*forecasts, math.sqrt(self._ramp(in_s)))
        return min(least, math.sqrt(_MOST_RAMP_RATIO * self._mean_rate(_RAMP_S / 2)))

    def _break_levels(self, usual: float, level: float, span_s: int) -> None:
        """Sets the averages to the rate since a change.

        Otherwise a long average, which is best while nothing happens, would lag for minutes behind it.
        """
        self._levels = [level for _ in self._levels]
        # So much is a mean with growing weights worth.
        self._known_s = 0.75 * span_s
        for trend in self._trends:
            trend.level = max(trend.level, level) if level > usual else level
        if level > usual:
            # The weighted mean of a flank that began at the usual rate is two thirds of its height. Where one change
            # follows another, the usual rate is not known.
            if self._bins >= self._broken_until_bin:
                risen = 1.5 * (level - usual)
                self._flank_s, self._flank = 0.0, (usual + risen, risen / span_s)
            self._broken_until_bin = self._bins + round(_BROKEN_S / BIN_S)
        self._changes.expected.clear()

    def _mean_rate(self, seconds: float) -> float:
        """Returns the mean rate of about so many last seconds."""
        steps = min(max(1, round(seconds / _STEP_S)), len(self._totals) - 1)
        return (self._totals[-1] - self._totals[-1 - steps]) / (steps * _STEP_S)

    def _ramp(self, in_s: float) -> float:
        """Returns the rate on the line through the last seconds, as far as chance does not explain its slope."""
        half = min(_RAMP_S, len(self._totals) - 1) // 2
        if not half:
            return 0.0
        last, middle, first = (self._totals[-1 - back] for back in (0, half, 2 * half))
        seconds = half * _STEP_S
        rate, slope = (last - middle) / seconds, (last - 2 * middle + first) / seconds**2
        # The square of what chance makes of the slope: Poisson noise, times by how much arrivals exceed it.
        noise = max(1.0, self._changes.variances[0]) * (last - first) / seconds**4
        left_s = min(in_s, _MOST_RAMP_S)
        if slope > 0 and slope * slope > noise:
            rate += (slope - noise / slope) * (0.5 * seconds + left_s)
        if self._flank_s < _FLANK_S:
            height, slope = self._flank
            rate = max(rate, height + slope * (self._flank_s + left_s))
        return rate

    def _forecasts(self, at_s: float, in_s: float) -> list[float]:
        """Returns the competing forecasts, as square roots of rates."""
        _, middle, _ = self._levels
        rates = [*self._levels, *(trend.at(in_s) for trend in self._trends)]
        for profile in self._profiles:
            now, then = profile.at(at_s), profile.at(at_s + in_s)
            ratio = 1.0 if now is None or then is None else (then + 1e-9) / (now + 1e-9)
            rates.append(middle * min(_MOST_PROFILE_RATIO, max(1 / _MOST_PROFILE_RATIO, ratio)))
        return [math.sqrt(rate) for rate in rates]

    def _spread(self, forecast: float) -> float:
        """Returns the standard deviation that is assumed while few errors are known: Poisson noise, and some growth."""
        return math.hypot(0.5 / math.sqrt(self.window_s), 0.5 * _GUESSED_GROWTH * forecast)

    def at(self, in_s: float, quantile: float = 0.5) -> float:
        """Returns a quantile of the mean requests per second around the time `in_s` seconds from now."""
        return self._quantile(in_s, quantile) + self._surge()

    def _quantile(self, in_s: float, quantile: float) -> float:
        horizons = self._horizons
        index = bisect_left(_HORIZONS_S, in_s)
        if index == 0 or index == len(horizons):
            return max(0.0, self._root(horizons[min(index, len(horizons) - 1)], quantile)) ** 2
        before, after = horizons[index - 1], horizons[index]
        share = (in_s - before.seconds) / (after.seconds - before.seconds)
        root = self._root(before, quantile) * (1 - share) + self._root(after, quantile) * share
        return max(0.0, root) ** 2

    def _root(self, horizon: HorizonForecast, quantile: float) -> float:
        if not self._bins:
            seconds = max(1.0, self._steps * _STEP_S + self._elapsed_s)
            return math.sqrt((self._totals[-1] + self._count) / seconds) + 0.5 / math.sqrt(seconds) * normal_quantile(
                quantile
            )
        error = horizon.errors.quantile(quantile, self._spread(horizon.forecast))
        # After a break, the level itself is known from a few seconds only.
        doubt = 0.5 / math.sqrt(max(BIN_S, self._known_s)) * normal_quantile(quantile)
        wider = math.hypot(error, doubt) - abs(error)
        return horizon.forecast + error + math.copysign(wider, doubt)

    def _surge(self) -> float:
        """Returns by how many per second the last arrivals exceed the forecast, if chance does not explain it; else 0.

        A bin is too long to wait for its end where a crowd comes.
        """
        at = self._bins * _STEPS + self._steps, self._count
        if self._bins and self._surge_at != at:
            self._surge_at = at
            high, surge = self._quantile(0.0, 0.95), 0.0
            for steps in (self._steps, self._steps + _STEPS):
                seconds = steps * _STEP_S + self._elapsed_s
                count = self._count + self._totals[-1] - self._totals[max(-1 - steps, -len(self._totals))]
                expected = high * seconds
                if seconds > 0 and count > expected + 4 * math.sqrt(expected) + 3:
                    surge = max(surge, count / max(1.0, seconds) - high)
            self._last_surge = surge
        return self._last_surge

    def range(self, in_s: float) -> ForecastRange:
        """Returns the band of 90 % around the forecast for `in_s` seconds from now."""
        return ForecastRange(low=self.at(in_s, 0.05), mean=self.at(in_s), high=self.at(in_s, 0.95))

    def return_chance(self, requests_per_s: float, within_s: float) -> float | None:
        """Returns the probability that the demand's level reaches a rate within so many seconds.

        It is the share of earlier times when the level rose by as much. None: there is not enough history.
        """
        index = min(bisect_left(_HORIZONS_S, within_s), len(_HORIZONS_S) - 1)
        return self._horizons[index].return_chance(math.sqrt(requests_per_s))

    @property
    def highest_level(self) -> float:
        """Highest level of the last hour, in requests per second."""
        return max(self._level_history, default=0.0) ** 2

    @property
    def level(self) -> float:
        """Present requests per second, as the average of about a minute."""
        return self._levels[1]

    @property
    def silent_s(self) -> float:
        """Seconds since the last arrival; infinite if there was none."""
        return self._now_s - self._last_arrival_s

    @property
    def coverage(self) -> float | None:
        """Share of the outcomes that the 90 % band has covered lately, of horizons up to minutes; None: too few."""
        known = [horizon.errors.coverage for horizon in self._horizons[:6]]
        covered = [coverage for coverage in known if coverage is not None]
        return sum(covered) / len(covered) if covered else None

    @property
    def mix(self) -> RequestMix | None:
        """Sizes of recent requests; None: there has been none."""
        return self._sizes.mix()

    def snapshot(self) -> ForecastSnapshot:
        """Returns what was learnt up to the last whole bin."""
        return ForecastSnapshot(
            window_s=self.window_s,
            silent_s=self.silent_s,
            bins=self._bins,
            totals=[*self._totals],
            broken_bins=max(0, self._broken_until_bin - self._bins),
            levels=[*self._levels],
            level_history=[*self._level_history],
            trends=[(trend.level, trend.slope) for trend in self._trends],
            known_s=self._known_s,
            variances=[*self._changes.variances],
            expected=[*self._changes.expected],
            profiles=[profile.snapshot() for profile in self._profiles],
            horizons=[horizon.snapshot() for horizon in self._horizons],
            sizes=self._sizes.sums,
        )

    def restore(self, snapshot: ForecastSnapshot, now_s: float = 0.0) -> None:
        """Goes on from a snapshot; call it before anything is observed.

        Nothing was observed since then: that is not a demand of zero. So the level is what it was, and the outcomes of
        forecasts that were due meanwhile do not count.

        Args:
            snapshot: What an earlier forecast had learnt.
            now_s: The present time, on the clock of the windows.

        Raises:
            ValueError: It is that of another version.
        """
        lengths = tuple(
            len(part)
            for part in (snapshot.levels, snapshot.trends, snapshot.variances, snapshot.profiles, snapshot.horizons)
        )
        own = self._levels, self._trends, self._changes.variances, self._profiles, self._horizons
        own_lengths = tuple(len(part) for part in own)
        if snapshot.version != VERSION or lengths != own_lengths or not snapshot.totals or len(snapshot.sizes) != 6:
            raise ValueError(f"it has version {snapshot.version} or other parts")
        for profile, known in zip(self._profiles, snapshot.profiles, strict=True):
            profile.restore(known)
        for horizon, one in zip(self._horizons, snapshot.horizons, strict=True):
            horizon.restore(one)
        for trend, (level, slope) in zip(self._trends, snapshot.trends, strict=True):
            trend.level, trend.slope = level, slope
        self._sizes.sums = snapshot.sizes
        self.window_s, self._bins = snapshot.window_s, snapshot.bins
        self._totals.clear()
        self._totals.extend(snapshot.totals)
        self._broken_until_bin = self._bins + snapshot.broken_bins
        self._levels, self._known_s = [*snapshot.levels], snapshot.known_s
        self._changes.variances = [*snapshot.variances]
        self._level_history.extend(snapshot.level_history)
        self._changes.expected.extend(snapshot.expected)
        self._now_s, self._last_arrival_s = now_s, now_s - snapshot.silent_s


class _Trend:
    """Level and slope of the rate (Holt's linear trend, damped)."""

    def __init__(self, level_s: float, slope_s: float, ends_s: float) -> None:
        self._level_weight, self._slope_weight = (-math.expm1(-BIN_S / memory_s) for memory_s in (level_s, slope_s))
        self._ends_s = ends_s
        self.level = self.slope = 0.0

    def observe(self, rate: float, bins: int) -> None:
        before = self.level
        expected = before + self.slope * BIN_S
        self.level = expected + max(1 / bins, self._level_weight) * (rate - expected)
        if bins > 2:
            self.slope += self._slope_weight * ((self.level - before) / BIN_S - self.slope)

    def at(self, in_s: float) -> float:
        return max(0.0, self.level + self.slope * self._ends_s * -math.expm1(-in_s / self._ends_s))


class _SizeSums:
    """Sums over recent requests, which fade with time as long as there are many."""

    def __init__(self) -> None:
        self._requests = self._prompt = self._output = self._cached = 0.0
        self._prompt_squares = self._output_squares = 0.0

    def add(self, window: ArrivalWindow) -> None:
        if self._requests > _MIX_REQUESTS:
            fade = math.exp(-window.length_s / _MIX_MEMORY_S)
            self._requests *= fade
            self._prompt *= fade
            self._output *= fade
            self._cached *= fade
            self._prompt_squares *= fade
            self._output_squares *= fade
        requests = window.requests
        if requests <= 0:
            return
        self._requests += requests
        self._prompt += window.prompt_tokens
        self._output += window.output_tokens
        self._cached += window.cached_tokens
        # The sum over k requests differs from k means by a square of k variances on average.
        self._prompt_squares += (window.prompt_tokens - requests * self._prompt / self._requests) ** 2
        self._output_squares += (window.output_tokens - requests * self._output / self._requests) ** 2

    @property
    def sums(self) -> list[float]:
        return [
            self._requests,
            self._prompt,
            self._output,
            self._cached,
            self._prompt_squares,
            self._output_squares,
        ]

    @sums.setter
    def sums(self, sums: list[float]) -> None:
        self._requests, self._prompt, self._output, self._cached, self._prompt_squares, self._output_squares = sums

    def mix(self) -> RequestMix | None:
        if self._requests <= 0:
            return None
        requests = self._requests
        prompt, output = self._prompt / requests, max(1.0, self._output / requests)
        few = requests < 20
        return RequestMix(
            prompt_tokens=prompt,
            output_tokens=output,
            cached_tokens=self._cached / requests,
            prompt_variation=1.0 if few or not prompt else min(10.0, self._prompt_squares / requests / prompt**2),
            output_variation=1.0 if few else min(10.0, self._output_squares / requests / output**2),
        )
