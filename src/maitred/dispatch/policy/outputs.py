"""How long an answer will be, before its first token: as long as most answers of this tenant were.

Credits are taken for the prompt and for this prediction. Too short, and sequences are preempted when the blocks run
out; `max_tokens`, and the batch stays half empty, for most callers ask for many times what they get. What is learnt is
a distribution over the last answers, of each tenant by itself, and of all tenants together for those who have sent too
few. It is kept twice, in tokens and as a part of `max_tokens`; what varies less is believed. So a tenant whose answers
always use all that they may is predicted exactly, and so is one whose answers always have the same length.
"""

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from operator import mul

_ENOUGH = 8
"""Answers of a tenant from which on it is judged by them alone."""
_NEWS = 16
"""A history is looked at again when one in so many of its answers is new: fewer hardly change what it says."""


class _History:
    """The last answers of somebody, and what they came to when it was looked at them last.

    Args:
        most: So many.
    """

    __slots__ = ("_answers", "_most", "count", "in_parts", "lengths", "mean", "most", "news")

    def __init__(self, most: int) -> None:
        self._answers: deque[tuple[int, float]] = deque(maxlen=most)
        """Each in tokens, and as a part of its `max_tokens`."""
        self._most = most
        self.news = 0
        """Answers since the last look."""
        self.count = 0
        self.in_parts = False
        """Whether all the others are parts of `max_tokens`, and not tokens: whichever varies less."""
        self.lengths: Sequence[float] = ()
        """Of answers that had any, the shortest first..."""
        self.most = 0.0
        """...one of them that is longer than most..."""
        self.mean = 0.0
        """...and the mean of all."""

    def add(self, tokens: int, part: float) -> None:
        """One more; the oldest may go."""
        self._answers.append((tokens, part))
        if self.count < self._most:
            self.count += 1
        self.news += 1

    def refresh(self, quantile: float) -> None:
        """Sees what they come to; `quantile` says what most is."""
        self.news = 0
        tokens, parts = _Moments([tokens for tokens, _ in self._answers]), _Moments([part for _, part in self._answers])
        self.in_parts = parts.spread < tokens.spread
        chosen = parts if self.in_parts else tokens
        values = sorted(chosen.values)
        self.mean, self.lengths = chosen.mean, values[bisect_right(values, 0.0) :]
        self.most = _quantile(self.lengths, quantile) if self.lengths else 0.0

    @property
    def mean_tokens(self) -> float:
        """Returns the mean length of an answer."""
        return sum([tokens for tokens, _ in self._answers]) / self.count


class _Moments:
    """Mean and spread of some values.

    Attributes:
        values: These.
        mean: Theirs.
        spread: Standard deviation over mean.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self.mean = mean = sum(values) / len(values)
        variance = sum(map(mul, values, values)) / len(values) - mean * mean
        self.spread = math.sqrt(variance) / mean if mean and variance > 0.0 else 0.0


class OutputLengths:
    """The lengths of one model's answers.

    Args:
        quantile: Of the last lengths, which one is predicted.
        unknown_share: Of `max_tokens`, before anything was seen.
        tenants: So many are remembered, those that were heard of last.
        answers: So many of each; the model as a whole has four times as many.
    """

    def __init__(
        self, quantile: float = 0.8, unknown_share: float = 0.5, *, tenants: int = 1024, answers: int = 64
    ) -> None:
        self._quantile = quantile
        self._unknown_share = unknown_share
        self._most_tenants = tenants
        self._answers = answers
        self._tenants: OrderedDict[str, _History] = OrderedDict()
        self._all = _History(4 * answers)

    def reconfigure(self, quantile: float, unknown_share: float) -> None:
        """Predicts by these from now on, from all that was seen before."""
        self._quantile = quantile
        self._unknown_share = unknown_share
        for history in (*self._tenants.values(), self._all):
            if history.count:
                history.refresh(quantile)

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._tenants)

    @property
    def mean(self) -> float | None:
        """Mean length of the last answers of all tenants; None before there was one."""
        return self._all.mean_tokens if self._all.count else None

    def lengths(self, tenant: str, max_tokens: int) -> tuple[int, float]:
        """Predicts the output of one choice, up to `max_tokens`: room for most, and the mean.

        The first, in whole tokens and at least 1 where anything may be generated, is what room is taken for; the second
        is for how long the work will take.
        """
        known = self._history_for(tenant)
        if known is None:
            part = max_tokens * self._unknown_share
            return min(max_tokens, max(1, int(part))), min(float(max_tokens), max(1.0, part))
        unit = float(max_tokens) if known.in_parts else 1.0
        most, mean = math.ceil(known.most * unit - 1e-6), known.mean * unit
        if 1 <= most <= max_tokens and 1.0 <= mean <= max_tokens:
            return most, mean
        return min(max(1, most), max_tokens), min(max(1.0, mean), float(max_tokens))

    def on_leave(self, tenant: str, produced: float, max_tokens: int, draws: Sequence[float]) -> list[float]:
        """Returns samples of the tokens still to come of a choice that has so many tokens.

        Args:
            tenant: Whose answer it is.
            produced: Tokens that have come.
            max_tokens: The most that can come.
            draws: From 0 to 1, which ones. Spread evenly over several answers these end as one after the other as
                real ones do; their means would all end late.
        """
        most = max_tokens - produced
        known = self._history_for(tenant)
        if known is None:
            return [max(1.0, min(most, max_tokens * self._unknown_share))] * len(draws)
        unit = float(max_tokens) if known.in_parts else 1.0
        lengths = known.lengths
        first = bisect_right(lengths, produced / unit + 1e-6)
        if first == len(lengths):
            # Longer than all that were seen: nobody knows, but what has lasted goes on lasting.
            return [max(1.0, min(most, produced / 4))] * len(draws)
        return [max(1.0, min(most, _quantile(lengths, draw, first) * unit - produced)) for draw in draws]

    def observe(self, tenant: str, tokens: int, max_tokens: int) -> None:
        """A choice came to its end by itself. What was cut short by its caller tells nothing."""
        history = self._tenants.get(tenant)
        if history is None:
            if len(self._tenants) >= self._most_tenants:
                self._tenants.popitem(last=False)
            history = self._tenants[tenant] = _History(self._answers)
        else:
            self._tenants.move_to_end(tenant)
        part = tokens / (max_tokens or 1)
        history.add(tokens, part)
        self._all.add(tokens, part)

    def _history_for(self, tenant: str) -> _History | None:
        """Whom it is judged by; None: nothing was seen."""
        history = self._tenants.get(tenant)
        if history is None or history.count < _ENOUGH:
            history = self._all
        if not history.count:
            return None
        if history.news * _NEWS > history.count:
            history.refresh(self._quantile)
        return history


def _quantile(lengths: Sequence[float], share: float, first: int = 0) -> float:
    """Returns a quantile of ordered lengths, from one of them on."""
    count = len(lengths) - first
    return lengths[first + min(int(share * count), count - 1)]
