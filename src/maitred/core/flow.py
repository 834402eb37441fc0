"""Flows, which share the service of the replicas: every request belongs to one.

A flow is a path through the tenants, from the organisation down to the key. At each level siblings share what their
parent got by their weights, so one key that floods takes from its own team first. Across all of it stand four classes
of urgency. Nothing here decides anything: `maitred.fairness` does, for the gateway's queue and for the engine's batch.
"""

from enum import StrEnum
from functools import cache

import msgspec

HIGHEST_PRIORITY = 10
LOWEST_PRIORITY = 1


class PriorityClass(StrEnum):
    """How urgent a request is, the most urgent first."""

    INTERACTIVE = "interactive"
    """Somebody is looking at the screen."""
    STANDARD = "standard"
    BATCH = "batch"
    """Minutes do not matter."""
    BACKGROUND = "background"
    """Runs when there is room; ageing sees to it that there is, in the end."""

    rank: int
    """0 for the most urgent."""
    priority: int
    """The highest number that means this class."""


# Attributes, and not properties: every request is asked for them several times.
for _rank, (_class, _highest) in enumerate(zip(PriorityClass, (10, 7, 4, 2), strict=True)):
    _class.rank, _class.priority = _rank, _highest


@cache
def priority_class_for(priority: int) -> PriorityClass:
    """The class that a number from 1 (least urgent) to 10 (most) stands for.

    10 to 8 are interactive, 7 to 5 standard, 4 and 3 batch, 2 and 1 background.
    """
    for name in reversed(PriorityClass):
        if priority <= name.priority:
            return name
    return PriorityClass.INTERACTIVE


class FlowLevel(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """One level of a flow's path."""

    id: str
    """Unique among its siblings: the id of a tenant or of a key."""
    weight: float = 1.0
    """Of what the level above gets, relative to its siblings."""


class Flow(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """Whose request it is, and how urgent."""

    path: tuple[FlowLevel, ...]
    """From the organisation down to the key; at least one."""
    priority: PriorityClass = PriorityClass.STANDARD


ONE_FLOW = Flow((FlowLevel("*"),))
"""For whoever does not tell callers apart."""


class QueuePosition(msgspec.Struct, frozen=True):
    """Where a request stands in the queue, and what is predicted for it."""

    position: int
    """Requests that are expected to be released before it."""
    wait_s: float
    """From now until it is released to a replica."""
    ttft_s: float
    """From now until its first token."""


class ServiceWeights(msgspec.Struct, frozen=True, array_like=True):
    """Weights of service per prompt, cached and output token.

    *Service* is what a request costs the replicas, in one number. A token of the prompt, one that was found in the
    cache, and one that was generated cost very different amounts of work. Fair shares, queues and predictions count
    their weighted sum. The weights are those of Sheng et al., OSDI'24 (VTC): an output token counts twice a prompt
    token, because it takes a step of its own.
    """

    prompt: float = 1.0
    """That had to be computed."""
    cached: float = 0.1
    output: float = 2.0

    def service(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """The service of so many tokens; `prompt_tokens` includes the cached ones."""
        return self.prompt * (prompt_tokens - cached_tokens) + self.cached * cached_tokens + self.output * output_tokens
