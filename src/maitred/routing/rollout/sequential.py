"""Sequential tests: they can be checked after each observation and stopped at a decision; pure code.

An ordinary test is valid only for one sample size that was fixed before; a test that is repeated until it is
significant will always become significant in the end, even without a real difference. The tests here keep their error
bound under any rule for checking and stopping: *e-processes*, whose expected value stays at most 1 while the hypothesis
holds, so that they exceed 1/α with a probability of at most α (Ville's inequality); and a *confidence sequence*, which
contains the true value at all times with the given probability. See Johari, Koomen, Pekelis, Walsh, "Always Valid
Inference" (Operations Research, 2022), and Howard, Ramdas, McAuliffe, Sekhon, "Time-uniform, nonparametric,
nonasymptotic confidence sequences" (Annals of Statistics, 2021).
"""

import math

_BISECTIONS = 40
_PRIOR_COUNT = 1.0
"""Pseudo-observations of the estimates for bets: one half per outcome, as Krichevsky and Trofimov."""


class RateTest:
    """Evidence that an event is more frequent in the canary than in the stable version, beyond a margin.

    The hypothesis to be rejected: canary rate <= stable rate + margin. The test is that of Turner, Ly and Grünwald,
    "Generic E-variables for exact sequential k-sample tests" (Computational Statistics & Data Analysis, 2024): a block
    is one outcome a of the canary and the n of the stable version since the one before. With estimates s and c of both
    rates from the
    blocks before, and (q, q + margin) the pair on the border of the hypothesis that is nearest to them in
    Kullback-Leibler divergence of a block, the likelihood of the block under (s, c) over that under (q, q + margin) is
    an e-value, and their product the evidence. A bet is placed only where c > s + margin.

    The test is valid for any n that does not depend on the outcomes, for this reason: in expectation the n stable
    outcomes give (1 - k·x)^n and the canary outcome gives at most 1 + n·k·x, where x is the difference between the true
    stable rate and q, and k is a constant; the factors of x are equal because q is the nearest rate. Their product is
    at most e^(-nkx)·(1 + nkx) <= 1.

    With a negative margin the hypothesis says that the canary is better by that margin, and evidence against it shows
    that the canary is not. A fixed standard instead of the stable version, for rates that exist only for the canary, is
    the case n = 0. The test costs a few microseconds per block.

    Args:
        margin: Margin between the rates, from -1 to 1.
        standard: Fixed rate instead of the stable rate, or None if the stable rate is observed.

    Attributes:
        log_evidence: Natural logarithm of the evidence; at most log(1/α) with probability 1 - α while the hypothesis
            holds.
    """

    def __init__(self, margin: float, standard: float | None = None) -> None:
        self.log_evidence = 0.0
        self._margin = margin
        self._standard = standard
        self._stable_counts = [0, 0]
        """Number of outcomes, and number of outcomes with the event; without the current block."""
        self._canary_counts = [0, 0]
        self._block_counts = [0, 0]

    def add_stable(self, happened: bool) -> None:
        """Adds an outcome of the stable version."""
        self._block_counts[0] += 1
        self._block_counts[1] += happened

    def add_canary(self, happened: bool) -> None:
        """Adds an outcome of the canary, which closes the block."""
        count, hits = self._block_counts
        c = _estimate(self._canary_counts)
        if self._standard is not None:
            border = self._standard + self._margin
            if c > border:
                self.log_evidence += _log_ratio(happened, c, border)
        elif count and self._stable_counts[0]:
            s = _estimate(self._stable_counts)
            if c > s + self._margin:
                q = _nearest(s, c, count, self._margin)
                self.log_evidence += hits * math.log(s / q) + (count - hits) * math.log((1 - s) / (1 - q))
                self.log_evidence += _log_ratio(happened, c, q + self._margin)
        self._stable_counts[0] += count
        self._stable_counts[1] += hits
        self._canary_counts[0] += 1
        self._canary_counts[1] += happened
        self._block_counts = [0, 0]


class MeanSequence:
    """Confidence sequence for the mean of a series, valid at every length of the series at once.

    The method is the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform
    central limit theory and asymptotic confidence sequences" (Annals of Statistics, 2024), which is Robbins' normal
    mixture with an estimated variance. The sequence is valid only for long series, so it has infinite bounds for the
    first few dozen values.

    Args:
        alpha: Probability that the sequence ever excludes the true mean.
        tightest_at: Length of the series for which the sequence is as narrow as possible.
    """

    MIN_COUNT = 50
    """Number of observations before the interval has finite bounds."""

    def __init__(self, alpha: float, tightest_at: int = 500) -> None:
        self._alpha = alpha
        # This is the closed approximation of equation 10 of Waudby-Smith et al.
        spread = -2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1
        self._rho2 = spread / tightest_at
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Adds the next value of the series."""
        # This is Welford's algorithm.
        self._count += 1
        deviation = value - self._mean
        self._mean += deviation / self._count
        self._squares += deviation * (value - self._mean)

    def interval(self) -> tuple[float, float]:
        """Returns the lower and the upper bound of the mean; infinite while there are too few values."""
        if self._count < self.MIN_COUNT:
            return -math.inf, math.inf
        grown = self._count * self._rho2 + 1
        variance = self._squares / self._count
        log_term = math.log(math.sqrt(grown) / self._alpha)
        radius = math.sqrt(variance * 2 * grown / (self._count**2 * self._rho2) * log_term)
        return self._mean - radius, self._mean + radius


def _estimate(counts: list[int]) -> float:
    count, hits = counts
    return (hits + _PRIOR_COUNT / 2) / (count + _PRIOR_COUNT)


def _log_ratio(happened: bool, above: float, below: float) -> float:
    if not happened:
        above, below = 1 - above, 1 - below
    # A rate cannot exceed a border below 0 or above 1, so the outcome gives no evidence.
    return math.log(above / below) if 0 < below < 1 else 0.0


def _nearest(s: float, c: float, count: int, margin: float) -> float:
    """Returns the q for which count·KL(s, q) + KL(c, q + margin) is least.

    The derivative increases with q, so bisection finds its zero.
    """
    if margin == 0:
        return (count * s + c) / (count + 1)
    low, high = max(s, -margin), min(c - margin, 1.0)
    for _ in range(_BISECTIONS):
        q = (low + high) / 2
        r = q + margin
        if count * (q - s) / (q * (1 - q)) + (r - c) / (r * (1 - r)) > 0:
            high = q
        else:
            low = q
    return (low + high) / 2
