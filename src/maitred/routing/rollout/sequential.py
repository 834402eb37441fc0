"""Sequential tests: they may be looked at after every observation, and stopped as soon as they are decided. Pure.

An ordinary test is valid at one sample size that was fixed before; a test that is repeated until it is significant will
become significant, whatever the truth. The tests here keep their error under any rule for looking and stopping:
*e-processes*, whose value is expected to stay at most 1 while the hypothesis holds, so that it ever exceeds 1/α with
probability α at most (Ville's inequality); and a *confidence sequence*, which holds the truth at all times at once.
See Johari, Koomen, Pekelis, Walsh, "Always Valid Inference" (Operations Research, 2022), and Howard, Ramdas, McAuliffe,
Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences" (Annals of Statistics, 2021).
"""

import math

_BISECTIONS = 40
_PRIOR_COUNT = 1.0
"""Pseudo-observations of the estimates that bets are placed with: Krichevsky and Trofimov's half of each outcome."""


class RateTest:
    """Evidence that something happens more often in the canary than in the stable version, by more than a margin.

    The hypothesis to be rejected: canary rate <= stable rate + margin. The test is that of Turner, Ly and Grünwald,
    "Generic E-variables for exact sequential k-sample tests" (Computational Statistics & Data Analysis, 2024): a block
    is one outcome a of the canary and the n of the stable version since the one before. With estimates s and c of both
    rates from the
    blocks before, and (q, q + margin) the pair on the border of the hypothesis that is nearest to them in
    Kullback-Leibler divergence of a block, the likelihood of the block under (s, c) over that under (q, q + margin) is
    an e-value, and their product the evidence. A bet is placed only where c > s + margin.

    Why that is valid, for any n that does not depend on the outcomes: in expectation the n stable outcomes give
    (1 - k·x)^n and the canary's at most 1 + n·k·x, where x is how far the true stable rate lies above q and k a
    constant; the factors of x agree because q is the nearest. Their product is at most e^(-nkx)·(1 + nkx) <= 1.

    With a negative margin the hypothesis says that the canary is better by so much, and evidence against it that it is
    not. A fixed standard in place of the stable version, for rates that it has no counterpart of, is the case n = 0.
    Costs some microseconds per block.

    Args:
        margin: Margin between the rates, from -1 to 1.
        standard: Fixed rate in place of the stable one; None: the stable rate is observed.

    Attributes:
        log_evidence: Natural logarithm of the evidence; at most log(1/α) with probability 1 - α while the hypothesis
            holds.
    """

    def __init__(self, margin: float, standard: float | None = None) -> None:
        self.log_evidence = 0.0
        self._margin = margin
        self._standard = standard
        self._stable_counts = [0, 0]
        """Number of outcomes, and of those in which it happened; without the current block."""
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

    It is the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central
    limit theory and asymptotic confidence sequences" (Annals of Statistics, 2024), which is Robbins' normal mixture
    with the variance estimated. It is valid in the limit of long series, so it says nothing before the first few dozen.

    Args:
        alpha: Probability that it is ever wrong.
        tightest_at: The length for which it is made as narrow as it can be.
    """

    MIN_COUNT = 50
    """Observations before its interval is bounded."""

    def __init__(self, alpha: float, tightest_at: int = 500) -> None:
        self._alpha = alpha
        # Waudby-Smith et al., equation 10, in its closed approximation.
        spread = -2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1
        self._rho2 = spread / tightest_at
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Adds the next value of the series."""
        # Welford's algorithm.
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
    # A border beyond 0 or 1 cannot be exceeded, and nothing is learnt.
    return math.log(above / below) if 0 < below < 1 else 0.0


def _nearest(s: float, c: float, count: int, margin: float) -> float:
    """Returns the q for which count·KL(s, q) + KL(c, q + margin) is least.

    Its derivative grows, so bisection finds its zero.
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
