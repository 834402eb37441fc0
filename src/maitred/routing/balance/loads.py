"""Load of a replica, in units of service.

Load is counted in service (tokens by their weights, see `core.flow.ServiceWeights`), not in requests: one prompt of a
hundred thousand tokens is far more load than a hundred short ones.
"""

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.core.flow import ServiceWeights


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
        """Returns the service that the request would add to the replica: less where its prompt is cached."""
        weights = self._weights
        cached = min(candidate.cached_tokens, request.prompt_tokens)
        uncached = request.prompt_tokens - cached
        return weights.prompt * uncached + weights.cached * cached + weights.output * request.output_tokens
