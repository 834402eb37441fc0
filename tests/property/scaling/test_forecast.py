"""The band of the forecast covers nine outcomes of ten, whatever the load does."""

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.scaling.demand import ArrivalWindow
from maitred.scaling.forecast import DemandForecast
from maitred.scaling.forecast_errors import ForecastErrors
from maitred.scaling.forecast_snapshot import ForecastSnapshot
from tests.support.scaling.scaled_model import poisson, window

DAY_S = 86_400.0


def played(rate, hours: float, seed: int = 0, start_s: float = 0.0) -> DemandForecast:
    random_ = random.Random(seed)
    forecast = DemandForecast(start_s=start_s)
    for step in range(int(hours * 720)):
        at_s = 5.0 * (step + 1)
        forecast.observe(window(at_s, poisson(random_, 5.0 * rate(at_s)), 5.0))
    return forecast


def daily(at_s):
    return 20 * (1 + 0.7 * math.sin(2 * math.pi * at_s / DAY_S))


def bursty(at_s):
    """A third of the half hours has a burst of three times the rate, five minutes long."""
    half_hour, second = divmod(at_s, 1800.0)
    return daily(at_s) * (3.0 if half_hour * 0.618 % 1 < 0.33 and second < 300 else 1.0)


@pytest.mark.parametrize("rate", [lambda at_s: 8.0, daily, bursty], ids=["constant", "daily", "bursty"])
def test_the_band_covers_nine_of_ten(rate):
    assert played(rate, 20).coverage == pytest.approx(0.9, abs=0.03)


@given(changes=st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4), seed=st.integers(0, 1_000))
@settings(max_examples=5, deadline=None)
def test_the_band_covers_about_nine_of_ten_whatever_the_steps(changes, seed):
    forecast = played(lambda at_s: 10 * changes[int(at_s / 3600) % 4], 8, seed)
    assert 0.82 <= forecast.coverage <= 0.95


def test_the_band_widens_when_errors_grow():
    """Each error is larger than nearly all before: quantiles of the past alone would cover few of them."""
    errors, random_ = ForecastErrors(), random.Random(0)
    plain_covered = covered = 0
    seen: list[float] = []
    for step in range(3_000):
        error = random_.gauss(0, 1 + step / 300)
        if step >= 1_000:
            ordered = sorted(seen[-1_024:])
            plain_covered += ordered[51] <= error <= ordered[-52]
            covered += errors.quantile(0.05, 1.0) <= error <= errors.quantile(0.95, 1.0)
        errors.observe(error, 1.0)
        seen.append(error)
    assert plain_covered / 2_000 < 0.88
    assert covered / 2_000 == pytest.approx(0.9, abs=0.01)


def test_quantiles_are_in_order():
    forecast = played(bursty, 3)
    for in_s in (0.0, 7.0, 60.0, 400.0, 10_000.0):
        values = [forecast.at(in_s, quantile) for quantile in (0.01, 0.05, 0.3, 0.5, 0.7, 0.95, 0.99, 0.999)]
        assert values == sorted(values)


def test_the_profile_of_the_day_is_foreseen():
    """On the third morning the forecast sees a rise half an hour ahead that no average sees."""

    def office(at_s):
        return 20.0 if 8 * 3600 <= at_s % DAY_S < 18 * 3600 else 2.0

    forecast = played(office, 55.8)
    assert forecast.level == pytest.approx(2.0, rel=0.4)
    assert forecast.at(1_800.0) > 8.0


def test_a_crowd_is_seen_before_the_bin_ends():
    forecast = played(lambda at_s: 4.0, 1)
    before = forecast.at(30.0, 0.95)
    forecast.observe(window(3_601.0, 60.0))
    assert forecast.at(30.0, 0.95) > 5 * before


def test_a_return_is_as_likely_as_it_was_before():
    forecast = played(bursty, 10)
    calm = played(daily, 10)
    target = 2.5 * forecast.level
    assert 0.3 < forecast.return_chance(target, 3_600.0) <= 1.0
    assert calm.return_chance(target, 3_600.0) < 0.1
    chances = [forecast.return_chance(target, within_s) for within_s in (30.0, 120.0, 600.0, 3_600.0)]
    assert chances == sorted(chances)


@given(
    windows=st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 50)), min_size=1, max_size=50),
)
@settings(max_examples=100, deadline=None)
def test_the_length_of_windows_does_not_matter(windows):
    forecast, at_s, requests = DemandForecast(), 0.0, 0
    for length_s, count in windows:
        forecast.observe(
            ArrivalWindow(
                start_s=at_s, length_s=length_s, requests=count, prompt_tokens=10 * count, output_tokens=5 * count
            )
        )
        at_s, requests = at_s + length_s, requests + count
    assert forecast.at(30.0, 0.95) >= forecast.at(30.0, 0.05) >= 0
    if requests:
        assert forecast.mix.prompt_tokens == pytest.approx(10)
        assert forecast.mix.output_tokens == pytest.approx(5)
    else:
        assert forecast.mix is None


@given(rates=st.lists(st.floats(0.0, 50.0), min_size=4, max_size=200), gap_s=st.floats(0.0, 1e6))
@settings(max_examples=20, deadline=None)
def test_a_restored_forecast_says_the_same(rates, gap_s):
    forecast = DemandForecast()
    for step, rate in enumerate(rates, 1):
        forecast.observe(window(5.0 * step, 5.0 * rate, 5.0))
    encoded = msgspec.msgpack.encode(forecast.snapshot())
    snapshot = msgspec.msgpack.decode(encoded, type=ForecastSnapshot)
    now_s = 5.0 * len(rates)
    again = DemandForecast(start_s=gap_s)
    again.restore(snapshot, now_s)
    for in_s in (0.0, 2.0, 30.0, 120.0, 1_000.0, 5_000.0):
        for quantile in (0.05, 0.5, 0.9, 0.99):
            assert again.at(in_s, quantile) == forecast.at(in_s, quantile)
        assert again.return_chance(10.0, in_s) == forecast.return_chance(10.0, in_s)
    assert (again.mix, again.level, again.silent_s) == (forecast.mix, forecast.level, forecast.silent_s)
    assert (again.coverage, again.highest_level) == (forecast.coverage, forecast.highest_level)
    assert again.snapshot() == snapshot
    # It goes on to learn: the last level is known, whatever the time in between.
    for step in range(1, 25):
        again.observe(window(now_s + 5.0 * step, 5.0 * 20.0, 5.0))
    assert again.at(5.0) == pytest.approx(20.0, rel=0.35)
