"""Profiles by hand-computed values, and arrivals by their counts."""

import itertools
import math
import random
import statistics

import pytest

from maitred.core.errors import InvalidRequest
from maitred.load.spec import ArrivalsSpec
from maitred.load.workload.arrivals import FORMS, arrival_times, parse_profile


def times_until(end_s, seed=0, **arrivals):
    times = arrival_times(ArrivalsSpec(**arrivals), random.Random(seed))
    return list(itertools.takewhile(lambda at_s: at_s < end_s, times))


@pytest.mark.parametrize(
    ("text", "factors", "integrals"),
    [
        ("steady", {0: 1, 1e6: 1}, {10: 10}),
        ("ramp:from=0,to=2,over=60", {0: 0, 30: 1, 60: 2, 99: 2}, {30: 15, 60: 60, 70: 80}),
        ("ramp:from=3,to=1,over=0", {0: 1}, {5: 5}),
        ("spike:at=60,for=10,factor=5", {59.9: 1, 60: 5, 69.9: 5, 70: 1}, {60: 60, 65: 85, 70: 110, 80: 120}),
        (
            "bursts:every=30,for=5,factor=8",
            {0: 1, 29.9: 1, 30: 8, 35: 1, 60: 8, 65: 1, 3030: 8},
            {30: 30, 35: 70, 60: 95, 65: 135, 3000: 30 + 99 * 65},
        ),
        ("points:0=1,60=3,90=1", {0: 1, 30: 2, 60: 3, 75: 2, 90: 1, 200: 1}, {60: 120, 90: 180, 100: 190}),
        ("points:10=2,20=0", {0: 2, 10: 2, 15: 1, 20: 0, 100: 0}, {10: 20, 20: 30, 100: 30}),
    ],
)
def test_a_profile_is_the_curve_that_its_text_says(text, factors, integrals):
    profile = parse_profile(text)
    for at_s, factor in factors.items():
        assert profile.factor(at_s) == pytest.approx(factor)
    for to_s, area in integrals.items():
        assert profile.integral(to_s) == pytest.approx(area)
        assert profile.inverse(area) <= to_s + 1e-9


def test_where_the_rate_ends_at_0_the_arrivals_end():
    profile = parse_profile("points:10=2,20=0")
    assert profile.inverse(30.0001) == math.inf
    assert len(list(arrival_times(ArrivalsSpec(rate_per_s=10, profile="points:10=2,20=0"), random.Random(0)))) > 200


def test_nobody_comes_while_the_rate_is_0():
    times = times_until(1000, rate_per_s=5, profile="points:0=1,10=0,500=0,510=2")
    assert not [at_s for at_s in times if 10 < at_s < 500]
    assert [at_s for at_s in times if at_s > 900]


def test_constant_arrivals_are_evenly_spaced():
    assert times_until(2, rate_per_s=4, process="constant") == [0.125 + place / 4 for place in range(8)]


def test_gamma_gaps_have_their_coefficient_of_variation():
    for cv in (0.3, 2.0):
        times = times_until(5000, rate_per_s=4, process="gamma", cv=cv)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert statistics.fmean(gaps) == pytest.approx(0.25, rel=4 * cv / len(gaps) ** 0.5)
        assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.06)


def test_poisson_arrivals_are_exponential():
    """Kolmogorov-Smirnov at the level 0.001."""
    times = times_until(4000, rate_per_s=2)
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    distance = max(abs((place + 0.5) / len(gaps) - (1 - math.exp(-2 * gap))) for place, gap in enumerate(gaps))
    assert distance < 1.95 / len(gaps) ** 0.5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no kind ''"),
        ("sine:period=3", "there is no kind 'sine'"),
        ("steady:1", "has no values"),
        ("ramp:from=0,to=2", "'over' is missing"),
        ("ramp:from=0,to=-2,over=3", "at least 0"),
        ("ramp:from=0,to=0,over=3", "0 all the time"),
        ("bursts:every=5,for=5,factor=2", "do not fit"),
        ("points:0=1,0=2", "must rise"),
        ("points:5=1,3=2", "must rise"),
        ("points:0=0,9=0", "0 all the time"),
        ("points:", "a value is missing"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_reason(text, reason):
    with pytest.raises(InvalidRequest) as raised:
        parse_profile(text)
    assert raised.value.message.startswith("arrivals.profile: ")
    assert reason in raised.value.message
    assert "0 all the time" in reason or FORMS in raised.value.message
