"""State of a scope of the semantic cache, as it is stored, and what look-ups have found in it.

A scope is a model and who shares its answers: each is certified for itself, because errors of one say nothing about
another. The rules that lead from one state to the next are in `maitred.cache.semantic.scope`.
"""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from maitred.core.request import LabelledPair


class CertificationState(StrEnum):
    """State of a scope of the semantic cache: learning, serving, or stopped."""

    SHADOW = "shadow"
    CERTIFIED = "certified"
    TRIPPED = "tripped"


class CertificationRecord(Struct, frozen=True, kw_only=True):
    """State of a certification, as it is stored.

    Attributes:
        thresholds: Scores, from the strictest to the loosest.
        share: Part of the look-ups whose candidates reached the loosest threshold when it was chosen; 0: unknown, so
            look-ups without a candidate count however many they are.
        lookups: Audited look-ups that count.
        hits: Of these, those whose candidates reached each threshold, and no stricter one.
        false_hits: False ones of these hits.
        open: Thresholds that can still pass, from the strictest on; None: all.
        change: State of the detector of change.
        tripped: Whether it has tripped.
    """

    thresholds: tuple[float, ...]
    share: float = 0.0
    lookups: int = 0
    hits: tuple[int, ...] = ()
    false_hits: tuple[int, ...] = ()
    open: int | None = None
    change: tuple[float, ...] = ()
    tripped: bool = False


class ScopePhase(StrEnum):
    """Phase of a scope of the semantic cache; the first four are `shadow`, in which nothing is served."""

    LEARNING = "learning"
    """Compares answers until there are enough to train a verifier."""
    TRAINING = "training"
    """Has enough compared answers and waits for its verifier."""
    SCORING = "scoring"
    """Collects scores of the verifier, from which thresholds are chosen."""
    CERTIFYING = "certifying"
    """Compares answers until the bound of false hits is within the budget."""
    CERTIFIED = "certified"
    """Serves."""
    TRIPPED = "tripped"
    """Serves nothing until an operator lets it begin anew: false hits have become too many."""


class ScopeCounts(Struct, frozen=True, kw_only=True):
    """Counts of look-ups in a scope, since it began or began anew.

    Attributes:
        lookups: Look-ups.
        audits: Audited look-ups that count for its certification.
        same: Compared answers that were the same, in training and in audits.
        different: Compared answers that were not.
        served: Look-ups that got the answer of a similar question.
        false_hits: Audited look-ups that got, or would have got, a wrong answer at the threshold of their time.
        saved_tokens: Tokens of prompts and answers that did not have to be computed.
    """

    lookups: int = 0
    audits: int = 0
    same: int = 0
    different: int = 0
    served: int = 0
    false_hits: int = 0
    saved_tokens: int = 0


class ScopeRecord(Struct, frozen=True, kw_only=True):
    """State of a scope of the semantic cache, as it is stored.

    Attributes:
        encoder: Digest of the encoder whose vectors its pairs and its verifier belong to.
        attempt: Number of the attempt to certify; a look-up that was judged in another one does not count. No other
            one of the scope has it, also where the scope was removed in between.
        labels: Compared answers that the training may use. Their texts are stored beside this record.
        untaught: Number of labels of which no verifier could be learnt; 0: that is not known of any.
        trained_until_s: Wall time until which a gateway trains the verifier, and no other one does.
        verifier: Version of the verifier; empty: there is none.
        scores: Scores of look-ups, until thresholds are chosen; None: there was no candidate.
        certification: Its certification; None: thresholds are not yet chosen.
        budget: Budget of the certification.
        confidence: Confidence of the certification.
        counts: What operators see.
    """

    encoder: str
    attempt: int = 0
    labels: int = 0
    untaught: int = 0
    trained_until_s: float = 0.0
    verifier: str = ""
    scores: tuple[float | None, ...] = ()
    certification: CertificationRecord | None = None
    budget: float = 0.0
    confidence: float = 0.0
    counts: ScopeCounts = ScopeCounts()

    def begin_anew(self, *, keep_labels: bool = False) -> "ScopeRecord":
        """Returns a state without a verifier and without a certification.

        Args:
            keep_labels: Whether the next verifier is trained from the labels that are there.
        """
        labels = self.labels if keep_labels else 0
        return ScopeRecord(encoder=self.encoder, attempt=self.attempt + 1, labels=labels)

    def with_verifier(self, version: str) -> "ScopeRecord":
        """Returns a state with a new verifier, whose scores are to be collected."""
        return replace(
            self, attempt=self.attempt + 1, verifier=version, scores=(), certification=None, budget=0.0, confidence=0.0
        )


class LookupLabel(Struct, frozen=True, array_like=True, tag="label"):
    """Compared answers of a look-up, from which a verifier learns."""

    pair: LabelledPair
    attempt: int
    """`ScopeRecord.attempt` at the look-up."""


class LookupScore(Struct, frozen=True, array_like=True, tag="score"):
    """Score of a look-up without a label, from which thresholds are chosen."""

    score: float | None
    """Score of the best candidate; None: there was none."""
    attempt: int
    """`ScopeRecord.attempt` at the look-up."""


class LookupTrial(Struct, frozen=True, array_like=True, tag="trial"):
    """Audited look-up, which is one trial of the certification."""

    score: float | None
    """Score of the best candidate; None: there was none."""
    is_false: bool
    """Whether its answer is not an answer to the question. It need not be known for a score below the loosest threshold
    that may still pass."""
    attempt: int
    """`ScopeRecord.attempt` at the look-up."""


class LookupTally(Struct, frozen=True, array_like=True, tag="tally"):
    """Number of look-ups, for operators."""

    lookups: int = 0
    served: int = 0
    saved_tokens: int = 0

    def __add__(self, other: "LookupTally") -> "LookupTally":
        """Returns the numbers of both together."""
        return LookupTally(
            self.lookups + other.lookups, self.served + other.served, self.saved_tokens + other.saved_tokens
        )


LookupOutcome = LookupLabel | LookupScore | LookupTrial | LookupTally
"""What one or several look-ups have found in a scope."""
