"""Search for the batch size: which to try next, and which to use. Pure; its only state is the samples.

A larger batch gives more tokens per second until the processor is busy, because the weights are read once for the whole
batch; but each token takes longer. So sizes double from 1 until the time between tokens exceeds its objective, until
two doublings in a row give no gain, or until the largest allowed size. If the objective ends the search, the interval
between the last size that meets it and the first that does not is halved a few times.

A short disturbance of the machine must not decide. So the median of the samples of a size counts, the size that ends
the search is measured twice, and the gain must be too small twice in a row.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

Reason = Literal["objective", "plateau", "highest", "budget"]
"""Reason for the end: a larger batch misses the objective, gains nothing or is not allowed; or timeout."""

GAIN = 0.05
"""Share by which a doubling must raise the tokens per second to be worth its latency."""
PATIENCE = 2
"""Number of successive doublings without that gain that end the search."""
CONFIRM = 2
"""Number of trials of the size that ends the search."""
CLOSE = 1.2
"""Ratio of the sizes on both sides of the objective at which the search is close enough."""


class DecodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """Sample of decoding at one size.

    Attributes:
        sequences: Number of concurrent sequences.
        tokens_per_s: Generated tokens per second of all sequences.
        itl_p50_s, itl_p95_s: Time between two deliveries of tokens of a sequence.
    """

    sequences: int
    tokens_per_s: float
    itl_p50_s: float
    itl_p95_s: float


class BatchSizeResult(msgspec.Struct, frozen=True):
    """Result of all measurements of one size."""

    sequences: int
    trials: tuple[tuple[DecodeSample, ...], ...]
    """Trials of the size, at least one, with at least one sample each."""

    @property
    def samples(self) -> list[DecodeSample]:
        """Samples of all trials."""
        return [sample for trial in self.trials for sample in trial]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of all sequences: the median of the samples, as for the other values."""
        return statistics.median(sample.tokens_per_s for sample in self.samples)

    @property
    def step_s(self) -> float:
        """Median time between two tokens."""
        return statistics.median(sample.itl_p50_s for sample in self.samples)

    @property
    def itl_s(self) -> float:
        """Time that 95 % of the gaps between tokens stay below."""
        return statistics.median(sample.itl_p95_s for sample in self.samples)


class BatchGrowth:
    """Search for the largest batch that keeps an objective.

    Args:
        objective_s: Time that 95 % of the times between tokens must stay below.
        highest: Largest batch to try.
    """

    def __init__(self, *, objective_s: float, highest: int) -> None:
        if highest < 1:
            raise ValueError("A batch has at least one sequence.")
        self._objective_s = objective_s
        self._highest = highest
        self._trials: dict[int, list[tuple[DecodeSample, ...]]] = {}

    def record(self, sequences: int, samples: Sequence[DecodeSample]) -> None:
        """Records a trial of the size that `next_size` returned."""
        self._trials.setdefault(sequences, []).append(tuple(samples))

    @property
    def sizes(self) -> list[BatchSizeResult]:
        """Measured sizes, the smallest first."""
        return [BatchSizeResult(sequences, tuple(self._trials[sequences])) for sequences in sorted(self._trials)]

    def next_size(self) -> int | None:
        """Returns the next number of sequences; None: the search is over."""
        held, broken = self._held_sizes(), self._broken()
        if broken is not None:
            if len(broken.trials) < CONFIRM:
                return broken.sequences
            best = held[-1].sequences if held else 0
            middle = round(math.sqrt(best * broken.sequences))
            close = broken.sequences <= best * CLOSE or not best < middle < broken.sequences
            return None if close or not best else middle
        if not held:
            return 1
        last = held[-1]
        if self._flat(held):
            return last.sequences if len(last.trials) < CONFIRM else None
        return None if last.sequences == self._highest else min(last.sequences * 2, self._highest)

    @property
    def reason(self) -> Reason:
        """Reason why the search ended; ``budget`` while it has not ended."""
        if self.next_size() is not None:
            return "budget"
        if self._broken() is not None:
            return "objective"
        return "plateau" if self._flat(self._held_sizes()) else "highest"

    @property
    def best(self) -> BatchSizeResult | None:
        """Smallest size with nearly the best throughput within the objective; None: no size is within it."""
        held = self._held_sizes()
        enough = max((size.tokens_per_s for size in held), default=0.0) * (1 - GAIN)
        return next((size for size in held if size.tokens_per_s >= enough), None)

    def _broken(self) -> BatchSizeResult | None:
        """Smallest size that exceeds the objective."""
        return next((size for size in self.sizes if size.itl_s > self._objective_s), None)

    def _held_sizes(self) -> list[BatchSizeResult]:
        """Returns the sizes below the first that exceeded the objective."""
        broken = self._broken()
        return [size for size in self.sizes if broken is None or size.sequences < broken.sequences]

    def _flat(self, held: list[BatchSizeResult]) -> bool:
        if len(held) <= PATIENCE:
            return False
        before = max(size.tokens_per_s for size in held[:-PATIENCE])
        return max(size.tokens_per_s for size in held[-PATIENCE:]) < before * (1 + GAIN)
