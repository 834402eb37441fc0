"""Simulated scopes of the semantic cache, whose rates of false hits are known."""

import random
from dataclasses import dataclass

from maitred.cache.semantic.certification import Certification
from maitred.core.semantic_scope import CertificationRecord, CertificationState

HIT_SHARE = 0.4
"""Look-ups with a candidate."""
THRESHOLDS = tuple(1 - (i + 1) / 20 for i in range(20))
"""Of a score that is uniform from 0 to 1."""


@dataclass(frozen=True)
class PlantedScope:
    """Scope in which a looser threshold lets more false hits through.

    Attributes:
        rate: False hits per look-up at the loosest threshold; at a score s, the part (1 - s)² of them has a higher one.
    """

    rate: float

    def rate_at(self, threshold: float) -> float:
        """False hits per look-up at a threshold."""
        return self.rate * (1 - threshold) ** 2

    def draw(self, source: random.Random) -> tuple[float | None, bool]:
        """Draws a look-up: the score of its candidate, and whether that would be a false hit."""
        if source.random() < self.rate:
            return 1 - source.random() ** 0.5, True
        return (source.random(), False) if source.random() < HIT_SHARE else (None, False)


@dataclass
class PlantedRun:
    """What a simulated scope did.

    Attributes:
        served_lookups: Look-ups while it was certified.
        false_hits: Served false hits.
        certified_after: Audited look-ups until it first was certified, or None.
        above_budget: Whether it ever served at a threshold whose true rate is above the budget.
        tripped: Whether it ended tripped.
    """

    served_lookups: int = 0
    false_hits: int = 0
    certified_after: int | None = None
    above_budget: bool = False
    tripped: bool = False


def simulate_scope(rate: float, lookups: int, audit_share: float, budget: float, source: random.Random) -> PlantedRun:
    """Simulates a scope: everything is audited in shadow, a part while it serves."""
    scope = PlantedScope(rate)
    certification = Certification(CertificationRecord(thresholds=THRESHOLDS), budget=budget)
    run = PlantedRun()
    for _ in range(lookups):
        score, is_false = scope.draw(source)
        threshold = certification.threshold
        if threshold is not None:
            run.served_lookups += 1
            run.above_budget |= scope.rate_at(threshold) > budget
            run.false_hits += is_false and score is not None and score >= threshold
        if threshold is None or source.random() < audit_share:
            certification.record(score, is_false=is_false)
        if run.certified_after is None and certification.state is CertificationState.CERTIFIED:
            run.certified_after = certification.lookups
    run.tripped = certification.state is CertificationState.TRIPPED
    return run


def simulate_drift(rate: float, budget: float, most_audits: int, source: random.Random) -> int | None:
    """Simulates a certified scope whose served false hits rise at once, and counts audits until it serves nothing.

    Args:
        rate: Served false hits per look-up after the drift; before, they are a fifth of the budget.
        budget: Budget of the certification.
        most_audits: Audits after which it gives up.
        source: Random numbers.
    """
    certification = Certification(CertificationRecord(thresholds=(0.5,)), budget=budget)
    while certification.lookups < 5_000 or certification.state is CertificationState.SHADOW:
        certification.record(0.9, is_false=source.random() < budget / 5)
        if certification.state is CertificationState.TRIPPED:
            certification = Certification(CertificationRecord(thresholds=(0.5,)), budget=budget)
    for audit in range(1, most_audits + 1):
        certification.record(0.9, is_false=source.random() < rate)
        if certification.threshold is None:
            return audit
    return None
