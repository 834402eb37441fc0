"""Flows that share the service of the replicas: every request belongs to one flow.

A flow is a path through the tenants, from the organisation down to the key. At each level, siblings share the service
of their parent in proportion to their weights, so a key that floods takes service from its own team first. In addition,
each request has one of four priority classes. This module only defines types; `maitred.fairness` makes the decisions
for the gateway's queue and for the engine's batch.
"""

from enum import StrEnum
from functools import cache

import msgspec

HIGHEST_PRIORITY = 10
LOWEST_PRIORITY = 1
SHARE_OF_FREE = 8
"""Dynamic threshold of shared places: how many an organisation may hold for each free place, and each level below it
for each that the level above may still hold. Whoever is alone holds eight ninths of them at most."""


class PriorityClass(StrEnum):
    """How urgent a request is, the most urgent first."""

    INTERACTIVE = "interactive"
    """A person waits for the answer."""
    STANDARD = "standard"
    BATCH = "batch"
    """A delay of minutes is acceptable."""
    BACKGROUND = "background"
    """The request runs when there is room; ageing guarantees that it runs eventually."""

    rank: int
    """Rank of the class, 0 for the most urgent."""
    priority: int
    """The highest priority number of this class."""


# These are attributes instead of properties, because they are read several times for every request.
for _rank, (_class, _highest) in enumerate(zip(PriorityClass, (10, 7, 4, 2), strict=True)):
    _class.rank, _class.priority = _rank, _highest


@cache
def priority_class_for(priority: int) -> PriorityClass:
    """Returns the priority class of a number from 1 (least urgent) to 10 (most urgent).

    10 to 8 are interactive, 7 to 5 standard, 4 and 3 batch, 2 and 1 background.
    """
    for name in reversed(PriorityClass):
        if priority <= name.priority:
            return name
    return PriorityClass.INTERACTIVE


class FlowLevel(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """One level of a flow's path."""

    id: str
    """Id of a tenant or of a key, unique among its siblings."""
    weight: float = 1.0
    """Share of the parent's service, relative to the siblings."""


class Flow(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """The owner and the priority class of a request."""

    path: tuple[FlowLevel, ...]
    """Levels from the organisation down to the key; at least one."""
    priority: PriorityClass = PriorityClass.STANDARD


ONE_FLOW = Flow((FlowLevel("*"),))
"""Default flow for components that do not distinguish callers."""


class QueuePosition(msgspec.Struct, frozen=True):
    """Position of a request in the queue, and its predicted times."""

    position: int
    """Number of requests that are expected to be dispatched before this one."""
    wait_s: float
    """Seconds from now until the dispatch to a replica."""
    ttft_s: float
    """Seconds from now until its first token."""


class ServiceWeights(msgspec.Struct, frozen=True, array_like=True):
    """Weights of service per prompt, cached and output token.

    *Service* is the cost of a request for the replicas as one number. Prompt tokens, cached tokens and output tokens
    cost very different amounts of work. Fair shares, queues and predictions use the weighted sum of the three. The
    weights are those of Sheng et al., OSDI'24 (VTC): an output token counts twice as much as a prompt token, because
    each output token needs its own step.
    """

    prompt: float = 1.0
    """Weight of a prompt token that must be computed."""
    cached: float = 0.1
    output: float = 2.0

    def service(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Returns the service of these tokens; `prompt_tokens` includes the cached ones."""
        return self.prompt * (prompt_tokens - cached_tokens) + self.cached * cached_tokens + self.output * output_tokens
