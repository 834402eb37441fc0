"""When a request will be released, and when its first token will come.

**The wait.** A request is released when what is ahead of it has been released and places for itself are free. In a full
replica places come free as fast as service is done: a replica that does `R` service per second finishes requests of
`S` service each at the rate `R / S`. What is ahead needs places for its own service, less what is free already; so the
wait is that service over `R`, and half a request's more for the place that comes free next.

**The prefill.** A released request is computed in the engine's next steps, each of which takes at most so many tokens:
first what runs there (a token for each sequence), then the prompts before it, then its own. The engine's model of its
step times says how long such steps take; on average half a step passes before the first.

Costs O(1), for it is asked for every request that arrives, also by those who are refused.
"""

import math
from dataclasses import dataclass

from maitred.core.ports import LoadReport
from maitred.dispatch.policy.credits import Cost


@dataclass(frozen=True, slots=True)
class Queue:
    """What a request would find before it."""

    entries: int
    service: float
    free: Cost
    """Places that it may use; below zero when the engine is overcommitted."""
    service_per_place: float
    """Of a typical request."""
    blocks_per_place: float
    per_s: float | None
    """Service per second; None: unknown."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Until a request is released."""

    at_once: bool
    """There is a place for it, and nobody has to have one first."""
    seconds: float
    """0 also where nobody can tell."""


AT_ONCE = Wait(True, 0.0)


def wait_of(queue: Queue, own: Cost) -> Wait:
    """When a request is released that needs so much."""
    lacking_slots = queue.entries + own.slots - queue.free.slots
    lacking_blocks = queue.entries * queue.blocks_per_place + own.blocks - queue.free.blocks
    lacking = max(lacking_slots, lacking_blocks / max(1.0, queue.blocks_per_place))
    if lacking <= 0:
        return AT_ONCE
    if not queue.per_s:
        return Wait(False, 0.0)
    # Those ahead are known by their own service, and need not be as long as the typical ones that run now. The places
    # that are free now are theirs first.
    ahead = queue.service * min(1.0, lacking / queue.entries) if queue.entries else 0.0
    own_place = queue.service_per_place * min(lacking, max(1, own.slots))
    return Wait(False, (ahead + own_place / 2) / queue.per_s)


def prefill_of(load: LoadReport, prompt_tokens: float, before_tokens: float, block_tokens: int) -> float:
    """Seconds from the release of a request until its first token; 0 before the engine has measured its steps.

    Args:
        load: The last report.
        prompt_tokens: Of the request, as far as they have to be computed.
        before_tokens: Prompt tokens that are released before it and are in no report yet.
        block_tokens: Of one KV block.
    """
    times = load.times
    decoding = load.running
    to_compute = prompt_tokens + before_tokens + load.waiting_prompt_tokens
    room = max(1, load.step_tokens - decoding) if load.step_tokens else math.inf
    steps = max(1, math.ceil(to_compute / room))
    context = (load.total_blocks - load.free_blocks) * block_tokens
    decodes_s = times.decoding(decoding, context)
    own_s = times.chunk_s + times.pair_s * prompt_tokens * prompt_tokens / 2
    # The step that is under way now ends on average in half its time.
    begun_s = decodes_s / 2 if decoding else 0.0
    return begun_s + steps * decodes_s + times.token_s * to_compute + own_s
