"""How much a replica has to do.

Load is counted in service (tokens by what they cost, see `dispatch.service`), not in requests: one prompt of a hundred
thousand tokens is no match for a hundred short ones.
"""

from maitred.core.balance import PlacementRequest, ReplicaCandidate
from maitred.core.flow import ServiceWeights


class ReplicaLoads:
    """Counts load.

    Args:
        weights: What tokens count.
    """

    def __init__(self, weights: ServiceWeights) -> None:
        self._weights = weights

    def load(self, candidate: ReplicaCandidate) -> float:
        """The service that is outstanding there."""
        return self._weights.prompt * candidate.prompt_tokens + self._weights.output * candidate.output_tokens

    def relative(self, candidate: ReplicaCandidate) -> float:
        """The same by weight."""
        return self.load(candidate) / candidate.weight

    def added(self, inquiry: PlacementRequest, candidate: ReplicaCandidate) -> float:
        """What the request would add to it there: less where its prompt is held."""
        weights = self._weights
        held = min(candidate.cached_tokens, inquiry.prompt_tokens)
        fresh = inquiry.prompt_tokens - held
        return weights.prompt * fresh + weights.cached * held + weights.output * inquiry.output_tokens
