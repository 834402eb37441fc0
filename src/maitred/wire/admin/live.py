"""Live state of a gateway, field by field.

Times of day are seconds since the Unix epoch, for charts.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.core.context import Outcome
from maitred.core.limits import LimitKind
from maitred.wire.admin.cache import CacheUseBody
from maitred.wire.admin.responses import ReplicaBody


class PathBody(Struct, frozen=True, kw_only=True):
    """Number of requests in each stage of processing."""

    arriving: Annotated[int, Meta(description="Read, identified, tokenised and admitted.")]
    queued: Annotated[int, Meta(description="Wait for credits of a replica.")]
    prefilling: Annotated[int, Meta(description="Sent to a replica; no token has come.")]
    decoding: Annotated[int, Meta(description="Are being answered.")]


class PointBody(Struct, frozen=True, kw_only=True):
    """Traffic in one second."""

    at: Annotated[float, Meta(description="Its end.")]
    waiting: int
    running: int
    ended: Annotated[dict[Outcome, int], Meta(description="Requests that ended in it, by outcome.")]
    prompt_tokens: int
    output_tokens: Annotated[int, Meta(description="Of requests that ended in it.")]
    ttft_s: Annotated[
        tuple[float, float] | None, Meta(description="Median and 95th percentile of ten seconds; null: none came.")
    ]
    itl_s: Annotated[tuple[float, float] | None, Meta(description="The same of times between tokens.")]


class HeadcountBody(Struct, frozen=True, kw_only=True):
    """Number of requests of one organisation for one model."""

    tenant: str
    waiting: int
    running: int


class QueueBody(Struct, frozen=True, kw_only=True):
    """State of the queue before the replicas of one model."""

    model: str
    waiting: Annotated[dict[str, int], Meta(description="By class, the most urgent first.")]
    predicted_wait_s: Annotated[dict[str, float], Meta(description="By class: what a newcomer would be told.")]
    running: int
    tenants: Annotated[list[HeadcountBody], Meta(description="Those with the most requests, most first.")]


class CreditBody(Struct, frozen=True, kw_only=True):
    """Credits of a replica: the free credits and all credits."""

    free: int
    total: int


class LiveReplicaBody(ReplicaBody, frozen=True, kw_only=True):
    """A replica with its credits."""

    credits: Annotated[dict[str, CreditBody], Meta(description="`slots`, and `kv_tokens` where it counts any.")]


class HeldBody(Struct, frozen=True, kw_only=True):
    """KV cache credit that the requests of one organisation at an engine have received."""

    tenant: str
    tokens: int


class EngineBody(Struct, frozen=True, kw_only=True):
    """State of the batch and the KV cache of one engine, from its last report."""

    model: str
    replica: str
    up: bool
    asleep: bool
    running: Annotated[int, Meta(description="Sequences in the batch.")]
    waiting: int
    paused: Annotated[int, Meta(description="Sequences whose readers have fallen behind.")]
    free_sequences: int
    step_tokens: Annotated[int, Meta(description="Tokens that the next step may compute.")]
    blocks: Annotated[int, Meta(description="Of KV cache, in all.")]
    block_tokens: int
    used_blocks: Annotated[int, Meta(description="That sequences hold, or pins.")]
    cached_blocks: Annotated[int, Meta(description="Free, and a later request may find its prefix in them.")]
    pinned_blocks: Annotated[int, Meta(description="Part of those that are used.")]
    held: Annotated[list[HeldBody], Meta(description="By organisation, most first.")]
    preemptions: int
    steps: int
    step_s: Annotated[float, Meta(description="Seconds spent in steps, in all.")]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class UseBody(Struct, frozen=True, kw_only=True):
    """Current use of one limit."""

    limit: Annotated[str, Meta(description="Its id.")]
    kind: LimitKind
    model: str | None
    hard: bool
    value: Annotated[float, Meta(description="Requests, tokens or dollars.")]
    used: Annotated[float, Meta(description="Spent or held, what running requests have reserved included.")]
    resets_in_s: float


class TenantUseBody(Struct, frozen=True, kw_only=True):
    """Activity of a tenant, and the use of its limits."""

    tenant: Annotated[str, Meta(description="`*`: everybody together.")]
    waiting: int
    running: int
    requests: Annotated[int, Meta(description="That ended since the gateway started; teams' among them.")]
    refused: int
    prompt_tokens: int
    output_tokens: int
    limits: list[UseBody]


class RefusalBody(Struct, frozen=True, kw_only=True):
    """Requests that were refused or failed for one reason, with a description of the last one."""

    at: float
    count: int
    request_id: str
    tenant: str
    model: str
    route: str
    status: int
    code: str
    message: str
    limit: Annotated[str, Meta(description="The kind of limit that refused it.")]
    retry_after_s: float | None


class FindingBody(Struct, frozen=True, kw_only=True):
    """Finding about one cause that delays requests; see `maitred doctor`."""

    kind: Annotated[str, Meta(description="Such as `kv_memory` or `upstream`.")]
    where: Annotated[str, Meta(description="Model, replica, tenant or process; empty: the server as a whole.")]
    weight: Annotated[float, Meta(description="The part of the work that suffers, from 0 to 1.")]
    summary: str
    evidence: list[str]
    remedy: str


class LiveBody(Struct, frozen=True, kw_only=True):
    """State of a gateway at one moment."""

    object: Literal["live"] = "live"
    at: float
    started_at: float
    version: str
    draining: bool
    stores: Annotated[dict[str, bool], Meta(description="Whether each store answers.")]
    path: PathBody
    point: Annotated[PointBody, Meta(description="The last whole second.")]
    queues: list[QueueBody]
    engines: list[EngineBody]
    replicas: list[LiveReplicaBody]
    tenants: Annotated[list[TenantUseBody], Meta(description="Those that are here, or were lately; busiest first.")]
    refusals: Annotated[list[RefusalBody], Meta(description="The last ones, newest first.")]
    cache: Annotated[CacheUseBody, Meta(description="Look-ups in the cache of answers.")] = CacheUseBody(
        lookups={}, saved_tokens=0
    )
    limits_known: Annotated[bool, Meta(description="Whether the counters could be asked.")] = True
    findings: Annotated[
        list[FindingBody] | None,
        Meta(description="What holds requests up, most important first; null until it was watched for some seconds."),
    ] = None
