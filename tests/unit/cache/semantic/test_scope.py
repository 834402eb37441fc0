"""A scope's way from the first label to a certified threshold, and what lets it begin anew."""

import random

import msgspec
import pytest

from benchmarks.support.semantic_cache.planted_rates import PlantedScope
from maitred.cache.config import SemanticConfig
from maitred.cache.semantic.scope import SCORED_LOOKUPS, THRESHOLDS, SemanticScope, apply_outcomes
from maitred.core.request import LabelledPair
from maitred.core.semantic_scope import (
    CertificationState,
    LookupLabel,
    LookupOutcome,
    LookupScore,
    LookupTally,
    LookupTrial,
    ScopePhase,
    ScopeRecord,
)

SETTINGS = SemanticConfig(training_labels=500)
NEW = ScopeRecord(encoder="e1")
FEWEST = 721
"""Look-ups without a false hit that half a percent needs."""


def label(same=True, attempt=0):
    return LookupLabel(LabelledPair("How do I pay?", "How can I pay?", same, (0.5, 0.6, 0.1)), attempt)


def scope(record=NEW, settings=SETTINGS):
    return SemanticScope(record, settings)


def scoring():
    made = scope()
    for i in range(500):
        assert made.wants_label(0.7)
        assert made.apply(label(same=i % 4 > 0))
    assert made.phase is ScopePhase.TRAINING
    return scope(made.record.with_verifier("v1"))


def certifying():
    made = scoring()
    for i in range(SCORED_LOOKUPS):
        assert made.phase is ScopePhase.SCORING
        assert made.apply(LookupScore(None if i % 2 else i / SCORED_LOOKUPS, made.attempt))
    return made


def certified():
    made = certifying()
    for _ in range(FEWEST):
        assert made.threshold is None
        assert made.apply(LookupTrial(0.99, is_false=False, attempt=made.attempt))
    assert made.phase is ScopePhase.CERTIFIED
    return made


def tripped():
    made = certified()
    for i in range(3_005):
        assert made.phase is ScopePhase.CERTIFIED
        made.apply(LookupTrial(0.999, is_false=i >= 3_000, attempt=made.attempt))
    assert made.phase is ScopePhase.TRIPPED
    return made


def test_labels_are_wanted_where_they_teach_something_and_until_there_are_enough():
    made = scope()
    assert [made.wants_label(cosine) for cosine in (0.54, 0.55, 0.95, 0.96)] == [False, True, True, False]
    for _ in range(499):
        made.apply(label())
    assert (made.phase, made.state) == (ScopePhase.LEARNING, CertificationState.SHADOW)
    assert made.apply(label(same=False))
    assert (made.phase, made.state) == (ScopePhase.TRAINING, CertificationState.SHADOW)
    assert not made.wants_label(0.7)
    assert not made.apply(label())
    assert (made.record.labels, made.record.counts.same, made.record.counts.different) == (500, 499, 1)


def test_thresholds_are_chosen_from_the_best_third_of_the_look_ups():
    made = certifying()
    assert (made.phase, made.state, made.threshold) == (
        ScopePhase.CERTIFYING,
        CertificationState.SHADOW,
        None,
    )
    thresholds = made.record.certification.thresholds
    assert len(thresholds) == THRESHOLDS
    # Every other look-up has a candidate, so 140 of 400 are those with 0.7 of the candidates.
    assert made.loosest == min(thresholds) == pytest.approx(0.3, abs=0.01)
    assert made.record.scores == ()


def test_without_any_candidate_scores_are_collected_again():
    made = scoring()
    for _ in range(SCORED_LOOKUPS):
        made.apply(LookupScore(None, made.attempt))
    assert (made.phase, made.record.scores) == (ScopePhase.SCORING, ())
    for score in (float("nan"), float("inf"), 0.5):
        made.apply(LookupScore(score, made.attempt))
    assert made.record.scores == (None, None, 0.5)


def test_it_serves_when_the_bound_is_within_the_budget():
    made = certified()
    assert made.threshold == made.loosest == pytest.approx(0.3, abs=0.01)
    assert made.bound <= 0.005
    counts = made.record.counts
    assert (counts.audits, counts.same, counts.false_hits) == (FEWEST, 375 + FEWEST, 0)
    made.apply(LookupTrial(0.2, is_false=False, attempt=made.attempt))
    made.apply(LookupTrial(0.99, is_false=True, attempt=made.attempt))
    counts = made.record.counts
    assert (counts.audits, counts.same, counts.different) == (FEWEST + 2, 375 + FEWEST, 125 + 1)
    assert counts.false_hits == 1


def test_look_ups_are_counted_in_every_phase():
    for made in (scope(), scoring(), certifying(), tripped()):
        before = made.phase
        assert made.apply(LookupTally(lookups=5, served=2, saved_tokens=70))
        assert made.apply(LookupTally(lookups=1))
        counts = made.record.counts
        assert (counts.lookups, counts.served, counts.saved_tokens) == (6, 2, 70)
        assert made.phase is before


def test_what_was_judged_in_another_phase_or_attempt_does_not_count():
    made = scope(NEW.begin_anew())
    assert not made.apply(label(attempt=made.attempt - 1)), "its texts were to be deleted"
    assert made.apply(label(attempt=made.attempt))
    made = scoring()
    for outcome in (
        label(attempt=made.attempt),
        LookupTrial(0.9, False, made.attempt),
        LookupScore(0.9, made.attempt - 1),
    ):
        assert not made.apply(outcome)
    made = certifying()
    before = made.record
    for outcome in (
        label(attempt=made.attempt),
        LookupScore(0.9, made.attempt),
        LookupTrial(0.9, True, made.attempt - 1),
    ):
        assert not made.apply(outcome)
    assert made.record == before


def test_a_tripped_scope_stays_so_until_it_begins_anew():
    made = tripped()
    assert (made.state, made.threshold) == (CertificationState.TRIPPED, None)
    before = made.record
    assert not made.apply(LookupTrial(0.9, is_false=False, attempt=made.attempt))
    assert made.record == before
    for settings in (SETTINGS, SemanticConfig(budget=0.1), SemanticConfig(confidence=0.8)):
        assert scope(before, settings=settings).phase is ScopePhase.TRIPPED
    again = scope(before.begin_anew(keep_labels=True))
    assert (again.phase, again.record.labels, again.record.verifier) == (ScopePhase.TRAINING, 500, "")
    again = scope(before.begin_anew())
    assert (again.phase, again.record.labels) == (ScopePhase.LEARNING, 0)
    assert again.attempt == made.attempt + 1
    assert again.record.counts.lookups == 0


@pytest.mark.parametrize("settings", [SemanticConfig(budget=0.01), SemanticConfig(confidence=0.9)])
def test_another_budget_or_confidence_is_certified_from_the_beginning(settings):
    stored = certified().record
    made = scope(stored, settings=settings)
    assert (made.phase, made.threshold) == (ScopePhase.CERTIFYING, None)
    assert made.record.certification.thresholds == stored.certification.thresholds
    assert (made.record.certification.lookups, made.record.verifier) == (0, "v1")
    assert not made.apply(LookupTrial(0.9, is_false=False, attempt=stored.attempt)), "its label may be missing"
    assert scope(made.record, settings=settings).record == made.record


def test_a_smaller_budget_has_more_time_to_pass():
    settings = SemanticConfig(budget=0.0005)
    made = scope(certifying().record, settings=settings)
    made.apply(LookupTrial(0.99, is_false=True, attempt=made.attempt))
    assert made.loosest is not None
    for i in range(13_240):
        made.apply(LookupTrial(0.99 if i % 2 else None, is_false=False, attempt=made.attempt))
    assert made.phase is ScopePhase.CERTIFIED


def test_an_index_that_was_emptied_certifies_nothing():
    made = certifying()
    for _ in range(10 * FEWEST):
        assert not made.apply(LookupTrial(None, is_false=False, attempt=made.attempt))
        assert not made.apply(LookupTrial(0.1, is_false=False, attempt=made.attempt)), "no threshold is so loose"
    assert (made.phase, made.record.counts.audits) == (ScopePhase.CERTIFYING, 0)
    # 35 of 100 look-ups had a candidate when the thresholds were chosen, so as many of the trials have one.
    hits = 0
    while made.phase is ScopePhase.CERTIFYING:
        hits += made.apply(LookupTrial(0.99, is_false=False, attempt=made.attempt))
        for _ in range(3):
            made.apply(LookupTrial(None, is_false=False, attempt=made.attempt))
    assert hits == pytest.approx(0.35 * FEWEST, abs=2)
    assert made.record.counts.audits == pytest.approx(FEWEST, abs=2)


def test_candidates_that_become_rare_hide_no_false_hits():
    """Of a hundred candidates three are false; as each third look-up has one, that is twice the budget."""
    for run in range(20):
        source = random.Random(run)
        made = scope(scoring().record)
        while made.phase is ScopePhase.SCORING:
            made.apply(LookupScore(source.random() if source.random() < 1 / 3 else None, made.attempt))
        for _ in range(20_000):
            score = source.random() if source.random() < 1 / 30 else None
            is_false = source.random() < 0.03
            made.apply(LookupTrial(score, is_false=score is not None and is_false, attempt=made.attempt))
            # So many thresholds are within the budget: those that half of the candidates reach.
            assert made.threshold is None or made.threshold > 0.4


@pytest.mark.parametrize(("rate", "strictest", "loosest"), [(0.0, 0.0, 0.2), (0.02, 0.5, 0.8), (0.2, 0.84, 1.0)])
def test_planted_rates_of_false_hits(rate, strictest, loosest):
    """No run serves at a threshold above the budget, and more false hits take a stricter one."""
    planted = PlantedScope(rate)
    for run in range(4):
        source = random.Random(run)
        made = scope(scoring().record)
        for _ in range(5_000):
            score, is_false = planted.draw(source)
            if made.phase is ScopePhase.SCORING:
                made.apply(LookupScore(score, made.attempt))
                continue
            made.apply(LookupTrial(score, is_false, made.attempt))
            assert made.threshold is None or planted.rate_at(made.threshold) <= SETTINGS.budget
        assert made.threshold is not None
        assert strictest <= made.threshold <= loosest


def test_outcomes_and_records_cross_the_wire():
    outcomes = [label(), LookupScore(None, 3), LookupTrial(0.5, is_false=True, attempt=2), LookupTally(1, 1, 7)]
    data = msgspec.msgpack.encode(outcomes)
    assert msgspec.msgpack.decode(data, type=list[LookupOutcome]) == outcomes
    for made in (scope(), scoring(), certifying(), certified(), tripped()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made.record), type=ScopeRecord) == made.record


def test_applying_outcomes_returns_the_labels_that_count():
    settings = SemanticConfig(training_labels=2)
    record, labels = apply_outcomes(NEW, [label(), LookupTally(lookups=1)], settings=settings)
    assert (record.labels, record.counts.lookups, labels) == (1, 1, [label().pair])
    record, labels = apply_outcomes(record, [label(same=False), label()], settings=settings)
    assert (record.labels, labels) == (2, [label(same=False).pair])
