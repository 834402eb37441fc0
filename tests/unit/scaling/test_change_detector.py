import random

import pytest

from maitred.scaling.change_detector import ChangeDetector
from tests.support.scaling.scaled_model import poisson


def found(detector: ChangeDetector, rate, seconds: int, seed: int, expected: float) -> list[tuple[int, float]]:
    """Changes in a Poisson stream whose expected rate stays the same: their seconds and their rates."""
    random_, totals, changes = random.Random(seed), [0.0], []
    for second in range(1, seconds + 1):
        totals.append(totals[-1] + poisson(random_, rate(second)))
        change = detector.change(totals[-100:], expected, 1_200.0)
        if change is not None:
            changes.append((second, change[0]))
            detector.expected.clear()
    return changes


@pytest.mark.parametrize("rate", [2.0, 12.0])
def test_chance_is_taken_for_a_change_as_often_as_is_said(rate):
    """In a sixth of a day, of 60 upwards and 60 downwards in a day; all else alike, a day has 1/30 of each."""
    changes = found(ChangeDetector(false_per_day=60.0), lambda second: rate, 14_400, 1, rate)
    up = sum(to > rate for _, to in changes)
    assert 1 <= up <= 20
    assert 1 <= len(changes) - up <= 20


@pytest.mark.parametrize("rate", [1.0, 6.0, 40.0])
def test_a_constant_load_has_no_change(rate):
    assert found(ChangeDetector(), lambda second: rate, 14_400, 2, rate) == []


def test_a_slow_flank_is_found_before_it_ends():
    """From 6 to 12 requests per second within a minute: in the middle after 45 s."""
    seconds = []
    for seed in range(9):
        changes = found(ChangeDetector(), lambda second: 6.0 + max(0.0, min(6.0, (second - 300) / 10)), 380, seed, 6.0)
        assert changes[0][0] > 300
        seconds.append(changes[0][0] - 300)
    assert sorted(seconds)[4] <= 47
    assert max(seconds) <= 60


def test_bursts_that_are_usual_are_no_change():
    """Requests come in pairs at the same moment: counts vary twice as much."""
    random_, detector, totals, late = random.Random(0), ChangeDetector(), [0.0], 0
    for second in range(1, 14_401):
        totals.append(totals[-1] + 4 * poisson(random_, 2.0))
        change = detector.change(totals[-100:], 8.0, 1_200.0)
        late += change is not None and second > 7_200
    assert late == 0
    assert all(3.0 <= variance <= 5.0 for variance in detector.variances[:5])
