"""Load balancing policies that use the outstanding load of each replica.

Load is counted in service (tokens by their weights, see `core.flow.ServiceWeights`), not in requests: one prompt of a
hundred thousand tokens is far more load than a hundred short ones.
"""

from collections.abc import Callable, Sequence

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.core.flow import ServiceWeights
from maitred.routing.balance.round_robin import RoundRobinOrder


class LoadScorer:
    """Scorer of the load of replicas and requests.

    Args:
        weights: Weights of service per token.
    """

    def __init__(self, weights: ServiceWeights) -> None:
        self._weights = weights

    def load(self, candidate: ReplicaCandidate) -> float:
        """Returns the service that is outstanding at the replica."""
        return self._weights.prompt * candidate.prompt_tokens + self._weights.output * candidate.output_tokens

    def load_by_weight(self, candidate: ReplicaCandidate) -> float:
        """Returns the outstanding service divided by the replica's weight."""
        return self.load(candidate) / candidate.weight

    def added_load(self, request: PlacementRequest, candidate: ReplicaCandidate) -> float:
        """Returns the service that the request would add to the replica; cached prompt tokens reduce it."""
        weights = self._weights
        cached = min(candidate.cached_tokens, request.prompt_tokens)
        uncached = request.prompt_tokens - cached
        return weights.prompt * uncached + weights.cached * cached + weights.output * request.output_tokens


class LeastRequests:
    """Policy that chooses the replica with the fewest outstanding requests, by weight."""

    def __init__(self) -> None:
        self._tie_breaker = RoundRobinOrder()

    def choose(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses the replica with the fewest requests. Implements `core.balance.LoadBalancer`."""
        # The count includes the request itself, so that among idle replicas the one with the greater weight comes
        # first.
        chosen = self._tie_breaker.pick_least(candidates, lambda candidate: (candidate.requests + 1) / candidate.weight)
        return self._tie_breaker.record_choice(chosen, len(candidates))


class LeastTokens:
    """Policy that chooses the replica with the least outstanding service, by weight.

    Args:
        load_scorer: Computes the outstanding service.
    """

    def __init__(self, load_scorer: LoadScorer) -> None:
        self._load_scorer = load_scorer
        self._tie_breaker = RoundRobinOrder()

    def choose(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses the replica with the least service. Implements `core.balance.LoadBalancer`."""
        chosen = self._tie_breaker.pick_least(candidates, self._load_scorer.load_by_weight)
        return self._tie_breaker.record_choice(chosen, len(candidates))


class PowerOfTwo:
    """Policy that draws two replicas and chooses the less loaded one.

    A choice between two is nearly as good as a choice among all (Mitzenmacher, 2001), and several gateways that read
    the same reports do not all choose the replica that had the least load when the reports were written.

    Args:
        load_scorer: Computes the outstanding service.
        draw: Draws a uniform random number from [0, 1).
    """

    def __init__(self, load_scorer: LoadScorer, draw: Callable[[], float]) -> None:
        self._load_scorer = load_scorer
        self._draw = draw

    def choose(self, request: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses the less loaded of two drawn replicas. Implements `core.balance.LoadBalancer`."""
        if len(candidates) == 1:
            return candidates[0]
        first = int(self._draw() * len(candidates))
        second = (first + 1 + int(self._draw() * (len(candidates) - 1))) % len(candidates)
        return min(candidates[first], candidates[second], key=self._load_scorer.load_by_weight)
