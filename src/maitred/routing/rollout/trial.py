"""Trial of a canary: tests the observations of both versions, and decides about the canary.

A canary can have seven faults, and each fault has its own test, which can be evaluated after every request
(`maitred.routing.rollout.sequential`):

- **slow**, in its first token or between tokens: too many of its requests are above the 95th percentile of the stable
  version. The percentile is taken once, from the first requests of the stable version, and both versions are then
  compared with it; so the test is exact even if the percentile is rough, and load that affects both versions is no
  fault of the canary;
- **failing** or **refusing**: more often than the stable version does;
- **wordy** or **terse**: the mean of the logarithm of tokens per answer has moved;
- **different**: its answers agree with the stable version's in too few of the requests that both have answered.

The canary is *aborted* as soon as the test of one fault shows it. All tests together abort a canary that is equal to
the stable version with a probability of at most `TrialRules.false_alarms`, even in a very long trial. The canary is
*promoted* when the tests show for every fault that the canary is within the allowed tolerance: this is another
hypothesis with its own evidence, so the mere absence of a reason to abort is not enough. Otherwise the trial continues.

Outcomes are assumed to be independent given their version. Requests must therefore be observed in the order of their
starts (slow requests end late), and if a few callers send most of the traffic, `TrafficSplit` should use the session as
its key.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from maitred.core.rollout import RolloutVersion
from maitred.routing.rollout.sequential import MeanSequence, RateTest


class TrialDecision(StrEnum):
    """Decision on the canary."""

    CONTINUE = "continue"
    ABORT = "abort"
    PROMOTE = "promote"


class CanaryFault(StrEnum):
    """Fault that a canary can have."""

    TTFT = "ttft"
    ITL = "itl"
    ERRORS = "errors"
    REFUSALS = "refusals"
    WORDY = "wordy"
    TERSE = "terse"
    DISAGREEMENT = "disagreement"


class TrialTolerance(msgspec.Struct, frozen=True):
    """Tolerance of a rate: the allowed excess over the stable version, as a share of requests."""

    abort: float
    """Excess above which the canary is aborted."""
    promote: float
    """Excess below which the canary can be promoted; above `abort`."""


class TrialRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of a trial: the tolerances and error rates to which a canary is held."""

    false_alarms: float = 0.05
    """Probability that the trial aborts a canary that is equal to the stable version."""
    bad_promotions: float = 0.05
    """Probability that the trial promotes a canary that is worse than allowed."""
    slow_quantile: float = 0.95
    baseline_requests: int = 200
    """Number of requests of the stable version from which its percentile is taken."""
    least_requests: int = 100
    """Smallest number of requests of the canary before its promotion."""
    slow: TrialTolerance = TrialTolerance(0.01, 0.06)
    """Tolerance of the share of requests above the stable version's percentile.

    For the stable version itself that share is 5 %.
    """
    failed: TrialTolerance = TrialTolerance(0.0, 0.02)
    refused: TrialTolerance = TrialTolerance(0.0, 0.03)
    disagreeing: TrialTolerance | None = TrialTolerance(0.05, 0.12)
    """Tolerance of the share of disagreeing answers, or None if answers are not compared.

    Versions that use sampling always disagree in some answers.
    """
    length: TrialTolerance = TrialTolerance(0.1, 0.3)
    """Tolerance of the mean logarithm of tokens per answer; 0.1 means about 10 % more or less."""


class TrialObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Observation of one request that has ended.

    A value that was not measured is None, such as the times of a request that failed.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    """Mean time between the answer's tokens."""
    tokens: int | None = None
    """Number of tokens in the answer."""
    failed: bool = False
    refused: bool = False
    agreed: bool | None = None
    """Whether the answers of both versions agree, if both answered; part of the canary's observation."""
    copied: bool = False
    """Whether this is the canary's copy of a request that the stable version served.

    Copies run only on free capacity, so they are never refused, and their times do not count.
    """


class TrialResult(msgspec.Struct, frozen=True):
    """Result of a trial: the decision, and the reasons for it."""

    decision: TrialDecision
    faults: tuple[CanaryFault, ...] = ()
    """Faults that the evidence shows; each of them leads to an abort."""
    unproven: tuple[CanaryFault, ...] = ()
    """Faults whose absence the evidence does not show yet; they prevent a promotion."""
    stable_requests: int = 0
    canary_requests: int = 0


class CanaryTrial:
    """Trial of one canary.

    Args:
        rules: Rules of the trial.
    """

    def __init__(self, rules: TrialRules) -> None:
        self._rules = rules
        alpha = rules.false_alarms / len(CanaryFault)
        self._abort_threshold = math.log(1 / alpha)
        self._promote_threshold = math.log(1 / rules.bad_promotions)
        self._requests = dict.fromkeys(RolloutVersion, 0)
        self._rate_tests = {
            CanaryFault.TTFT: _RateTests(rules.slow),
            CanaryFault.ITL: _RateTests(rules.slow),
            CanaryFault.ERRORS: _RateTests(rules.failed),
            CanaryFault.REFUSALS: _RateTests(rules.refused),
        }
        if rules.disagreeing is not None:
            self._rate_tests[CanaryFault.DISAGREEMENT] = _RateTests(rules.disagreeing, standard=0.0)
        self._baselines = {
            fault: _BaselineQuantile(rules.baseline_requests, rules.slow_quantile)
            for fault in (CanaryFault.TTFT, CanaryFault.ITL)
        }
        # Longer and shorter answers are two separate faults.
        self._length_test = _LengthTest(rules.length, 2 * alpha, 2 * rules.bad_promotions)

    def observe(self, version: RolloutVersion, observation: TrialObservation) -> None:
        """Adds the observation of a request, in the order in which requests began."""
        self._requests[version] += 1
        if not observation.copied:
            self._rate_tests[CanaryFault.REFUSALS].add(version, observation.refused)
        if not observation.refused:
            self._rate_tests[CanaryFault.ERRORS].add(version, observation.failed)
        for fault, value in ((CanaryFault.TTFT, observation.ttft_s), (CanaryFault.ITL, observation.itl_s)):
            if value is not None and (above := self._baselines[fault].exceeds(version, value)) is not None:
                self._rate_tests[fault].add(version, above)
        if observation.tokens is not None:
            self._length_test.add(version, observation.tokens)
        if (
            observation.agreed is not None
            and version is RolloutVersion.CANARY
            and CanaryFault.DISAGREEMENT in self._rate_tests
        ):
            self._rate_tests[CanaryFault.DISAGREEMENT].add(version, not observation.agreed)

    def result(self) -> TrialResult:
        """Returns the result of the observations so far."""
        faults = [fault for fault, rate in self._rate_tests.items() if rate.worse.log_evidence >= self._abort_threshold]
        faults += self._length_test.faults()
        unproven = [
            fault for fault, rate in self._rate_tests.items() if rate.not_worse.log_evidence < self._promote_threshold
        ]
        unproven += self._length_test.unproven()
        if faults:
            decision = TrialDecision.ABORT
        elif unproven or self._requests[RolloutVersion.CANARY] < self._rules.least_requests:
            decision = TrialDecision.CONTINUE
        else:
            decision = TrialDecision.PROMOTE
        return TrialResult(
            decision,
            faults=tuple(faults),
            unproven=tuple(unproven),
            stable_requests=self._requests[RolloutVersion.STABLE],
            canary_requests=self._requests[RolloutVersion.CANARY],
        )

    def evidence(self) -> Mapping[CanaryFault, float]:
        """Returns the log evidence for each fault of a rate, divided by the log evidence that causes an abort."""
        return {fault: rate.worse.log_evidence / self._abort_threshold for fault, rate in self._rate_tests.items()}


class _RateTests:
    """Two tests of one rate: one shows that it is too high, the other that it is not."""

    def __init__(self, tolerance: TrialTolerance, standard: float | None = None) -> None:
        self.worse = RateTest(tolerance.abort, standard)
        # This is the same test for the opposite outcome: the outcome
        self.not_worse = RateTest(-tolerance.promote, None if standard is None else 1 - standard)

    def add(self, version: RolloutVersion, happened: bool) -> None:
        if version is RolloutVersion.STABLE:
            self.worse.add_stable(happened)
            self.not_worse.add_stable(not happened)
        else:
            self.worse.add_canary(happened)
            self.not_worse.add_canary(not happened)


class _BaselineQuantile:
    """Percentile of the stable version, available after enough requests."""

    def __init__(self, sample_count: int, quantile: float) -> None:
        self._sample_count = sample_count
        self._quantile = quantile
        self._samples: list[float] = []
        self._value: float | None = None

    def exceeds(self, version: RolloutVersion, value: float) -> bool | None:
        """Returns whether the value exceeds the percentile, or None while there is no percentile.

        The samples that determine the percentile are therefore not counted.
        """
        if self._value is not None:
            return value > self._value
        if version is RolloutVersion.STABLE:
            self._samples.append(value)
            if len(self._samples) == self._sample_count:
                self._samples.sort()
                self._value = self._samples[math.ceil(self._quantile * self._sample_count) - 1]
                self._samples.clear()
        return None


class _LengthTest:
    """Tests of the answer length: each canary answer is compared with the mean of the recent stable ones.

    The recent stable answers are those since the previous canary answer.
    """

    def __init__(self, tolerance: TrialTolerance, alpha: float, promote_alpha: float) -> None:
        self._tolerance = tolerance
        self._worse = MeanSequence(alpha)
        self._not_worse = MeanSequence(promote_alpha)
        self._stable_sizes: list[float] = []

    def add(self, version: RolloutVersion, tokens: int) -> None:
        size = math.log1p(tokens)
        if version is RolloutVersion.STABLE:
            self._stable_sizes.append(size)
        elif self._stable_sizes:
            difference = size - sum(self._stable_sizes) / len(self._stable_sizes)
            self._stable_sizes.clear()
            self._worse.add(difference)
            self._not_worse.add(difference)

    def faults(self) -> Sequence[CanaryFault]:
        low, high = self._worse.interval()
        margin = self._tolerance.abort
        return [*([CanaryFault.WORDY] if low > margin else []), *([CanaryFault.TERSE] if high < -margin else [])]

    def unproven(self) -> Sequence[CanaryFault]:
        low, high = self._not_worse.interval()
        margin = self._tolerance.promote
        return [*([CanaryFault.WORDY] if high > margin else []), *([CanaryFault.TERSE] if low < -margin else [])]
