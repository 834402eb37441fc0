"""How long an answer will be, before its first token: as long as most answers of this tenant were.

Credits are taken for the prompt and for this prediction. Too short, and sequences are preempted when the blocks run
out; `max_tokens`, and the batch stays half empty, for most callers ask for many times what they get. What is learnt is
a distribution over the last answers, of each tenant by itself, and of all tenants together for those who have sent too
few. It is kept twice, in tokens and as a part of `max_tokens`; what varies less is believed. So a tenant whose answers
always use all that they may is predicted exactly, and so is one whose answers always have the same length.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence

_ENOUGH = 8
"""Answers of a tenant from which on it is judged by them alone."""
_RESORT = 16
"""Beyond so many new values it is not looked for the place of each."""


class _Recent:
    """The last values in order of time; they are put in order of size when somebody looks."""

    __slots__ = ("_by_size", "_most", "_news", "_squares", "_sum", "count", "values")

    def __init__(self, most: int) -> None:
        self.values: deque[float] = deque(maxlen=most)
        self.count = 0
        self._most = most
        self._by_size: list[float] = []
        """As of the last look."""
        self._news: list[tuple[float, float | None]] | None = None
        """What has come since then, each with the one that went; None: too many to look for the place of each."""
        self._sum = 0.0
        self._squares = 0.0

    @property
    def mean(self) -> float:
        return self._sum / self.count

    def add(self, value: float) -> None:
        values, oldest = self.values, None
        if self.count == self._most:
            oldest = values[0]
            self._sum -= oldest
            self._squares -= oldest * oldest
        else:
            self.count += 1
        values.append(value)
        self._sum += value
        self._squares += value * value
        if (news := self._news) is not None:
            news.append((value, oldest))
            if len(news) > _RESORT:
                self._news = None

    @property
    def spread(self) -> float:
        """Standard deviation over mean."""
        mean = self._sum / self.count
        variance = self._squares / self.count - mean * mean
        return math.sqrt(variance) / mean if mean and variance > 0.0 else 0.0

    def quantiles(self, shares: Sequence[float], *, beyond: float = 0.0) -> list[float]:
        """Of those that are larger than `beyond`; nothing if none is."""
        values = self._sorted()
        first = bisect_right(values, beyond)
        count = len(values) - first
        return [values[first + min(int(share * count), count - 1)] for share in shares] if count else []

    def _sorted(self) -> list[float]:
        by_size, news = self._by_size, self._news
        if news is None:
            by_size, self._news = sorted(self.values), []
            self._by_size = by_size
            return by_size
        for value, oldest in news:
            if oldest != value:
                if oldest is not None:
                    del by_size[bisect_left(by_size, oldest)]
                insort(by_size, value)
        news.clear()
        return by_size


class _History:
    """The last answers of somebody, in tokens and in parts of `max_tokens`."""

    __slots__ = ("parts", "tokens")

    def __init__(self, most: int) -> None:
        self.tokens = _Recent(most)
        self.parts = _Recent(most)

    def best(self, max_tokens: int) -> tuple[_Recent, float]:
        """What varies less, and the tokens that one of it stands for."""
        if self.parts.spread < self.tokens.spread:
            return self.parts, float(max_tokens)
        return self.tokens, 1.0


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

    def adopt(self, quantile: float, unknown_share: float) -> None:
        """Predicts by these from now on, from all that was seen before."""
        self._quantile = quantile
        self._unknown_share = unknown_share

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._tenants)

    @property
    def mean(self) -> float | None:
        """Of the last answers of all; None before there was one."""
        tokens = self._all.tokens
        return tokens.mean if tokens.count else None

    def lengths(self, tenant: str, max_tokens: int) -> tuple[int, float]:
        """What is predicted for one choice, up to `max_tokens`: room for most, and the mean.

        The first, in whole tokens and at least 1 where anything may be generated, is what room is taken for; the second
        is for how long the work will take.
        """
        known = self._known(tenant)
        if known is None:
            part = max_tokens * self._unknown_share
            return min(max_tokens, max(1, int(part))), min(float(max_tokens), max(1.0, part))
        recent, unit = known.best(max_tokens)
        lengths = recent.quantiles([self._quantile])
        most = max(1, math.ceil(lengths[0] * unit - 1e-6)) if lengths else 1
        return min(most, max_tokens), min(max(1.0, recent.mean * unit), float(max_tokens))

    def left(self, tenant: str, produced: float, max_tokens: int, draws: Sequence[float]) -> list[float]:
        """What is still to come of an answer that has so many tokens: as of some of those that got as far.

        Args:
            tenant: Whose answer it is.
            produced: Tokens that have come.
            max_tokens: The most that can come.
            draws: From 0 to 1, which ones. Spread evenly over several answers these end as one after the other as
                real ones do; their means would all end late.
        """
        most = max_tokens - produced
        known = self._known(tenant)
        if known is None:
            return [max(1.0, min(most, max_tokens * self._unknown_share))] * len(draws)
        recent, unit = known.best(max_tokens)
        lengths = recent.quantiles(draws, beyond=produced / unit + 1e-6)
        if not lengths:
            # Longer than all that were seen: nobody knows, but what has lasted goes on lasting.
            return [max(1.0, min(most, produced / 4))] * len(draws)
        return [max(1.0, min(most, length * unit - produced)) for length in lengths]

    def saw(self, tenant: str, tokens: int, max_tokens: int) -> None:
        """A choice came to its end by itself. What was cut short by its caller tells nothing."""
        history = self._tenants.get(tenant)
        if history is None:
            if len(self._tenants) >= self._most_tenants:
                self._tenants.popitem(last=False)
            history = self._tenants[tenant] = _History(self._answers)
        else:
            self._tenants.move_to_end(tenant)
        part = tokens / (max_tokens or 1)
        for each in (history, self._all):
            each.tokens.add(tokens)
            each.parts.add(part)

    def _known(self, tenant: str) -> _History | None:
        history = self._tenants.get(tenant)
        if history is not None and history.tokens.count >= _ENOUGH:
            return history
        return self._all if self._all.tokens.count else None
