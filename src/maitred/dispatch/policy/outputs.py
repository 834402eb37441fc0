"""How long an answer will be, before its first token: as long as most answers of this tenant were.

Credits are taken for the prompt and for this prediction. Too short, and sequences are preempted when the blocks run
out; `max_tokens`, and the batch stays half empty, for most callers ask for many times what they get. What is learnt is
a quantile of the last answers, of each tenant by itself, and of all tenants together for those who have sent too few.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque

_ENOUGH = 8
"""Answers of a tenant from which on it is judged by them alone."""


class _Recent:
    """The last lengths, in order of time and in order of size."""

    __slots__ = ("_by_size", "_by_time", "_most", "_sum")

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_time: deque[int] = deque()
        self._by_size: list[int] = []
        self._sum = 0

    def __len__(self) -> int:
        return len(self._by_time)

    @property
    def mean(self) -> float:
        return self._sum / len(self._by_time)

    def add(self, tokens: int) -> None:
        if len(self._by_time) == self._most:
            oldest = self._by_time.popleft()
            del self._by_size[bisect_left(self._by_size, oldest)]
            self._sum -= oldest
        self._by_time.append(tokens)
        insort(self._by_size, tokens)
        self._sum += tokens

    def quantile(self, share: float) -> int:
        return self._by_size[min(int(share * len(self._by_size)), len(self._by_size) - 1)]


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
        self._tenants: OrderedDict[str, _Recent] = OrderedDict()
        self._all = _Recent(4 * answers)

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._tenants)

    @property
    def mean(self) -> float | None:
        """Of the last answers of all; None before there was one."""
        return self._all.mean if len(self._all) else None

    def predict(self, tenant: str, max_tokens: int) -> int:
        """Tokens of one choice, from 1 to `max_tokens`."""
        recent = self._known(tenant)
        if recent is None:
            return max(1, int(max_tokens * self._unknown_share))
        return min(max(1, recent.quantile(self._quantile)), max_tokens)

    def expect(self, tenant: str, max_tokens: int) -> float:
        """The mean length instead of a safe one: for how long the work will take, not for the room that it needs."""
        recent = self._known(tenant)
        if recent is None:
            return max(1.0, max_tokens * self._unknown_share)
        return min(max(1.0, recent.mean), float(max_tokens))

    def saw(self, tenant: str, tokens: int) -> None:
        """A choice came to its end by itself. What was cut short by its caller tells nothing."""
        recent = self._tenants.get(tenant)
        if recent is None:
            if len(self._tenants) >= self._most_tenants:
                self._tenants.popitem(last=False)
            recent = self._tenants[tenant] = _Recent(self._answers)
        else:
            self._tenants.move_to_end(tenant)
        recent.add(tokens)
        self._all.add(tokens)

    def _known(self, tenant: str) -> _Recent | None:
        recent = self._tenants.get(tenant)
        if recent is not None and len(recent) >= _ENOUGH:
            return recent
        return self._all if len(self._all) else recent
