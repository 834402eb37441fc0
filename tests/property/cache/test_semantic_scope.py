"""A scope of the semantic cache under any sequence of outcomes, and any division of it among gateways."""

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from maitred.cache.config import SemanticConfig
from maitred.cache.semantic.scope import SCORED_LOOKUPS, SemanticScope, apply_outcomes
from maitred.core.request import LabelledPair
from maitred.core.semantic_scope import (
    CertificationRecord,
    LookupLabel,
    LookupScore,
    LookupTally,
    LookupTrial,
    ScopePhase,
    ScopeRecord,
)

SETTINGS = SemanticConfig(budget=0.2, confidence=0.8, training_labels=3)
ENCODER = "e1"
ATTEMPT = 1
PARTS = {"encoder": ENCODER, "attempt": ATTEMPT, "labels": 3}
LIMITS = {"budget": SETTINGS.budget, "confidence": SETTINGS.confidence}
STARTS = st.sampled_from(
    (
        ScopeRecord(encoder=ENCODER, attempt=ATTEMPT),
        ScopeRecord(**{**PARTS, "labels": 1}),
        ScopeRecord(**PARTS, verifier="v", scores=tuple(i / 400 for i in range(SCORED_LOOKUPS - 3))),
        ScopeRecord(**PARTS, verifier="v", certification=CertificationRecord(thresholds=(0.9, 0.6, 0.3)), **LIMITS),
        ScopeRecord(
            **PARTS, verifier="v", certification=CertificationRecord(thresholds=(0.9, 0.6), lookups=30), **LIMITS
        ),
    )
)
SCORES = st.none() | st.sampled_from((0.2, 0.5, 0.7, 0.95))
ATTEMPTS = st.sampled_from((ATTEMPT, ATTEMPT, ATTEMPT, ATTEMPT - 1))
OUTCOMES = st.lists(
    st.one_of(
        st.builds(
            lambda same, attempt: LookupLabel(LabelledPair("a", "b", same, (0.1, 0.2, 0.3)), attempt),
            st.booleans(),
            ATTEMPTS,
        ),
        st.builds(LookupScore, SCORES, ATTEMPTS),
        st.builds(LookupTrial, SCORES, st.booleans(), ATTEMPTS),
        st.builds(LookupTrial, SCORES, st.just(False), ATTEMPTS),
        st.builds(LookupTally, st.integers(0, 3), st.integers(0, 3), st.integers(0, 99)),
    ),
    max_size=60,
)
RUNS = st.tuples(STARTS, OUTCOMES)


def applied(record, outcomes):
    return apply_outcomes(record, outcomes, settings=SETTINGS)


@given(RUNS, st.lists(st.integers(0, 60)))
def test_outcomes_in_any_batches_equal_those_one_at_a_time(run, cuts):
    record, outcomes = run
    whole = applied(record, outcomes)
    kept = []
    places = [0, *sorted(min(cut, len(outcomes)) for cut in cuts), len(outcomes)]
    for start, end in pairwise(places):
        record, labels = applied(record, outcomes[start:end])
        record = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=ScopeRecord)
        kept += labels
    assert (record, kept) == whole


@given(RUNS)
def test_a_stored_scope_is_the_same_scope(run):
    record, _ = applied(*run)
    scope = SemanticScope(record, SETTINGS)
    assert scope.record == record
    again = SemanticScope(scope.record, SETTINGS)
    assert (again.phase, again.threshold, again.loosest, again.bound) == (
        scope.phase,
        scope.threshold,
        scope.loosest,
        scope.bound,
    )


@given(RUNS)
def test_only_a_certified_scope_serves_and_a_tripped_one_stays_so(run):
    record, outcomes = run
    scope = SemanticScope(record, SETTINGS)
    for outcome in outcomes:
        before = scope.phase
        scope.apply(outcome)
        assert (scope.threshold is not None) == (scope.phase is ScopePhase.CERTIFIED)
        assert scope.threshold is None or scope.bound <= SETTINGS.budget + 1e-9
        assert scope.wants_label(0.7) == (scope.phase is ScopePhase.LEARNING)
        assert scope.record.labels <= SETTINGS.training_labels
        if before is ScopePhase.TRIPPED:
            assert scope.phase is before


@given(RUNS, st.sampled_from(("budget", "confidence", "reset")))
def test_what_begins_anew_serves_nothing_and_forgets_trials_of_before(run, cause):
    record, outcomes = run
    before, _ = applied(record, outcomes)
    stored, settings = before, SETTINGS
    if cause == "reset":
        stored = before.begin_anew()
    else:
        settings = msgspec.structs.replace(SETTINGS, **{cause: 0.9})
    after = SemanticScope(stored, settings)
    assert after.threshold is None
    if after.attempt == before.attempt:
        assert before.certification is None or before.certification.tripped
        return
    kept = after.record
    for outcome in outcomes:
        if not isinstance(outcome, LookupTally):
            assert not after.apply(outcome)
    assert after.record == kept
