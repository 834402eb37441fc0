"""The trial of a canary: what is seen of both versions, and what follows from it.

Seven things can be wrong with a canary, and each has a test of its own that may be looked at after every request
(`maitred.routing.rollout.sequential`):

- **slow**, in its first token or between tokens: more of its requests lie above the stable version's 95th percentile
  than should. The percentile is taken once, from the stable version's first requests, and then both are held
  against it; so the test is exact however rough the percentile is, and load that both suffer from excuses both;
- **failing** or **refusing**: more often than the stable version does;
- **wordy** or **terse**: the mean of the logarithm of tokens per answer has moved;
- **different**: of the requests that both have answered, it agrees in too few.

The canary is *aborted* as soon as one of them is shown. All together they abort a canary that is no different with a
probability of at most `TrialRules.false_alarms`, however long the trial goes on. It is *promoted* once it is shown of
every one that the canary is not worse than allowed: that is another hypothesis with evidence of its own, and the lack
of a reason to abort is not enough. Between the two, the trial goes on.

Outcomes are taken to be independent given their version. So requests are to be told in the order in which they began
(the slow ones end late), and where a few callers send most of the traffic, `Split` should be keyed by session.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from maitred.core.rollout import RolloutVersion
from maitred.routing.rollout.sequential import MeanSequence, RateTest


class TrialDecision(StrEnum):
    """What is to be done with the canary."""

    CONTINUE = "continue"
    ABORT = "abort"
    PROMOTE = "promote"


class CanaryFault(StrEnum):
    """What can be wrong with it."""

    TTFT = "ttft"
    ITL = "itl"
    ERRORS = "errors"
    REFUSALS = "refusals"
    WORDY = "wordy"
    TERSE = "terse"
    DISAGREEMENT = "disagreement"


class TrialTolerance(msgspec.Struct, frozen=True):
    """By how much a rate may exceed the stable version's, as a difference of shares of requests."""

    abort: float
    """More than that is a reason to abort."""
    promote: float
    """Less than that is no reason against promotion; above `abort`."""


class TrialRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a canary is held to."""

    false_alarms: float = 0.05
    """How often a canary that is no different may be aborted."""
    bad_promotions: float = 0.05
    """How often one that is worse than allowed may be promoted."""
    slow_quantile: float = 0.95
    baseline_requests: int = 200
    """Of the stable version, from which its percentile is taken."""
    least_requests: int = 100
    """Of the canary, before it can be promoted."""
    slow: TrialTolerance = TrialTolerance(0.01, 0.06)
    """Of the share of requests above the stable version's percentile, which is 5 % for the stable version itself."""
    failed: TrialTolerance = TrialTolerance(0.0, 0.02)
    refused: TrialTolerance = TrialTolerance(0.0, 0.03)
    disagreeing: TrialTolerance | None = TrialTolerance(0.05, 0.12)
    """Of the share of answers that both gave and that do not agree; versions that sample never agree in all. None:
    answers are not compared."""
    length: TrialTolerance = TrialTolerance(0.1, 0.3)
    """Of the mean logarithm of tokens per answer: 0.1 is a tenth more, or less."""


class TrialObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has ended. What was not measured is None: the times of a request that failed, for one."""

    ttft_s: float | None = None
    itl_s: float | None = None
    """The mean time between its tokens."""
    tokens: int | None = None
    """Of the answer."""
    failed: bool = False
    refused: bool = False
    agreed: bool | None = None
    """Of a request that both versions have answered: whether the answers agree. Told with the canary's."""
    copied: bool = False
    """It was served by the stable version, and this is the copy that the canary got. Copies run where there is room, so
    that they are not refused, and their times are not to be told."""


class TrialVerdict(msgspec.Struct, frozen=True):
    """What is to be done, and why."""

    decision: TrialDecision
    faults: tuple[CanaryFault, ...] = ()
    """What is shown to be wrong; those that lead to an abort."""
    unproven: tuple[CanaryFault, ...] = ()
    """What stands against a promotion still: not shown to be right."""
    stable_requests: int = 0
    canary_requests: int = 0


class CanaryTrial:
    """Of one canary.

    Args:
        rules: What it is held to.
    """

    def __init__(self, rules: TrialRules) -> None:
        self._rules = rules
        alpha = rules.false_alarms / len(CanaryFault)
        self._guilty_at = math.log(1 / alpha)
        self._cleared_at = math.log(1 / rules.bad_promotions)
        self._requests = dict.fromkeys(RolloutVersion, 0)
        self._rates = {
            CanaryFault.TTFT: _Rate(rules.slow),
            CanaryFault.ITL: _Rate(rules.slow),
            CanaryFault.ERRORS: _Rate(rules.failed),
            CanaryFault.REFUSALS: _Rate(rules.refused),
        }
        if rules.disagreeing is not None:
            self._rates[CanaryFault.DISAGREEMENT] = _Rate(rules.disagreeing, standard=0.0)
        self._lines = {
            fault: _Line(rules.baseline_requests, rules.slow_quantile) for fault in (CanaryFault.TTFT, CanaryFault.ITL)
        }
        # Its two sides are two faults.
        self._length = _Length(rules.length, 2 * alpha, 2 * rules.bad_promotions)

    def observe(self, version: RolloutVersion, seen: TrialObservation) -> None:
        """Takes a request into account, in the order in which requests began."""
        self._requests[version] += 1
        if not seen.copied:
            self._rates[CanaryFault.REFUSALS].add(version, seen.refused)
        if not seen.refused:
            self._rates[CanaryFault.ERRORS].add(version, seen.failed)
        for fault, value in ((CanaryFault.TTFT, seen.ttft_s), (CanaryFault.ITL, seen.itl_s)):
            if value is not None and (above := self._lines[fault].above(version, value)) is not None:
                self._rates[fault].add(version, above)
        if seen.tokens is not None:
            self._length.add(version, seen.tokens)
        if seen.agreed is not None and version is RolloutVersion.CANARY and CanaryFault.DISAGREEMENT in self._rates:
            self._rates[CanaryFault.DISAGREEMENT].add(version, not seen.agreed)

    def verdict(self) -> TrialVerdict:
        """What follows from what was seen so far."""
        faults = [fault for fault, rate in self._rates.items() if rate.worse.log_evidence >= self._guilty_at]
        faults += self._length.faults()
        unproven = [fault for fault, rate in self._rates.items() if rate.sound.log_evidence < self._cleared_at]
        unproven += self._length.unproven()
        if faults:
            decision = TrialDecision.ABORT
        elif unproven or self._requests[RolloutVersion.CANARY] < self._rules.least_requests:
            decision = TrialDecision.CONTINUE
        else:
            decision = TrialDecision.PROMOTE
        return TrialVerdict(
            decision,
            tuple(faults),
            tuple(unproven),
            self._requests[RolloutVersion.STABLE],
            self._requests[RolloutVersion.CANARY],
        )

    def evidence(self) -> Mapping[CanaryFault, float]:
        """How strongly each fault of a rate is suspected: the logarithm of the evidence over what an abort takes."""
        return {fault: rate.worse.log_evidence / self._guilty_at for fault, rate in self._rates.items()}


class _Rate:
    """Both questions about one rate: is it too high, and is it shown not to be?"""

    def __init__(self, tolerance: TrialTolerance, standard: float | None = None) -> None:
        self.worse = RateTest(tolerance.abort, standard)
        # The same test of the opposite outcome: that it fails to happen more often, but for the margin.
        self.sound = RateTest(-tolerance.promote, None if standard is None else 1 - standard)

    def add(self, version: RolloutVersion, happened: bool) -> None:
        if version is RolloutVersion.STABLE:
            self.worse.stable(happened)
            self.sound.stable(not happened)
        else:
            self.worse.canary(happened)
            self.sound.canary(not happened)


class _Line:
    """The stable version's percentile, once there is enough to take it from."""

    def __init__(self, requests: int, quantile: float) -> None:
        self._wanted = requests
        self._quantile = quantile
        self._first: list[float] = []
        self._line: float | None = None

    def above(self, version: RolloutVersion, value: float) -> bool | None:
        """Whether the value lies above the line; None while there is none, so that nothing counts that made it."""
        if self._line is not None:
            return value > self._line
        if version is RolloutVersion.STABLE:
            self._first.append(value)
            if len(self._first) == self._wanted:
                self._first.sort()
                self._line = self._first[math.ceil(self._quantile * self._wanted) - 1]
                self._first.clear()
        return None


class _Length:
    """Tokens per answer: each of the canary's is held against the mean of the stable version's since the one before."""

    def __init__(self, tolerance: TrialTolerance, alpha: float, promote_alpha: float) -> None:
        self._tolerance = tolerance
        self._worse = MeanSequence(alpha)
        self._sound = MeanSequence(promote_alpha)
        self._since: list[float] = []

    def add(self, version: RolloutVersion, tokens: int) -> None:
        size = math.log1p(tokens)
        if version is RolloutVersion.STABLE:
            self._since.append(size)
        elif self._since:
            difference = size - sum(self._since) / len(self._since)
            self._since.clear()
            self._worse.add(difference)
            self._sound.add(difference)

    def faults(self) -> Sequence[CanaryFault]:
        low, high = self._worse.interval()
        margin = self._tolerance.abort
        return [*([CanaryFault.WORDY] if low > margin else []), *([CanaryFault.TERSE] if high < -margin else [])]

    def unproven(self) -> Sequence[CanaryFault]:
        low, high = self._sound.interval()
        margin = self._tolerance.promote
        return [*([CanaryFault.WORDY] if high > margin else []), *([CanaryFault.TERSE] if low < -margin else [])]
