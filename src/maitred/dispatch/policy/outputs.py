"""Predicts output lengths from the last outputs of the same tenant.

Credits cover the prompt and the predicted output. A prediction that is too short causes preemptions; `max_tokens` would
leave the batch half empty, because most callers ask for much more than they get. The last output lengths are kept for
each tenant, and for all tenants together for tenants with too few samples. Each length is kept in tokens and as a ratio
to `max_tokens`; the representation with less spread is used. So tenants that always reach `max_tokens`, and tenants
with a constant length, are both predicted exactly.
"""

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from operator import mul

_MIN_TENANT_SAMPLES = 8
"""Number of samples from which on a tenant has its own prediction."""
_REFRESH_DIVISOR = 16
"""A history is recomputed once more than 1/16 of its samples are new."""


class _LengthHistory:
    """Last output lengths of one tenant, or of all, with statistics from the last refresh.

    Args:
        max_samples: Maximum number of samples.
    """

    __slots__ = ("_answers", "_max_samples", "as_ratio", "count", "lengths", "mean", "news", "quantile_length")

    def __init__(self, max_samples: int) -> None:
        self._answers: deque[tuple[int, float]] = deque(maxlen=max_samples)
        """Samples: length in tokens, and ratio to `max_tokens`."""
        self._max_samples = max_samples
        self.news = 0
        """Samples since the last refresh."""
        self.count = 0
        self.as_ratio = False
        """Whether the statistics are ratios to `max_tokens` instead of tokens."""
        self.lengths: Sequence[float] = ()
        """Lengths of the answers that were not empty, ascending."""
        self.quantile_length = 0.0
        """Predicted length: the one of `lengths` at the configured quantile."""
        self.mean = 0.0
        """Mean length of all answers, empty ones included."""

    def add(self, tokens: int, part: float) -> None:
        """Adds a sample and drops the oldest if the history is full."""
        self._answers.append((tokens, part))
        if self.count < self._max_samples:
            self.count += 1
        self.news += 1

    def refresh(self, quantile: float) -> None:
        """Recomputes the statistics; `quantile` selects the predicted length."""
        self.news = 0
        tokens, ratios = map(_MeanAndSpread, zip(*self._answers, strict=True))
        self.as_ratio = ratios.spread < tokens.spread
        chosen = ratios if self.as_ratio else tokens
        values = sorted(chosen.values)
        self.mean, self.lengths = chosen.mean, values[bisect_right(values, 0.0) :]
        self.quantile_length = _quantile(self.lengths, quantile) if self.lengths else 0.0

    @property
    def mean_tokens(self) -> float:
        """Returns the mean length of an answer."""
        return sum([tokens for tokens, _ in self._answers]) / self.count


class _MeanAndSpread:
    """Mean and spread of some values.

    Attributes:
        values: The values.
        mean: Mean of the values.
        spread: Standard deviation over mean.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self.mean = mean = sum(values) / len(values)
        variance = sum(map(mul, values, values)) / len(values) - mean * mean
        self.spread = math.sqrt(variance) / mean if mean and variance > 0.0 else 0.0


class OutputLengths:
    """Predictor of the output lengths of one model.

    Args:
        quantile: Quantile of the last lengths that is predicted.
        unknown_share: Share of `max_tokens` that is predicted before the first sample.
        tenants: Maximum number of tenants; the least recently seen are dropped.
        answers: Maximum number of samples per tenant; four times as many for all tenants.
    """

    def __init__(
        self, quantile: float = 0.8, unknown_share: float = 0.5, *, tenants: int = 1024, answers: int = 64
    ) -> None:
        self._quantile = quantile
        self._unknown_share = unknown_share
        self._max_tenants = tenants
        self._answers = answers
        self._tenants: OrderedDict[str, _LengthHistory] = OrderedDict()
        self._all = _LengthHistory(4 * answers)

    def reconfigure(self, quantile: float, unknown_share: float) -> None:
        """Applies new settings and keeps all samples."""
        self._quantile = quantile
        self._unknown_share = unknown_share
        for history in (*self._tenants.values(), self._all):
            if history.count:
                history.refresh(quantile)

    def __len__(self) -> int:
        """Number of tenants with samples."""
        return len(self._tenants)

    @property
    def mean(self) -> float | None:
        """Mean length of the last outputs of all tenants; None: no sample."""
        return self._all.mean_tokens if self._all.count else None

    def lengths(self, tenant: str, max_tokens: int) -> tuple[int, float]:
        """Predicts the output tokens of one choice: (length at the quantile, mean length).

        Credits use the first value, an integer of at least 1 if `max_tokens` is not 0; time predictions use the second.
        """
        history = self._history_for(tenant)
        if history is None:
            part = max_tokens * self._unknown_share
            return min(max_tokens, max(1, int(part))), min(float(max_tokens), max(1.0, part))
        unit = float(max_tokens) if history.as_ratio else 1.0
        length, mean = math.ceil(history.quantile_length * unit - 1e-6), history.mean * unit
        if 1 <= length <= max_tokens and 1.0 <= mean <= max_tokens:
            return length, mean
        return min(max(1, length), max_tokens), min(max(1.0, mean), float(max_tokens))

    def sample_remaining_tokens(
        self, tenant: str, produced: float, max_tokens: int, draws: Sequence[float]
    ) -> list[float]:
        """Returns samples of the remaining tokens of a choice.

        Args:
            tenant: Whose answer it is.
            produced: Tokens produced so far.
            max_tokens: Maximum output tokens of the choice.
            draws: Quantiles from 0 to 1 to sample. Evenly spread draws over several choices give realistic end times;
                means would all end late.
        """
        max_remaining = max_tokens - produced
        known = self._history_for(tenant)
        if known is None:
            return [max(1.0, min(max_remaining, max_tokens * self._unknown_share))] * len(draws)
        unit = float(max_tokens) if known.as_ratio else 1.0
        lengths = known.lengths
        first = bisect_right(lengths, produced / unit + 1e-6)
        if first == len(lengths):
            # The output is longer than every sample: assume a quarter of its current length remains.
            return [max(1.0, min(max_remaining, produced / 4))] * len(draws)
        return [max(1.0, min(max_remaining, _quantile(lengths, draw, first) * unit - produced)) for draw in draws]

    def observe(self, tenant: str, tokens: int, max_tokens: int) -> None:
        """Adds the length of a choice that completed normally. Do not call this for cancelled requests."""
        history = self._tenants.get(tenant)
        if history is None:
            if len(self._tenants) >= self._max_tenants:
                self._tenants.popitem(last=False)
            history = self._tenants[tenant] = _LengthHistory(self._answers)
        else:
            self._tenants.move_to_end(tenant)
        part = tokens / (max_tokens or 1)
        history.add(tokens, part)
        self._all.add(tokens, part)

    def _history_for(self, tenant: str) -> _LengthHistory | None:
        """Returns the history used for a tenant; None: no samples."""
        history = self._tenants.get(tenant)
        if history is None or history.count < _MIN_TENANT_SAMPLES:
            history = self._all
        if not history.count:
            return None
        if history.news * _REFRESH_DIVISOR > history.count:
            history.refresh(self._quantile)
        return history


def _quantile(lengths: Sequence[float], share: float, first: int = 0) -> float:
    """Returns a quantile of the sorted lengths from index `first` on."""
    count = len(lengths) - first
    return lengths[first + min(int(share * count), count - 1)]
