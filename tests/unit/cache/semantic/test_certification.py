"""A scope's way from shadow to certified and tripped."""

import random

import msgspec
import pytest

from maitred.cache.semantic.certification import Certification, make_thresholds
from maitred.core.semantic_scope import CertificationRecord, CertificationState

THRESHOLDS = (0.9, 0.8, 0.7)
FEWEST = 721
"""Look-ups without a false hit that half a percent needs."""


def certification(**fields):
    return Certification(CertificationRecord(thresholds=THRESHOLDS, **fields))


def certified():
    made = certification()
    for _ in range(FEWEST):
        made.record(0.95)
    assert made.state is CertificationState.CERTIFIED
    return made


def test_it_serves_nothing_before_the_bound_is_within_the_budget():
    made = certification()
    for _ in range(FEWEST - 1):
        made.record(0.95)
        assert (made.state, made.threshold) == (CertificationState.SHADOW, None)
        assert made.upper_bound > 0.005
    made.record(None)
    assert (made.state, made.threshold) == (CertificationState.CERTIFIED, 0.7)
    assert made.upper_bound <= 0.005


@pytest.mark.parametrize("false_hits", [0, 1, 3])
def test_it_is_known_how_many_look_ups_are_still_needed(false_hits):
    made = certification()
    assert made.needed_lookups == FEWEST
    for _ in range(false_hits):
        made.record(0.95, is_false=True)
    needed = made.needed_lookups
    assert needed >= FEWEST + 400 * false_hits
    while made.lookups < needed - 1:
        made.record(None)
    assert made.state is CertificationState.SHADOW
    made.record(None)
    assert made.state is CertificationState.CERTIFIED


def test_nothing_is_needed_where_nothing_can_pass():
    made = certification()
    while made.loosest is not None:
        assert made.needed_lookups is not None
        made.record(0.95, is_false=True)
    assert made.needed_lookups is None


def test_a_false_hit_closes_looser_thresholds_only():
    made = certification()
    made.record(0.75, is_false=True)
    for _ in range(FEWEST):
        made.record(0.95)
    assert made.threshold == 0.8
    for _ in range(1_000):
        made.record(0.95)
    assert made.threshold == 0.7


def test_a_false_candidate_that_no_threshold_reaches_is_none():
    made = certification()
    for _ in range(FEWEST):
        made.record(0.5, is_false=True)
    assert made.threshold == 0.7


def test_a_risen_bound_makes_the_threshold_stricter():
    made = certified()
    made.record(0.75, is_false=True)
    assert (made.state, made.threshold) == (CertificationState.CERTIFIED, 0.8)
    made.record(0.95, is_false=True)
    assert (made.state, made.threshold) == (CertificationState.SHADOW, None)


def test_hopeless_thresholds_need_no_labels():
    made = Certification(CertificationRecord(thresholds=THRESHOLDS), horizon_lookups=2_000)
    assert made.loosest == 0.7
    for _ in range(3):
        made.record(0.75, is_false=True)
    assert made.loosest == 0.8
    for _ in range(5_000):
        made.record(0.75)
    assert made.threshold == 0.8


def test_it_trips_and_stays_so():
    made = certified()
    for _ in range(5_000):
        made.record(0.95)
    for _ in range(5):
        made.record(0.95, is_false=True)
    assert (made.state, made.threshold) == (CertificationState.TRIPPED, None)
    for _ in range(FEWEST):
        made.record(0.95)
    assert made.state is CertificationState.TRIPPED
    assert Certification(made.snapshot()).state is CertificationState.TRIPPED


def test_false_candidates_below_the_threshold_that_serves_do_not_trip():
    made = certification()
    for _ in range(5):
        made.record(0.75, is_false=True)
    for _ in range(FEWEST):
        made.record(0.95)
    for _ in range(20):
        made.record(0.75, is_false=True)
    assert (made.state, made.threshold) == (CertificationState.CERTIFIED, 0.8)


@pytest.mark.parametrize("budget", [0.002, 0.005, 0.02])
def test_thresholds_above_the_budget_serve_in_few_runs_only(budget):
    """Each look-up is a candidate, and false at 1.3 times the budget, at every threshold alike."""
    wrong = 0
    for run in range(60):
        source = random.Random(run)
        made = Certification(CertificationRecord(thresholds=THRESHOLDS), budget=budget)
        for _ in range(round(10 / budget)):
            made.record(0.95, is_false=source.random() < 1.3 * budget)
            if made.threshold is not None:
                wrong += 1
                break
    assert wrong <= 5


def test_the_state_can_be_stored():
    made = certified()
    made.record(0.75, is_false=True)
    stored = msgspec.json.decode(msgspec.json.encode(made.snapshot()), type=CertificationRecord)
    again = Certification(stored)
    assert again.snapshot() == made.snapshot()
    assert (again.threshold, again.upper_bound, again.loosest) == (made.threshold, made.upper_bound, made.loosest)


@pytest.mark.parametrize("thresholds", [(), (0.1, 0.2), (0.2, 0.2)])
def test_thresholds_must_fall(thresholds):
    with pytest.raises(ValueError, match="must fall"):
        Certification(CertificationRecord(thresholds=thresholds))


def test_thresholds_are_quantiles_of_scores():
    assert make_thresholds([i / 100 for i in range(1, 101)], 4) == (0.76, 0.51, 0.26, 0.01)
    assert make_thresholds([1.0, 1.0, 0.5], 10) == (1.0, 0.5)
    assert make_thresholds([], 4) == ()


def test_a_scope_that_serves_for_long_goes_on_as_long_as_false_hits_are_rare():
    source = random.Random(1)
    made = certification()
    for _ in range(60_000):
        made.record(0.95, is_false=source.random() < 0.001)
    assert (made.state, made.threshold, made.upper_bound) == (CertificationState.CERTIFIED, 0.7, 0.005)


def test_what_was_closed_early_stays_closed_although_there_are_enough_look_ups_later():
    made = Certification(CertificationRecord(thresholds=THRESHOLDS), horizon_lookups=2_000)
    for _ in range(3):
        made.record(0.75, is_false=True)
    for _ in range(20_000):
        made.record(0.95)
    assert Certification(made.snapshot(), horizon_lookups=2_000).loosest == made.loosest == made.threshold == 0.8


def test_a_threshold_that_lost_its_bound_late_may_pass_again():
    made = Certification(CertificationRecord(thresholds=(0.5,)), horizon_lookups=1_000)
    for _ in range(2_000):
        made.record(0.9)
    for _ in range(3):
        made.record(0.9, is_false=True)
    assert (made.state, made.loosest) == (CertificationState.SHADOW, 0.5)
    for _ in range(60):
        made.record(0.9)
    assert made.state is CertificationState.CERTIFIED
