"""The sequential tests: valid whatever the truth and whenever one looks, and with power."""

import math
import random
from copy import deepcopy
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from maitred.routing.rollout.sequential import MeanSequence, RateTest

rates = st.floats(0, 1)
margins = st.integers(-500, 500).map(lambda thousandths: thousandths / 1000)
standards = st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)
past = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=12)


def expected_gain(test, stable_rate, canary_rate, count):
    """What the evidence is multiplied by in expectation, over every way in which the next block can turn out."""
    total = 0.0
    for *stable, canary in product([False, True], repeat=count + 1):
        tried = deepcopy(test)
        chance = canary_rate if canary else 1 - canary_rate
        for happened in stable:
            tried.add_stable(happened)
            chance *= stable_rate if happened else 1 - stable_rate
        tried.add_canary(canary)
        total += chance * math.exp(tried.log_evidence - test.log_evidence)
    return total


@given(past, rates, rates, margins, st.integers(0, 4))
def test_no_evidence_is_expected_while_the_hypothesis_holds(history, stable_rate, canary_rate, margin, count):
    """Exactly, for every past, every pair of rates in the hypothesis and every size of block."""
    test = RateTest(margin)
    for stable, happened, canary in history:
        for _ in range(stable):
            test.add_stable(happened)
        test.add_canary(canary)
    allowed = min(canary_rate, stable_rate + margin)
    if 0 <= allowed <= 1:
        assert expected_gain(test, stable_rate, allowed, count) <= 1 + 1e-9


@given(st.lists(st.booleans(), max_size=12), rates, standards, margins)
def test_nor_against_a_fixed_standard(history, canary_rate, standard, margin):
    test = RateTest(margin, standard)
    for happened in history:
        test.add_canary(happened)
    if (allowed := min(canary_rate, standard + margin)) >= 0:
        assert expected_gain(test, 0.0, allowed, 0) <= 1 + 1e-9


def needed(stable_rate, canary_rate, margin, *, alpha=0.01, most=5000, seed=1):
    """Canary requests until the evidence suffices, with nine of the stable version to each; None if it never does."""
    chance, test = random.Random(seed), RateTest(margin)
    for count in range(1, most + 1):
        for _ in range(9):
            test.add_stable(chance.random() < stable_rate)
        test.add_canary(chance.random() < canary_rate)
        if test.log_evidence >= math.log(1 / alpha):
            return count
    return None


def test_the_larger_the_difference_the_sooner_it_is_seen():
    large, small = needed(0.05, 0.3, 0.0), needed(0.05, 0.12, 0.0)
    assert large is not None
    assert small is not None
    assert large < 60 < small < 1000


def test_a_margin_excuses_what_lies_within():
    assert needed(0.05, 0.08, 0.05) is None
    assert needed(0.05, 0.2, 0.05) is not None


def test_false_alarms_are_as_rare_as_promised_however_often_one_looks():
    alarms = sum(needed(0.05, 0.05, 0.0, alpha=0.05, most=400, seed=seed) is not None for seed in range(200))
    assert alarms <= 0.05 * 200


def test_a_mean_is_within_its_sequence_at_all_times():
    misses = 0
    for seed in range(200):
        chance, sequence = random.Random(seed), MeanSequence(0.05)
        for _ in range(600):
            sequence.add(chance.gauss(0.3, 2.0))
            low, high = sequence.interval()
            if not low <= 0.3 <= high:
                misses += 1
                break
    assert misses <= 0.05 * 200


def test_a_sequence_narrows_with_its_length():
    chance, sequence = random.Random(3), MeanSequence(0.05)
    widths = []
    for _ in range(2000):
        sequence.add(chance.gauss(5.0, 1.0))
        low, high = sequence.interval()
        widths.append(high - low)
    assert widths[MeanSequence.MIN_COUNT - 2] == math.inf
    assert widths[199] > widths[799] > widths[1999]
    assert widths[1999] < 0.25
