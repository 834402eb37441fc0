"""Certification under any sequence of look-ups."""

import math

from hypothesis import given
from hypothesis import strategies as st

from maitred.cache.semantic.certification import Certification
from maitred.cache.semantic.evidence import BelowTest, upper_bound
from maitred.core.semantic_scope import CertificationRecord, CertificationState

THRESHOLDS = (0.9, 0.7, 0.5, 0.3)
LOOKUPS = st.lists(st.tuples(st.none() | st.sampled_from((1.0, 0.8, 0.6, 0.4, 0.2)), st.booleans()), max_size=60)


def made(budget=0.2, record=None):
    return Certification(record or CertificationRecord(thresholds=THRESHOLDS), budget=budget, confidence=0.9)


@given(LOOKUPS)
def test_what_serves_has_its_bound_within_the_budget(lookups):
    one = made()
    for score, is_false in lookups:
        one.record(score, is_false=is_false)
        assert (one.threshold is not None) == (one.state is CertificationState.CERTIFIED)
        if one.threshold is not None:
            assert one.upper_bound <= 0.2 + 1e-9
            assert one.loosest is not None
            assert one.threshold >= one.loosest


@given(LOOKUPS, st.integers(0, 60))
def test_a_stored_state_goes_on_as_if_it_had_not_been_stored(lookups, cut):
    one, other = made(), made()
    for i, (score, is_false) in enumerate(lookups):
        if i == cut:
            other = made(record=other.snapshot())
        one.record(score, is_false=is_false)
        other.record(score, is_false=is_false)
    assert one.snapshot() == other.snapshot()
    assert one.threshold == other.threshold


@given(LOOKUPS, st.integers(0, 59))
def test_one_false_hit_less_never_makes_the_threshold_stricter(lookups, place):
    worse, better = made(), made()
    for i, (score, is_false) in enumerate(lookups):
        worse.record(score, is_false=is_false)
        better.record(score, is_false=is_false and i != place)
    if worse.threshold is not None and better.state is not CertificationState.TRIPPED:
        assert better.threshold is not None
        assert better.threshold <= worse.threshold


@given(st.integers(1, 400), st.integers(0, 20), st.floats(0.01, 0.9))
def test_the_test_is_monotone(trials, events, limit):
    events = min(events, trials)
    test = BelowTest(limit, 0.95)
    if test.is_below(trials, events):
        assert test.is_below(trials + 1, events)
        assert BelowTest(min(0.99, limit * 1.1), 0.95).is_below(trials, events)
        assert events == 0 or test.is_below(trials, events - 1)
    assert upper_bound(trials, events, 0.95) <= upper_bound(trials, events + 1, 0.95) + 1e-9


@given(st.integers(1, 9), st.sampled_from((0.3, 0.5, 0.8)), st.sampled_from((0.8, 0.9)))
def test_it_errs_as_seldom_as_it_says_over_all_times(trials, limit, confidence):
    """Exact: the probability, at the limit, that the test has passed at any time so far."""
    test = BelowTest(limit, confidence)
    waiting, passed = {0: 1.0}, 0.0
    for n in range(1, trials + 1):
        reached: dict[int, float] = {}
        for events, chance in waiting.items():
            for more, part in ((0, 1 - limit), (1, limit)):
                reached[events + more] = reached.get(events + more, 0.0) + chance * part
        passed += sum(chance for events, chance in reached.items() if test.is_below(n, events))
        waiting = {events: chance for events, chance in reached.items() if not test.is_below(n, events)}
    assert passed <= 1 - confidence + 1e-12
    assert math.isclose(passed + sum(waiting.values()), 1.0)
