"""How good predictions are, and what is learnt from it."""

import pytest

from maitred.dispatch.policy.prediction import PredictionCalibration, PredictionCorrection, SafetyMargin
from maitred.dispatch.policy.retry_after import RetryAfterTurns


def test_quantiles_of_the_last_ones():
    calibration = PredictionCalibration(max_samples=100)
    assert calibration.ratio(0.5) == 1.0
    assert calibration.error(0.9) == 0.0
    for _ in range(500):
        calibration.compare(9.0, 1.0)
    for number in range(100):
        calibration.compare(1.0, 1.0 + number / 100)
    assert calibration.compared == 600
    assert calibration.ratio(0.0) == pytest.approx(1 / 1.99)
    assert calibration.ratio(0.99) == 1.0
    assert calibration.error(0.5) == pytest.approx(0.5 / 1.5)


def test_the_factor_follows_what_comes():
    correction = PredictionCorrection()
    assert correction.factor(0.0) == 1.0
    for second in range(200):
        correction.compare(1.0, 2.0, second / 10)
    assert correction.factor(20.0) == pytest.approx(2.0, rel=0.05)
    assert correction.factor(2000.0) == pytest.approx(1.0, rel=0.01), "and forgets"


def test_the_factor_is_bounded_and_slow():
    correction = PredictionCorrection()
    correction.compare(1.0, 100.0, 0.0)
    assert correction.factor(0.0) < 1.1
    for _ in range(1000):
        correction.compare(1.0, 1e6, 0.0)
    assert correction.factor(0.0) <= 4.0
    correction.compare(0.0, 0.0, 0.0)


def test_a_few_that_go_astray_do_not_move_the_others():
    correction = PredictionCorrection()
    for number in range(100):
        correction.compare(1.0, 3.0 if number % 8 == 0 else 1.1, 0.0)
    assert correction.factor(0.0) == pytest.approx(1.1)


def test_what_was_learnt_before_a_pause_counts_little_after_it():
    correction = PredictionCorrection()
    for _ in range(100):
        correction.compare(1.0, 2.0, 0.0)
    correction.compare(1.0, 2.0, 600.0)
    assert correction.factor(600.0) < 1.1


def test_caution_covers_most_waits():
    safety_margin = SafetyMargin()
    assert safety_margin.factor == 1.0
    for number in range(100):
        safety_margin.compare(1.0, 0.5 + number / 100)
    assert safety_margin.factor == pytest.approx(1.47)
    for _ in range(300):
        safety_margin.compare(1.0, 50.0)
    assert safety_margin.factor == 2.0


def test_each_one_that_is_refused_gets_a_turn_of_its_own():
    comebacks = RetryAfterTurns()
    assert comebacks.take("acme", 5.0, 0.5, 100.0, 0.0) == 5.0
    assert comebacks.take("acme", 5.0, 0.5, 100.0, 0.0) == 5.5
    assert comebacks.take("other", 5.0, 0.5, 100.0, 0.0) == 5.0
    assert comebacks.take("acme", 1.0, 0.5, 102.0, 0.0) == 4.0, "still behind the others"
    assert comebacks.take("acme", 1.0, 0.5, 200.0, 1.0) == pytest.approx(1.1), "a tenth of jitter"


def test_nobody_is_put_off_for_ever_or_asked_back_at_once():
    comebacks = RetryAfterTurns()
    for _ in range(1000):
        last_s = comebacks.take("acme", 1.0, 1.0, 0.0, 0.0)
    assert last_s == 61.0
    assert comebacks.take("new", 0.0, 0.0, 0.0, 0.0) == 0.1
    for number in range(5000):
        comebacks.take(number, 0.0, 0.0, float(number), 0.0)
    assert len(comebacks) < 2000
