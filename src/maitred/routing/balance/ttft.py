"""The policy that goes by when the first token would come."""

from collections.abc import Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.routing.balance.loads import ReplicaLoads
from maitred.routing.balance.round_robin import RoundRobinOrder

_ALIKE = 1.01
"""Costs that differ by less are equal: what tells them apart is noise, and it would send everything one way."""


class PredictedTtft:
    """Where the first token is predicted to come first, if what it takes from others is counted too.

    Two parts make up the prediction: what is before the request there, and its own prompt less what the replica holds
    of it. The wait is this request's alone. What is computed is paid by others as well: it delays those who come while
    the replica is busy, and its blocks displace what they might have found. So a second of computing counts as
    `recompute_price` seconds of waiting, and a replica that holds the prefix is chosen until the wait for it costs so
    many times what computing the prefix elsewhere would. At a price of 1 everybody goes where its own first token comes
    first, and in the end all wait longer for it (design/0010).

    Where not all can predict seconds, tokens to be computed take their place. Of costs that are alike, the least
    loaded replica is taken.

    Args:
        loads: Counts what is outstanding.
        recompute_price: Seconds of waiting that a second of computing is worth.
    """

    def __init__(self, loads: ReplicaLoads, recompute_price: float) -> None:
        self._loads = loads
        self._recompute_price = recompute_price
        self._order = RoundRobinOrder()

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """See `core.balance.Balance`."""
        costs = self._costs(inquiry, candidates)
        limit = _ALIKE * min(costs)
        alike = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost <= limit]
        return self._order.on_chosen(self._order.least(alike, self._loads.relative), len(candidates))

    def _costs(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> list[float]:
        """Wait and priced work at each, by weight; in seconds, or in tokens."""
        price = self._recompute_price
        seconds = [
            (candidate.wait_s + price * candidate.prefill_s) / candidate.weight
            for candidate in candidates
            if candidate.wait_s is not None and candidate.prefill_s is not None
        ]
        if len(seconds) == len(candidates):
            return seconds
        return [
            (candidate.prompt_tokens + price * max(0, inquiry.prompt_tokens - candidate.cached_tokens))
            / candidate.weight
            for candidate in candidates
        ]
