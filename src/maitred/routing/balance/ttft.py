"""Load balancing policy that uses the predicted time to first token."""

from collections.abc import Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.routing.balance.by_load import LoadScorer
from maitred.routing.balance.round_robin import RoundRobinOrder

_EQUAL_COST_FACTOR = 1.01
"""Factor within which costs count as equal.

Smaller differences are noise, and comparing them would send all requests to one replica.
"""


class PredictedTtft:
    """Policy that chooses the earliest first token, and also counts the cost to other requests.

    The prediction has two parts: the wait for earlier work at the replica, and the computation of the request's own
    prompt minus the part that the replica has cached. Only this request pays the wait. The computation is paid by
    others as well: it delays requests that come while the replica is busy, and its blocks displace blocks that others
    might have found. One second of computing therefore counts as `recompute_price` seconds of waiting, and a replica
    with the cached prefix is chosen until the wait for it exceeds `recompute_price` times the time of computing the
    prefix elsewhere. With a price of 1 each request goes where its own first token comes first, and in the end all
    requests wait longer (docs/design/0010).

    If not all replicas can predict seconds, the policy uses the number of tokens to compute. Among replicas with nearly
    equal costs, the policy takes the least loaded one.

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
        """Returns the wait plus the priced work at each replica, divided by its weight.

        The unit is seconds, or tokens if not all replicas can predict seconds.
        """
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
