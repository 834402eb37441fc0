"""Evidence on rare events."""

import math
import random

import pytest

from maitred.cache.semantic.evidence import AboveDetector, BelowTest, upper_bound


def clopper_pearson_passes(trials, events, limit, alpha):
    """Whether so few events have a probability of at most alpha at the limit."""
    terms = (math.comb(trials, k) * limit**k * (1 - limit) ** (trials - k) for k in range(events + 1))
    return sum(terms) <= alpha


@pytest.mark.parametrize("events", [0, 1, 2, 5, 10])
def test_it_asks_for_more_than_a_fixed_number_of_trials_but_not_for_twice_as_many(events):
    fewest = BelowTest(0.02, 0.95).fewest_trials(events)
    fixed = next(n for n in range(events + 1, fewest + 1) if clopper_pearson_passes(n, events, 0.02, 0.05))
    assert fixed < fewest < 2 * fixed


def test_half_a_percent_needs_some_seven_hundred_trials_without_an_event():
    test = BelowTest(0.005, 0.95)
    fewest = test.fewest_trials(0)
    assert 600 < fewest < 750
    assert test.is_below(fewest, 0)
    assert not test.is_below(fewest - 1, 0)
    assert not test.is_below(fewest, 1)


def test_the_bound_is_where_the_test_passes():
    bound = upper_bound(1_000, 2, 0.95)
    assert BelowTest(bound * 1.001, 0.95).is_below(1_000, 2)
    assert not BelowTest(bound * 0.999, 0.95).is_below(1_000, 2)


def test_there_is_no_bound_without_trials():
    assert upper_bound(0, 0, 0.95) == 1.0
    assert upper_bound(3, 3, 0.95) == 1.0


def test_errors_are_as_rare_as_promised_though_it_is_asked_after_each_trial():
    """A rate that lies at the limit is shown to lie below it in at most 5 % of the runs."""
    errors = 0
    for run in range(400):
        source, test, events = random.Random(run), BelowTest(0.02, 0.95), 0
        for trials in range(1, 2_001):
            events += source.random() < 0.02
            if test.is_below(trials, events):
                errors += 1
                break
    assert errors <= 0.05 * 400 + 10


def test_the_mean_evidence_is_one_at_the_limit():
    """Exact, over all outcomes: the probability that four trials pass is at most one minus the confidence."""
    limit, confidence = 0.5, 0.9
    test = BelowTest(limit, confidence)
    passing = sum(math.comb(n, k) * limit**n for n in (4,) for k in range(n + 1) if test.is_below(n, k))
    assert 0 < passing <= 1 - confidence + 1e-12


def test_a_rise_is_noticed_and_calm_is_not():
    detector, source = AboveDetector(0.005, alarm_ratio=300.0), random.Random(1)
    assert not any(detector.add(source.random() < 0.002) for _ in range(5_000))
    found = next(i for i in range(5_000) if detector.add(source.random() < 0.03))
    assert found < 1_000


def test_good_times_before_a_rise_do_not_count():
    fresh, old = AboveDetector(0.005, alarm_ratio=300.0), AboveDetector(0.005, alarm_ratio=300.0)
    for _ in range(10_000):
        old.add(False)
    assert old.sums == fresh.sums


def test_a_detector_goes_on_from_its_sums():
    one, other = AboveDetector(0.01, alarm_ratio=10.0), None
    for happened in (True, False, True):
        other = AboveDetector(0.01, alarm_ratio=10.0, sums=one.sums)
        assert one.add(happened) == other.add(happened)
        assert one.sums == other.sums
