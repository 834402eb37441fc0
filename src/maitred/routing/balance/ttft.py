"""Load balancing policy that goes by the predicted time to first token."""

from collections.abc import Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.routing.balance.by_load import LoadScorer
from maitred.routing.balance.round_robin import RoundRobinOrder

_EQUAL_COST_FACTOR = 1.01
"""Factor within which costs count as equal.

Smaller differences are noise, and would send all requests to one replica.
"""


class PredictedTtft:
    """Policy that chooses the earliest first token, with the cost to other requests counted in.

    The prediction has two parts: the work before the request at the replica, and the request's own prompt less what the
    replica has cached of it. The wait is this request's alone. The computation is paid by others as well: it delays
    requests that come while the replica is busy, and its blocks displace blocks that others might have found. So a
    second of computing counts as `recompute_price` seconds of waiting, and a replica with the cached prefix is chosen
    until the wait for it costs so many times what computing the prefix elsewhere would. At a price of 1 every request
    goes where its own first token comes first, and in the end all wait longer for it (design/0010).

    Where not all replicas can predict seconds, tokens to be computed take their place. Of costs that are nearly equal,
    the least loaded replica is taken.

    Args:
        load_scorer: Computes the outstanding service.
        recompute_price: Seconds of waiting that a second of computing is worth.
    """

    def __init__(self, load_scorer: LoadScorer, recompute_price: float) -> None:
        self._load_scorer = load_scorer
        self._recompute_price = recompute_price
        self._tie_breaker = RoundRobinOrder()

    def choose(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses the least loaded of the cheapest replicas. Implements `core.balance.LoadBalancer`."""
        costs = self._costs(request, candidates)
        limit = _EQUAL_COST_FACTOR * min(costs)
        near_cheapest = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost <= limit]
        return self._tie_breaker.record_choice(
            self._tie_breaker.pick_least(near_cheapest, self._load_scorer.load_by_weight), len(candidates)
        )

    def _costs(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> list[float]:
        """Returns the wait and the priced work at each replica, by weight; in seconds, or in tokens."""
        price = self._recompute_price
        seconds = [
            (candidate.wait_s + price * candidate.prefill_s) / candidate.weight
            for candidate in candidates
            if candidate.wait_s is not None and candidate.prefill_s is not None
        ]
        if len(seconds) == len(candidates):
            return seconds
        return [
            (candidate.prompt_tokens + price * max(0, request.prompt_tokens - candidate.cached_tokens))
            / candidate.weight
            for candidate in candidates
        ]
