"""Growth at comparable load: found through noise and varying load, and not where there is none."""

import random

import pytest

from maitred.observe.trend import TrendSample, fit_trend


def looks(count=60, *, leak=0.0, noise=0.0, load=lambda number: 0.0, per_load=0.0, seed=1):
    rng = random.Random(seed)
    return [
        TrendSample(120.0 * n, 1000 + leak * n + per_load * load(n) + noise * rng.gauss(0, 1), load(n))
        for n in range(count)
    ]


def test_a_line_is_found_exactly():
    trend = fit_trend(looks(leak=12.0))
    assert trend.per_s == pytest.approx(0.1)
    assert trend.agreement == 1.0


def test_a_quarter_of_the_looks_may_be_anything():
    spoilt = [
        look._replace(value=look.value * 50) if number % 4 == 0 else look
        for number, look in enumerate(looks(leak=12.0, noise=1.0))
    ]
    assert fit_trend(spoilt).per_s == pytest.approx(0.1, rel=0.6)
    assert fit_trend(spoilt).per_s > 0.05


def test_a_load_that_rises_is_no_leak():
    def load(number):
        return 10.0 * (number // 6)

    rising = looks(load=load, per_load=100.0, noise=5.0)
    unaware = [look._replace(load=0.0) for look in rising]
    assert fit_trend(unaware).agreement > 0.9
    assert abs(fit_trend(rising).agreement) < 0.35
    assert abs(fit_trend(rising).per_s) < 0.02


def test_a_leak_shows_under_a_load_that_comes_and_goes():
    trend = fit_trend(looks(load=lambda number: 100.0 * (number % 2), per_load=1000.0, leak=12.0, noise=5.0))
    assert trend.per_s == pytest.approx(0.1, rel=0.1)
    assert trend.agreement > 0.9


def test_noise_has_no_direction():
    assert max(abs(fit_trend(looks(noise=50.0, seed=seed)).agreement) for seed in range(50)) < 0.5


def test_what_never_changes_does_not_grow():
    assert fit_trend(looks()) == (0.0, 0.0)


def test_too_few_looks_at_one_load_say_nothing():
    assert fit_trend(looks(9)) is None
    assert fit_trend(looks(40, load=lambda number: 10.0 * 2**number)) is None
