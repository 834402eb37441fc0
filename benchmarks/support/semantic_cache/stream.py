"""Stream of questions through a semantic cache: training, certification in shadow, then service; one split by time."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from maitred.cache.semantic.certification import Certification, make_thresholds
from maitred.core.semantic_scope import CertificationRecord, CertificationState
from maitred.engine.similar.features import TokenWeights, text_features
from maitred.engine.similar.index import SimilarIndex
from maitred.engine.similar.question import EncodedQuestion, Floats, QuestionPair
from maitred.engine.similar.verifier import Verifier, train_verifier
from maitred.text.question_guards import difference, skip_reason

PARTITION = "first turns"
COSINES = tuple(round(1 - 0.005 * i, 3) for i in range(1, 41))
"""Thresholds of the cosine."""
Score = Callable[[list["Candidate"]], Floats]


@dataclass(frozen=True)
class Plan:
    """Phases of a stream, and what they may cost.

    Attributes:
        entries: Most entries of the cache; the cosine's certification begins when it is full.
        warm: Look-ups before the first label.
        training_labels: Labels of the verifier.
        certification_labels: Labels of its certification before it serves.
        audit_labels: Labels of audits while it serves.
        audit_share: Part of the look-ups that is audited while it serves.
        serve_at: Look-up at which everything serves that is certified.
        thresholds: Number of thresholds.
        scored_lookups: Look-ups without labels whose scores become the verifier's thresholds.
        widest: Part of the look-ups that the loosest threshold would serve.
        candidates: Cached questions that are judged for each look-up.
        least_cosine: Cosine that a candidate has at least.
        most_cosine: Cosine that a pair has at most whose label is taken for training.
        horizon_lookups: Audited look-ups within which a threshold must be able to pass.
    """

    entries: int = 2_000
    warm: int = 500
    training_labels: int = 1_000
    certification_labels: int = 1_150
    audit_labels: int = 150
    audit_share: float = 0.15
    serve_at: int = 6_000
    thresholds: int = 100
    scored_lookups: int = 200
    widest: float = 0.35
    candidates: int = 3
    least_cosine: float = 0.55
    most_cosine: float = 0.95
    horizon_lookups: int = 4_500

    @property
    def labels(self) -> int:
        """All labels together."""
        return self.training_labels + self.certification_labels + self.audit_labels

    def certification(self, thresholds: tuple[float, ...]) -> Certification:
        """Makes a certification that begins."""
        return Certification(CertificationRecord(thresholds=thresholds), horizon_lookups=self.horizon_lookups)


@dataclass(frozen=True)
class Candidate:
    """Cached question that may answer a look-up.

    Attributes:
        key: Of the cached question.
        pair: Both questions.
        same: Whether they have the same intent.
        differs: Whether a guard refuses the pair.
    """

    key: int
    pair: QuestionPair
    same: bool
    differs: bool


@dataclass
class Served:
    """What happened while a scope served.

    Attributes:
        lookups: Look-ups from the moment at which it might serve.
        right: Served answers that were right.
        false: Served answers that were not.
        differing: Right ones whose questions differ in what a guard knows, such as a number: right by intent alone.
        tripped: Whether it ended tripped.
        certified: Whether it was certified when it began.
        labels: Labels that it took, from the first to the last.
        bound: Upper bound of false hits per look-up at the beginning.
    """

    lookups: int = 0
    right: int = 0
    false: int = 0
    differing: int = 0
    tripped: bool = False
    certified: bool = False
    labels: int = 0
    bound: float = 1.0


@dataclass
class Scope:
    """Score with its certification.

    Attributes:
        score: Judges candidates.
        guarded: Whether the guards stand before the score.
        certification: Its certification.
        labels_left: Labels that it may still take.
    """

    score: Score
    guarded: bool
    certification: Certification
    labels_left: int
    labels: int = 0

    def best(self, candidates: list[Candidate], skipped: bool) -> tuple[Candidate, float] | None:
        """Returns the candidate that would be served, and its score."""
        if self.guarded:
            candidates = [] if skipped else [each for each in candidates if not each.differs]
        if not candidates:
            return None
        scores = self.score(candidates)
        best = int(np.argmax(scores))
        return candidates[best], float(scores[best])

    def audit(self, best: tuple[Candidate, float] | None) -> None:
        """Records an audited look-up; without a label left there are no audits any more, whatever was found."""
        if not self.labels_left:
            return
        loosest = self.certification.loosest
        if best is None or loosest is None or best[1] < loosest:
            self.certification.record(None)
            return
        self.labels_left -= 1
        self.labels += 1
        self.certification.record(best[1], is_false=not best[0].same)


class QuestionSet:
    """Questions of a set, with what is computed once for all splits.

    Args:
        encoded: Questions.
        intents: Their intents.
        edits: Index of a question and an edit of it, for training.
        set_aside: Indices of questions in which tokens are counted; they are in no stream.
    """

    def __init__(
        self,
        encoded: list[EncodedQuestion],
        intents: list[str],
        edits: list[tuple[int, EncodedQuestion]],
        set_aside: list[int],
    ) -> None:
        self.encoded = encoded
        self.intents = intents
        self.edits = edits
        self.token_weights = TokenWeights.of([encoded[i] for i in set_aside])
        self.streamed = sorted(set(range(len(encoded))) - set(set_aside))
        self.skipped = [skip_reason(each.wording, in_conversation=False) is not None for each in encoded]
        self._features: dict[tuple[int, int], list[float]] = {}
        self._differs: dict[tuple[int, int], bool] = {}

    def known(self) -> list[EncodedQuestion]:
        """All questions and edits."""
        return [*self.encoded, *(edit for _, edit in self.edits)]

    def features(self, pair: QuestionPair) -> Floats:
        """Measures a pair; what does not depend on its surroundings is kept."""
        key = _key(pair)
        if key not in self._features:
            self._features[key] = text_features(pair.asked, pair.cached, self.token_weights)
        return np.array([*self._features[key], *pair.surroundings])

    def differs(self, pair: QuestionPair) -> bool:
        """Whether a guard refuses a pair; what it says is kept."""
        key = _key(pair)
        if key not in self._differs:
            self._differs[key] = difference(pair.asked.wording, pair.cached.wording) is not None
        return self._differs[key]

    def arrays(self, pairs: list[QuestionPair]) -> tuple[Floats, Floats]:
        """Features and middles of pairs."""
        return np.array([self.features(pair) for pair in pairs]), np.array([pair.middle for pair in pairs])


@dataclass
class Split:
    """One order in time of a set's questions.

    Args:
        questions: Set.
        seed: Of the order.
        plan: Phases.
        length: Most questions of the stream.
    """

    questions: QuestionSet
    seed: int
    plan: Plan
    length: int
    index: SimilarIndex = field(init=False)

    def __post_init__(self) -> None:
        self._source = np.random.default_rng(self.seed)
        self._order = self._source.permutation(self.questions.streamed)[: self.length].tolist()
        self.index = SimilarIndex(self.plan.entries)
        self.verifier: Verifier | None = None
        self.scopes: dict[str, Scope] = {}
        self._labelled: list[Candidate] = []
        self._scores: list[float] = []

    def run(self) -> dict[str, Served]:
        """Runs the stream and returns what each scope served."""
        self._shadow()
        return {name: self._serve(scope) for name, scope in self.scopes.items()}

    def _shadow(self) -> None:
        plan = self.plan
        certification = plan.certification(COSINES)
        self.scopes["cosine"] = Scope(_cosines, False, certification, plan.labels - plan.audit_labels)
        for lookup, asked in enumerate(self._order[: plan.serve_at]):
            candidates = self.find(self.index, asked)
            skipped = self.questions.skipped[asked]
            if lookup >= plan.entries:
                for scope in self.scopes.values():
                    scope.audit(scope.best(candidates, skipped))
            if lookup >= plan.warm and "verifier" not in self.scopes:
                self._prepare([] if skipped else [each for each in candidates if not each.differs], lookup)
            self.index.add(PARTITION, asked, self.questions.encoded[asked])

    def _prepare(self, candidates: list[Candidate], lookup: int) -> None:
        """Takes labels until the verifier can be trained, then scores until thresholds can be chosen."""
        if self.verifier is None:
            # Pairs that are nearly equal would be right nearly always, and teach little.
            self._labelled += [each for each in candidates[:1] if _cosines([each])[0] <= self.plan.most_cosine]
            if len(self._labelled) == self.plan.training_labels:
                self.verifier = self._train(self._order[: lookup + 1])
            return
        self._scores.append(float(self._verified(candidates).max()) if candidates else -math.inf)
        if len(self._scores) == self.plan.scored_lookups:
            widest = sorted(self._scores, reverse=True)[: round(self.plan.widest * len(self._scores))]
            thresholds = make_thresholds([score for score in widest if score > -math.inf], self.plan.thresholds)
            self.scopes["verifier"] = Scope(
                self._verified,
                guarded=True,
                certification=self.plan.certification(thresholds),
                labels_left=self.plan.certification_labels,
                labels=self.plan.training_labels,
            )

    def _train(self, seen: list[int]) -> Verifier:
        known, encoded = set(seen), self.questions.encoded
        # As a product does: an edit stands beside its question, and beside those that have the same answer.
        partners: dict[int, list[EncodedQuestion]] = {id(encoded[i]): [encoded[i]] for i, _ in self.questions.edits}
        for pair in (each.pair for each in self._labelled if each.same):
            for one, other in ((pair.asked, pair.cached), (pair.cached, pair.asked)):
                partners.get(id(one), []).append(other)
        pairs = [
            self.index.pair_with(PARTITION, edit, other)
            for i, edit in self.questions.edits
            if i in known
            for other in partners[id(encoded[i])]
        ]
        edits = [pair for pair in pairs if not self.questions.differs(pair)]
        return train_verifier(
            self.questions.arrays([each.pair for each in self._labelled]),
            np.array([each.same for each in self._labelled]),
            self.questions.arrays(edits),
            encoder="all-MiniLM-L6-v2",
            token_weights=self.questions.token_weights,
        )

    def find(self, index: SimilarIndex, asked: int) -> list[Candidate]:
        """Finds candidates for a question."""
        plan, intents = self.plan, self.questions.intents
        found = index.search(
            PARTITION, self.questions.encoded[asked], count=plan.candidates, least_cosine=plan.least_cosine
        )
        return [
            Candidate(key, pair, intents[key] == intents[asked], self.questions.differs(pair))
            for key, pair in found
            if isinstance(key, int)
        ]

    def _verified(self, candidates: list[Candidate]) -> Floats:
        assert self.verifier is not None
        return self.verifier.score_features(*self.questions.arrays([each.pair for each in candidates]))

    def _serve(self, scope: Scope) -> Served:
        plan, certification = self.plan, scope.certification
        # Questions themselves are shared, not copied.
        index = copy.deepcopy(self.index, {id(each): each for each in self.questions.known()})
        scope.labels_left = plan.audit_labels
        served = Served(certified=certification.state is CertificationState.CERTIFIED, bound=certification.upper_bound)
        audited = np.random.default_rng((self.seed, 1)).random(len(self._order)) < plan.audit_share
        for lookup in range(plan.serve_at, len(self._order)):
            asked = self._order[lookup]
            best = scope.best(self.find(index, asked), self.questions.skipped[asked])
            threshold = certification.threshold
            served.lookups += 1
            hit = best is not None and threshold is not None and best[1] >= threshold
            if hit and best is not None:
                served.right += best[0].same
                served.false += not best[0].same
                served.differing += best[0].same and best[0].differs
                index.touch(best[0].key)
            else:
                index.add(PARTITION, asked, self.questions.encoded[asked])
            if audited[lookup]:
                scope.audit(best)
        served.tripped = certification.state is CertificationState.TRIPPED
        served.labels = scope.labels
        return served


def _cosines(candidates: list[Candidate]) -> Floats:
    return np.array([float(each.pair.asked.vector @ each.pair.cached.vector) for each in candidates])


def _key(pair: QuestionPair) -> tuple[int, int]:
    """Names the two questions of a pair, which live as long as their set, in either order."""
    asked, cached = id(pair.asked), id(pair.cached)
    return min(asked, cached), max(asked, cached)
