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


class _Recent:
    """The last values, in order of time and in order of size."""

    __slots__ = ("_by_size", "_by_time", "_most", "_squares", "_sum", "spread")

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_time: deque[float] = deque()
        self._by_size: list[float] = []
        self._sum = 0.0
        self._squares = 0.0
        self.spread = 0.0
        """Standard deviation over mean."""

    def __len__(self) -> int:
        return len(self._by_time)

    @property
    def mean(self) -> float:
        return self._sum / len(self._by_time)

    def add(self, value: float) -> None:
        if len(self._by_time) == self._most:
            oldest = self._by_time.popleft()
            del self._by_size[bisect_left(self._by_size, oldest)]
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._by_time.append(value)
        insort(self._by_size, value)
        self._sum += value
        self._squares += value * value
        mean = self.mean
        variance = max(0.0, self._squares / len(self._by_time) - mean * mean)
        self.spread = math.sqrt(variance) / mean if mean else 0.0

    def quantiles(self, shares: Sequence[float], *, beyond: float = 0.0) -> list[float]:
        """Of those that are larger than `beyond`; nothing if none is."""
        values = self._by_size
        first = bisect_right(values, beyond)
        count = len(values) - first
        return [values[first + min(int(share * count), count - 1)] for share in shares] if count else []


class _History:
    """The last answers of somebody, in tokens and in parts of `max_tokens`."""

    __slots__ = ("parts", "tokens")

    def __init__(self, most: int) -> None:
        self.tokens = _Recent(most)
        self.parts = _Recent(most)

    def add(self, tokens: int, max_tokens: int) -> None:
        self.tokens.add(tokens)
        self.parts.add(tokens / max(1, max_tokens))

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
        return self._all.tokens.mean if len(self._all.tokens) else None

    def predict(self, tenant: str, max_tokens: int) -> int:
        """Tokens of one choice, from 1 to `max_tokens`: room for most. 0 where nothing is generated."""
        known = self._known(tenant)
        if known is None:
            return min(max_tokens, max(1, int(max_tokens * self._unknown_share)))
        recent, unit = known.best(max_tokens)
        lengths = recent.quantiles([self._quantile])
        return min(max(1, math.ceil(lengths[0] * unit - 1e-6) if lengths else 0), max_tokens)

    def expect(self, tenant: str, max_tokens: int) -> float:
        """The mean length instead of a safe one: for how long the work will take, not for the room that it needs."""
        known = self._known(tenant)
        if known is None:
            return min(float(max_tokens), max(1.0, max_tokens * self._unknown_share))
        recent, unit = known.best(max_tokens)
        return min(max(1.0, recent.mean * unit), float(max_tokens))

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
        history.add(tokens, max_tokens)
        self._all.add(tokens, max_tokens)

    def _known(self, tenant: str) -> _History | None:
        history = self._tenants.get(tenant)
        if history is not None and len(history.tokens) >= _ENOUGH:
            return history
        return self._all if len(self._all.tokens) else None
