"""Scope of the semantic cache: its way from the first label to a certified threshold, and back. Pure code.

::

    learning -> training -> scoring -> certifying -> certified -> tripped
    labels      verifier    scores     trials        trials

Three things must not depend on each other's outcomes, or the bound of false hits would be too low: the verifier, the
thresholds and the trials. So each phase uses look-ups of its own, and a new verifier, other thresholds, another budget
or another confidence begin a new *attempt*, of which only look-ups count that were judged in it. A tripped scope stays
tripped until an operator lets it begin anew, whatever the settings become.

The state is shared by all gateways of a database: each applies its outcomes to the stored record in one transaction
(`maitred.store.semantic`).
"""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from maitred.cache.config import SemanticConfig
from maitred.cache.semantic.certification import BUDGET, HORIZON_LOOKUPS, Certification, make_thresholds
from maitred.core.request import LabelledPair
from maitred.core.semantic_scope import (
    CertificationRecord,
    CertificationState,
    LookupLabel,
    LookupOutcome,
    LookupScore,
    LookupTally,
    LookupTrial,
    ScopePhase,
    ScopeRecord,
)

LEAST_COSINE = 0.55
"""Below it, hardly any two questions have the same answer."""
MOST_COSINE = 0.95
"""Pairs above it are right nearly always, and teach a verifier nothing."""
SCORED_LOOKUPS = 400
"""Look-ups without labels whose scores become thresholds: enough for thirty of them, and soon over."""
THRESHOLDS = 30
"""Each lets about one more look-up in a hundred through than the one before it."""
WIDEST_SHARE = 0.35
"""Part of the look-ups that the loosest threshold would serve; at a usual budget none passes that serves more."""


class SemanticScope:
    """Scope of the semantic cache.

    Args:
        record: Its stored state.
        settings: Budget, confidence and number of labels.
    """

    def __init__(self, record: ScopeRecord, settings: SemanticConfig) -> None:
        certified = record.certification
        limits = (settings.budget, settings.confidence)
        if certified is not None and not certified.tripped and limits != (record.budget, record.confidence):
            record = replace(record, attempt=record.attempt + 1)
            record = _begin_certification(record, certified.thresholds, certified.share, settings)
        self._settings = settings
        self._record: ScopeRecord
        self._certification: Certification | None
        self._set(record)

    @property
    def record(self) -> ScopeRecord:
        """The state to be stored."""
        if self._certification is None:
            return self._record
        return replace(self._record, certification=self._certification.snapshot())

    @property
    def attempt(self) -> int:
        """Number of the attempt to certify, which look-ups name that are judged now."""
        return self._record.attempt

    @property
    def phase(self) -> ScopePhase:
        """Phase after the last outcome."""
        if self._certification is not None:
            match self._certification.state:
                case CertificationState.TRIPPED:
                    return ScopePhase.TRIPPED
                case CertificationState.CERTIFIED:
                    return ScopePhase.CERTIFIED
                case CertificationState.SHADOW:
                    return ScopePhase.CERTIFYING
        if self._record.verifier:
            return ScopePhase.SCORING
        return ScopePhase.LEARNING if self._record.labels < self._settings.training_labels else ScopePhase.TRAINING

    @property
    def state(self) -> CertificationState:
        """State that operators see: whether the scope serves, learns, or has been stopped."""
        return CertificationState.SHADOW if self._certification is None else self._certification.state

    @property
    def threshold(self) -> float | None:
        """Score from which on a candidate is served; None: nothing is served."""
        return None if self._certification is None else self._certification.threshold

    @property
    def loosest(self) -> float | None:
        """Loosest threshold that can still pass: candidates with a lower score need no label; None: none needs one."""
        return None if self._certification is None else self._certification.loosest

    @property
    def bound(self) -> float:
        """Upper bound of false hits per look-up, as `Certification.upper_bound`; 1: nothing is known."""
        return 1.0 if self._certification is None else self._certification.upper_bound

    @property
    def progress(self) -> tuple[int, int | None]:
        """Progress of the phase: what it has counted, and how much ends it; None: it does not end by itself."""
        match self.phase:
            case ScopePhase.LEARNING | ScopePhase.TRAINING:
                return self._record.labels, self._settings.training_labels
            case ScopePhase.SCORING:
                return len(self._record.scores), SCORED_LOOKUPS
            case phase:
                assert self._certification is not None, "the other phases have one"
                needed = self._certification.needed_lookups if phase is ScopePhase.CERTIFYING else None
                return self._certification.lookups, needed

    def wants_label(self, cosine: float) -> bool:
        """Whether the compared answers of a pair of questions with this cosine would teach a verifier something."""
        return self.phase is ScopePhase.LEARNING and LEAST_COSINE <= cosine <= MOST_COSINE

    def apply(self, outcome: LookupOutcome) -> bool:
        """Applies an outcome and returns whether it counts; one of another phase or attempt does not."""
        match outcome:
            case LookupLabel():
                return self._add_label(outcome)
            case LookupScore():
                return self._add_score(outcome)
            case LookupTrial():
                return self._add_trial(outcome)
            case LookupTally():
                self._count(lookups=outcome.lookups, served=outcome.served, saved_tokens=outcome.saved_tokens)
                return True

    def _add_label(self, outcome: LookupLabel) -> bool:
        if self.phase is not ScopePhase.LEARNING or outcome.attempt != self._record.attempt:
            return False
        pair = outcome.pair
        self._record = replace(self._record, labels=self._record.labels + 1)
        self._count(same=int(pair.same), different=int(not pair.same))
        return True

    def _add_score(self, outcome: LookupScore) -> bool:
        if self.phase is not ScopePhase.SCORING or outcome.attempt != self._record.attempt:
            return False
        score = outcome.score if outcome.score is not None and math.isfinite(outcome.score) else None
        scores = (*self._record.scores, score)
        if len(scores) < SCORED_LOOKUPS:
            self._record = replace(self._record, scores=scores)
            return True
        found = sorted((score for score in scores if score is not None), reverse=True)
        best = found[: round(WIDEST_SHARE * len(scores))]
        thresholds, share = make_thresholds(best, THRESHOLDS), len(best) / len(scores)
        # Without a single candidate there is nothing to choose from yet.
        record = replace(self._record, scores=())
        self._set(_begin_certification(record, thresholds, share, self._settings) if thresholds else record)
        return True

    def _add_trial(self, outcome: LookupTrial) -> bool:
        certification = self._certification
        if certification is None or certification.state is CertificationState.TRIPPED:
            return False
        if outcome.attempt != self._record.attempt:
            return False
        score, loosest, threshold = outcome.score, certification.loosest, certification.threshold
        compared = score is not None and loosest is not None and score >= loosest
        would_serve = score is not None and threshold is not None and score >= threshold
        if not certification.record(score, is_false=outcome.is_false):
            return False
        self._count(
            audits=1,
            same=int(compared and not outcome.is_false),
            different=int(compared and outcome.is_false),
            false_hits=int(would_serve and outcome.is_false),
        )
        return True

    def _count(self, **more: int) -> None:
        counts = self._record.counts
        added = {name: getattr(counts, name) + count for name, count in more.items()}
        self._record = replace(self._record, counts=replace(counts, **added))

    def _set(self, record: ScopeRecord) -> None:
        self._record = record
        self._certification = (
            None
            if record.certification is None
            else Certification(
                record.certification,
                budget=self._settings.budget,
                confidence=self._settings.confidence,
                # A smaller budget takes as many times more look-ups.
                horizon_lookups=round(HORIZON_LOOKUPS * BUDGET / self._settings.budget),
            )
        )


def apply_outcomes(
    record: ScopeRecord, outcomes: Sequence[LookupOutcome], *, settings: SemanticConfig
) -> tuple[ScopeRecord, list[LabelledPair]]:
    """Applies outcomes to a stored state; returns the new one and the labels that it counts.

    Args:
        record: The stored state.
        outcomes: Outcomes in the order in which they are to be recorded.
        settings: See `SemanticScope`.
    """
    scope = SemanticScope(record, settings)
    labels = [outcome.pair for outcome in outcomes if scope.apply(outcome) and isinstance(outcome, LookupLabel)]
    return scope.record, labels


def _begin_certification(
    record: ScopeRecord, thresholds: tuple[float, ...], share: float, settings: SemanticConfig
) -> ScopeRecord:
    return replace(
        record,
        certification=CertificationRecord(thresholds=thresholds, share=share),
        budget=settings.budget,
        confidence=settings.confidence,
    )
