"""Certification: which threshold of the score may serve, so that false hits stay within the budget. Pure code.

A scope begins in `shadow` and serves nothing. Some look-ups are *audited*: their answer is computed as well, and
compared with the one that the cache would have served. Each audited look-up is one trial for every threshold; at a
threshold it was a false hit if its candidate's score reached the threshold and the answers differ. A look-up without a
candidate is a trial, too, and needs no second answer.

Thresholds are tested from the strictest to the loosest, each only if all stricter ones passed (fixed-sequence testing:
Maurer, Hothorn and Lehmacher, 1995; for models: Angelopoulos et al., "Learn then Test", 2021). False hits only become
more where a threshold becomes looser, so with the given confidence no threshold ever serves whose rate of false hits
per look-up is above the budget, however many thresholds there are and however often one looks. For this two things
must not depend on the outcomes: the thresholds, which are fixed before the first trial, and the choice of what is
audited, which falls before anybody knows whether there is a candidate.

Look-ups without a candidate say something only if there was something to find. After a restart of the encoder, or with
a new system prompt, there is not: hundreds of them would certify every threshold, and none would have been tested. So
they count only as far as the others do not fall behind the part that they had when the thresholds were chosen. Whatever
makes candidates rare, what counts is then what would have come with all of them. Leaving such look-ups out errs on the
safe side: the rate of false hits in the others is higher.

While it serves (`certified`), audits go on. The bound may rise again, which makes the threshold stricter; a detector of
change, which forgets the good times before, makes it `tripped`: then it serves nothing until it begins anew. A
threshold whose false hits would need more look-ups than the horizon is closed for good, and with it all looser ones, so
their candidates need no labels any more. Behind the horizon, one is closed that would need a quarter more look-ups than
there have been: a scope that serves for long has false hits, too, and goes on as long as they are rare.
"""

from collections.abc import Sequence
from functools import lru_cache

from maitred.cache.semantic.evidence import AboveDetector, BelowTest, upper_bound
from maitred.core.semantic_scope import CertificationRecord, CertificationState

BUDGET = 0.005
CONFIDENCE = 0.95
ALARM_RATIO = 300.0
"""Likelihood ratio that trips: in 400,000 simulated audits no false alarm at half the budget, and two at 0.8 of it."""
HORIZON_LOOKUPS = 10_000
"""Twice what ten false hits need at the default budget."""
_LATER_HORIZON = 1.25
"""Look-ups within which a threshold must be able to pass again, as a multiple of those behind the horizon."""


class Certification:
    """Certification of one scope and one version of the score.

    Args:
        record: State to begin or to go on with. For another version of the score, begin anew: its scores mean
            something else.
        budget: Most false hits per look-up.
        confidence: Probability that no threshold above the budget serves, over all times.
        horizon_lookups: Audited look-ups within which a threshold must be able to pass for the first time.

    Attributes:
        lookups: Audited look-ups that count, so far.
    """

    def __init__(
        self,
        record: CertificationRecord,
        *,
        budget: float = BUDGET,
        confidence: float = CONFIDENCE,
        horizon_lookups: int = HORIZON_LOOKUPS,
    ) -> None:
        if list(record.thresholds) != sorted(set(record.thresholds), reverse=True) or not record.thresholds:
            raise ValueError("The thresholds must fall from the strictest to the loosest.")
        self.lookups = record.lookups
        self._thresholds = record.thresholds
        self._share = record.share
        self._hits = list(record.hits) or [0] * len(record.thresholds)
        self._false_hits = list(record.false_hits) or [0] * len(record.thresholds)
        self._budget = budget
        self._confidence = confidence
        self._test = _below_test(budget, confidence)
        self._change = AboveDetector(budget, alarm_ratio=ALARM_RATIO, sums=record.change)
        self._tripped = record.tripped
        self._horizon_lookups = horizon_lookups
        self._open = len(record.thresholds) if record.open is None else record.open
        self._passed = 0 if self._tripped else self._count_passed()

    @property
    def state(self) -> CertificationState:
        """State of the scope after the last look-up."""
        if self._tripped:
            return CertificationState.TRIPPED
        return CertificationState.CERTIFIED if self._passed else CertificationState.SHADOW

    @property
    def threshold(self) -> float | None:
        """Score from which on a candidate is served; None: nothing is served."""
        return self._thresholds[self._passed - 1] if self._passed else None

    @property
    def loosest(self) -> float | None:
        """Loosest threshold that can still pass: candidates with a lower score need no label; None: none can pass."""
        return self._thresholds[self._open - 1] if self._open else None

    @property
    def upper_bound(self) -> float:
        """Upper bound of false hits per look-up: while it serves the budget, and before the strictest threshold's.

        The threshold that serves was chosen by its own trials. So nothing less than the budget holds for it.
        """
        return self._budget if self._passed else _upper_bound(self.lookups, self._false_hits[0], self._confidence)

    @property
    def needed_lookups(self) -> int | None:
        """Audited look-ups after which the strictest threshold passes without another false hit; None: none can."""
        return self._test.fewest_trials(self._false_hits[0]) if self._open else None

    def record(self, score: float | None, *, is_false: bool = False) -> bool:
        """Records an audited look-up and returns whether it counts.

        Args:
            score: Score of the best candidate; None: there was none, or a guard refused it.
            is_false: Whether the candidate's answer is not an answer to the question. It need not be known for a score
                below `loosest`.
        """
        if self._tripped:
            return False
        place = len(self._thresholds) if score is None else self._place(score)
        if place >= self._open and self._lacks_hits():
            return False
        if self._passed and self._change.add(is_false and place < self._passed):
            self._tripped, self._passed = True, 0
            return True
        self.lookups += 1
        if place < len(self._thresholds):
            self._hits[place] += 1
        if is_false and place < len(self._thresholds):
            self._false_hits[place] += 1
            is_early = self.lookups <= self._horizon_lookups
            horizon = self._horizon_lookups if is_early else int(self.lookups * _LATER_HORIZON)
            self._open = min(self._open, self._count_within(horizon))
        self._passed = self._count_passed()
        return True

    def snapshot(self) -> CertificationRecord:
        """Returns the state to be stored."""
        return CertificationRecord(
            thresholds=self._thresholds,
            share=self._share,
            lookups=self.lookups,
            hits=tuple(self._hits),
            false_hits=tuple(self._false_hits),
            open=self._open,
            change=self._change.sums,
            tripped=self._tripped,
        )

    def _lacks_hits(self) -> bool:
        """Returns whether fewer look-ups had candidates for the open thresholds than when these were chosen."""
        share = self._share * self._open / len(self._thresholds)  # each threshold has about as much of it
        return sum(self._hits[: self._open]) < share * (self.lookups + 1)

    def _place(self, score: float) -> int:
        """Returns the index of the strictest threshold that a score reaches, or their number."""
        return next((i for i, threshold in enumerate(self._thresholds) if score >= threshold), len(self._thresholds))

    def _count_passed(self) -> int:
        # What is closed has had candidates without labels, so its false hits are not known any more.
        return min(self._open, self._count_within(self.lookups))

    def _count_within(self, lookups: int) -> int:
        """Returns how many thresholds so many look-ups are enough for, with the false hits until now."""
        false_hits = 0
        for passed, more in enumerate(self._false_hits):
            false_hits += more
            if self._test.fewest_trials(false_hits) > lookups:
                return passed
        return len(self._thresholds)


def make_thresholds(scores: Sequence[float], count: int) -> tuple[float, ...]:
    """Chooses thresholds from the scores of candidates that were seen before the first trial.

    Args:
        scores: Scores of would-be hits.
        count: Number of thresholds; each lets about as many more hits through as the one before it.
    """
    ordered = sorted(scores, reverse=True)
    places = {min(len(ordered) - 1, round((i + 1) * len(ordered) / count) - 1) for i in range(count)} if ordered else ()
    return tuple(sorted({ordered[place] for place in places if place >= 0}, reverse=True))


_upper_bound = lru_cache(maxsize=4_096)(upper_bound)
"""Every look-up tells its caller the bound, which changes with audits only."""


@lru_cache(maxsize=16)
def _below_test(budget: float, confidence: float) -> BelowTest:
    """Returns the test for a budget: what it has computed is kept, since a certification is made for each change."""
    return BelowTest(budget, confidence)
