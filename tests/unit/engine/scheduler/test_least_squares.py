import random

import pytest

from maitred.engine.scheduler.least_squares import LeastSquares


def learn(model, observations, kind=0):
    for position, (x, y) in enumerate(observations):
        model.observe(kind, x, y)
        if position % 8 == 0:
            model.fit()
    model.fit()


def line(rng, count, *, noise=0.0, low=0, high=100, fixed=5.0, slope=0.25):
    for _ in range(count):
        x = rng.uniform(low, high)
        yield (1.0, x), (fixed + slope * x) * rng.uniform(1 - noise, 1 + noise)


def test_it_finds_a_line():
    model = LeastSquares(2, memory=100)
    learn(model, line(random.Random(0), 200))
    assert model.coefficients == pytest.approx([5.0, 0.25], rel=1e-3)


def test_it_finds_a_line_through_noise():
    model = LeastSquares(2, memory=300)
    learn(model, line(random.Random(1), 600, noise=0.2))
    assert model.predict((1, 0)) == pytest.approx(5.0, rel=0.1)
    assert model.predict((1, 100)) == pytest.approx(30.0, rel=0.1)


def test_a_few_endless_observations_change_little():
    model = LeastSquares(2, memory=100)
    rng = random.Random(2)
    observations = list(line(rng, 300))
    for position in range(0, 300, 20):
        x, y = observations[position]
        observations[position] = (x, 100 * y)
    learn(model, observations)
    assert model.predict((1, 50)) == pytest.approx(17.5, rel=0.1)


def test_even_when_the_first_of_all_is_endless():
    model = LeastSquares(2, memory=100)
    model.observe(0, (1, 10), 1000.0)
    model.fit()
    learn(model, line(random.Random(3), 60))
    assert model.predict((1, 50)) == pytest.approx(17.5, rel=0.1)


def test_no_coefficient_falls_below_zero():
    model = LeastSquares(2, memory=100)
    learn(model, line(random.Random(4), 100, fixed=40.0, slope=-0.3))
    assert model.coefficients[1] == 0
    assert model.coefficients[0] > 0


def test_what_is_not_seen_for_long_is_not_forgotten():
    model = LeastSquares(2, memory=50)
    rng = random.Random(5)
    learn(model, line(rng, 100), kind="long and short")
    learn(model, line(rng, 5000, low=1, high=1, noise=0.1), kind="short")
    assert model.predict((1, 100)) == pytest.approx(30.0, rel=0.1)


def test_it_follows_a_machine_that_has_become_slower():
    model = LeastSquares(2, memory=50)
    rng = random.Random(6)
    learn(model, line(rng, 500))
    learn(model, line(rng, 400, fixed=15.0, slope=0.75))
    assert model.predict((1, 50)) == pytest.approx(52.5, rel=0.05)


def test_features_that_always_move_together_do_no_harm():
    model = LeastSquares(3, memory=100)
    learn(model, [((1, 2, 2), 3.0)] * 50)
    assert model.predict((1, 2, 2)) == pytest.approx(3.0)
