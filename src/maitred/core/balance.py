"""Inputs for choosing a replica: dispatch provides the facts, and `routing` decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A request that needs a replica."""

    prompt_tokens: int
    output_tokens: float = 0.0
    """Predicted output tokens of all choices together."""
    session: str | None = None
    """Session name from the caller for related requests; names must differ between tenants."""


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    """A replica that can take the request now."""

    name: str
    """Name of the replica, constant during its lifetime."""
    weight: float = 1.0
    """Relative share of the load; a replica that has just returned starts with a small weight."""
    requests: int = 0
    """Number of requests that run or wait at the replica."""
    prompt_tokens: float = 0.0
    """Prompt tokens of these requests that are not computed yet."""
    output_tokens: float = 0.0
    """Output tokens of these requests that are still expected."""
    cached_tokens: int = 0
    """Leading tokens of the request's prompt that are in the replica's prefix cache."""
    wait_s: float | None = None
    """Predicted seconds until the prefill of this request starts there; None: unknown."""
    prefill_s: float | None = None
    """Predicted seconds for the prefill of the prompt tokens that are not in the cache."""


class LoadBalancer(Protocol):
    """Chooses the replica for each request."""

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses one of the candidates (at least one) and counts it as chosen."""
        ...


class CacheAwareBalancer(LoadBalancer, Protocol):
    """Load balancer that knows the prefix caches of its replicas."""

    def cached_tokens(self, scope: str, prompts: Sequence[Sequence[int]]) -> Mapping[str, int]:
        """Returns for each known replica how many leading prompt tokens its prefix cache holds.

        Args:
            scope: The cache scope; nothing is shared across scopes.
            prompts: Prompts of one request, as token ids.
        """
        ...

    def on_dispatch(self, name: str, capacity_tokens: int, scope: str, prompts: Sequence[Sequence[int]]) -> None:
        """Notes that a request was sent to a replica, whose prefix cache now holds its prompts.

        Args:
            name: Name of the replica.
            capacity_tokens: Total size of its prefix cache in tokens.
            scope: The cache scope.
            prompts: Prompts of the request, as token ids.
        """
        ...

    def on_restart(self, name: str) -> None:
        """Notes that a replica has restarted with an empty prefix cache."""
        ...
