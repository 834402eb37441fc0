"""Facts that the choice among a model's replicas goes by; dispatch knows them, and `routing` decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A request that is to be placed."""

    prompt_tokens: int
    output_tokens: float = 0.0
    """That are predicted, of all its choices."""
    session: str | None = None
    """What the caller names for requests that belong together; those of another tenant must have another name."""


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    """A replica that could take it now."""

    name: str
    """The same for as long as the replica lives."""
    weight: float = 1.0
    """How much of the load it should have beside the others; a replica that comes back begins with little."""
    requests: int = 0
    """That were sent there and have not ended."""
    prompt_tokens: float = 0.0
    """Of these, that are still to be computed."""
    output_tokens: float = 0.0
    """Of these, that are still expected."""
    cached_tokens: int = 0
    """Leading tokens of the request's prompt that it holds already."""
    wait_s: float | None = None
    """Predicted, until the request's own prompt is begun there; None: nobody can tell."""
    prefill_s: float | None = None
    """Predicted, for the prompt less what is held."""


class LoadBalancer(Protocol):
    """Decides where a request goes."""

    def choose(self, inquiry: PlacementRequest, candidates: Sequence[ReplicaCandidate]) -> ReplicaCandidate:
        """Chooses one of the candidates, of which there is at least one, and counts it as chosen."""
        ...


class CacheAwareBalancer(LoadBalancer, Protocol):
    """Load balancer that knows the prefix caches of its replicas."""

    def cached_tokens(self, scope: str, prompts: Sequence[Sequence[int]]) -> Mapping[str, int]:
        """For each replica that is followed, how many leading tokens of the prompts it holds.

        Args:
            scope: The cache scope; nothing is shared across scopes.
            prompts: Of one request.
        """
        ...

    def on_dispatch(self, name: str, capacity_tokens: int, scope: str, prompts: Sequence[Sequence[int]]) -> None:
        """A request was sent to a replica, which holds its prompts from now on, as long as it has room.

        Args:
            name: The replica.
            capacity_tokens: What its cache holds in all.
            scope: The cache scope.
            prompts: Of the request.
        """
        ...

    def on_restart(self, name: str) -> None:
        """A replica has started anew and holds nothing."""
        ...
