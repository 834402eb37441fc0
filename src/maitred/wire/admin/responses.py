"""Responses of the admin API; money is in dollars, times are ISO 8601 in UTC."""

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from maitred.core.limits import Limit, LimitKind
from maitred.core.replica import AdminStatus
from maitred.core.rollout import RolloutPhase
from maitred.core.tenancy import ApiKey, CacheDirective, Scope, Tenant
from maitred.core.usage import Feedback, FeedbackLabel, UsageEvent, to_usd
from maitred.wire.admin.times import to_iso


class TenantBody(Struct, frozen=True, kw_only=True):
    """Body of a tenant: an organisation, or a team of an organisation."""

    id: str
    object: Literal["tenant"] = "tenant"
    parent: str | None
    name: str
    weight: float
    models: list[str] | None
    priority_ceiling: int | None
    regions: list[str]
    tags: list[str]
    disabled: bool

    @classmethod
    def of(cls, tenant: Tenant) -> "TenantBody":
        """Builds the body of a tenant."""
        return cls(
            id=tenant.id,
            parent=tenant.parent,
            name=tenant.name,
            weight=tenant.weight,
            models=None if tenant.models is None else list(tenant.models),
            priority_ceiling=tenant.priority_ceiling,
            regions=list(tenant.regions),
            tags=list(tenant.tags),
            disabled=tenant.disabled,
        )


class SecretBody(Struct, frozen=True, kw_only=True):
    """Body of a key secret without its value, because the value is not stored."""

    expires_at: str | None


class KeyBody(Struct, frozen=True, kw_only=True):
    """Body of a key, without its secret."""

    id: str
    object: Literal["key"] = "key"
    tenant: str
    name: str
    scopes: list[Scope]
    expires_at: str | None
    revoked: bool
    cache_controls: Annotated[
        list[CacheDirective] | None,
        Meta(description="What its requests may say about answers from a cache; null: what the configuration allows."),
    ]
    secrets: Annotated[list[SecretBody], Meta(description="More than one while a key is rotated.")]
    key: Annotated[str | UnsetType, Meta(description="The key in full. It is shown this once and stored nowhere.")] = (
        UNSET
    )

    @classmethod
    def of(cls, key: ApiKey, now_s: float, plaintext: str | UnsetType = UNSET) -> "KeyBody":
        """Builds the body of a key, without its expired secrets."""
        active = [secret for secret in key.secrets if secret.expires_s is None or secret.expires_s > now_s]
        return cls(
            id=key.id,
            tenant=key.tenant,
            name=key.name,
            scopes=list(key.scopes),
            expires_at=_optional_iso(key.expires_s),
            revoked=key.revoked,
            cache_controls=None if key.cache_controls is None else list(key.cache_controls),
            secrets=[SecretBody(expires_at=_optional_iso(secret.expires_s)) for secret in active],
            key=plaintext,
        )


class LimitBody(Struct, frozen=True, kw_only=True):
    """Body of a limit of a tenant or key."""

    id: str
    object: Literal["limit"] = "limit"
    subject: str
    kind: LimitKind
    value: Annotated[int | float, Meta(description="Requests, tokens, or for `usd_…` dollars.")]
    model: str | None
    burst: int | None
    hard: bool

    @classmethod
    def of(cls, limit: Limit) -> "LimitBody":
        """Builds the body of a limit."""
        return cls(
            id=limit.id,
            subject=limit.subject,
            kind=limit.kind,
            value=to_usd(limit.value) if limit.kind.spend else limit.value,
            model=limit.model,
            burst=limit.burst,
            hard=limit.hard,
        )


class BudgetBody(Struct, frozen=True, kw_only=True):
    """Current state of one budget."""

    id: Annotated[str, Meta(description="Of the limit that sets it.")]
    object: Literal["budget"] = "budget"
    subject: Annotated[str, Meta(description="Whose it is; where a limit holds for each one, that one.")]
    kind: LimitKind
    model: str | None
    hard: bool
    limit_usd: float
    charged_usd: float
    reserved_usd: Annotated[float, Meta(description="Held by requests that run.")]
    remaining_usd: float
    resets_at: Annotated[str | None, Meta(description="When its window ends; null: never.")]


class UsageRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Usage sum of one group of requests; it has only the properties that were grouped by."""

    organisation: str | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    rollout: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    cache: Annotated[str | UnsetType, Meta(description="Empty: the answers were computed.")] = UNSET
    hour: str | UnsetType = UNSET
    day: str | UnsetType = UNSET
    month: str | UnsetType = UNSET
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_usd: float
    cache_hits: Annotated[
        int, Meta(description="Requests whose answers came from a cache; left out: there are none.")
    ] = 0
    saved_tokens: Annotated[
        int,
        Meta(description="Of these, prompt and output tokens, which were not computed; left out with `cache_hits`."),
    ] = 0
    rated: Annotated[int, Meta(description="Requests with feedback; left out: there are none.")] = 0
    mean_score: Annotated[float | None, Meta(description="Of these, from 0 to 1; left out with `rated`.")] = None


class UsageReport(Struct, frozen=True, kw_only=True):
    """Page of usage in one time range, in the order of the groups."""

    object: Literal["list"] = "list"
    start: str
    end: str
    group_by: list[str]
    data: list[UsageRow]
    has_more: bool
    next: str | None


class FeedbackBody(Struct, frozen=True, kw_only=True):
    """Feedback on the answer to a request."""

    score: float
    verdict: FeedbackLabel
    text: str
    tags: list[str]

    @classmethod
    def of(cls, feedback: Feedback) -> "FeedbackBody":
        """Builds the body of feedback."""
        return cls(score=feedback.score, verdict=feedback.verdict, text=feedback.text, tags=list(feedback.tags))


class UsageEventBody(Struct, frozen=True, kw_only=True):
    """Body of one ledger entry."""

    id: str
    object: Literal["usage_event"] = "usage_event"
    request_id: str
    time: str
    organisation: str
    tenant: str
    key: str
    model: str
    replica: str
    route: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cache_write_tokens: Annotated[int, Meta(description="Of the prompt, written into the server's prefix cache.")]
    price: str
    cost_usd: float
    ttft_s: float | None
    duration_s: float
    rollout: Annotated[str, Meta(description="The side of a rollout, such as `chat=canary`; empty: there is none.")]
    cache: Annotated[
        str,
        Meta(
            description="How a cache had the answer: `exact`, `coalesced` (with the same request of somebody else) or "
            "`semantic`; empty: it was computed."
        ),
    ]
    saved_tokens: Annotated[int, Meta(description="Prompt and output tokens of an answer from a cache.")]
    feedback: Annotated[FeedbackBody | None, Meta(description="Null: nobody gave any.")] = None

    @classmethod
    def of(cls, event: UsageEvent, feedback: Feedback | None) -> "UsageEventBody":
        """Builds the body of a ledger entry with the feedback on its request."""
        return cls(
            id=event.id,
            request_id=event.request_id,
            time=to_iso(event.time_s),
            organisation=event.organisation,
            tenant=event.tenant,
            key=event.key,
            model=event.model,
            replica=event.replica,
            route=event.route,
            outcome=event.outcome,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
            output_tokens=event.output_tokens,
            cache_write_tokens=event.cache_write_tokens,
            price=event.price,
            cost_usd=to_usd(event.cost_nusd),
            ttft_s=event.ttft_s,
            duration_s=event.duration_s,
            rollout=event.rollout,
            cache=event.cache,
            saved_tokens=event.saved_tokens,
            feedback=None if feedback is None else FeedbackBody.of(feedback),
        )


class SpanBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One span of a request's timeline."""

    name: str
    at_ms: Annotated[float, Meta(description="When it began, from the arrival of the request.")]
    took_ms: Annotated[float | None, Meta(description="Null: it had not ended when the request did.")]
    error: Annotated[str, Meta(description="The code of what it failed with; left out if it did not.")] = ""
    facts: Annotated[dict[str, Any], Meta(description="What was done, seen and decided, by name and unit.")] = {}
    inside: Annotated[list["SpanBody"], Meta(description="What took place within it.")] = []


class TimelineBody(Struct, frozen=True, kw_only=True):
    """Timeline of one request: its spans in order, and its result."""

    id: Annotated[str, Meta(description="As in its `x-request-id`.")]
    object: Literal["request"] = "request"
    trace_id: Annotated[str | None, Meta(description="Of the trace that it is part of; null: nobody traces.")]
    time: Annotated[str, Meta(description="When it ended.")]
    route: str
    organisation: str | None
    tenant: str | None
    key: str | None
    asked: Annotated[str | None, Meta(description="The model, as the client named it.")]
    model: Annotated[str | None, Meta(description="That answered, or was to.")]
    parameters: Annotated[dict[str, Any], Meta(description="That the client has set; never a prompt.")]
    priority: str | None
    outcome: str
    status: int
    error: str | None
    refused_by: Annotated[str | None, Meta(description="The kind of the limit that had no room for it.")]
    duration_ms: float
    ttft_ms: Annotated[float | None, Meta(description="From its arrival to its first token.")]
    waited_ms: Annotated[dict[str, float], Meta(description="By cause: at the gateway and in the engine.")]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: list[str]
    cost_usd: Annotated[float | None, Meta(description="Null: nothing was settled.")]
    degraded: list[str]
    fallbacks: list[str]
    escalated: list[str]
    recoveries: int
    cache: Annotated[str | None, Meta(description="What the cache of answers did for it; null: it was not looked up.")]
    rollout: str | None
    chapters: list[SpanBody]


class TimelineHead(Struct, frozen=True, kw_only=True):
    """Summary of a request that has a stored timeline."""

    id: str
    object: Literal["request"] = "request"
    time: str
    route: str
    organisation: str | None
    model: str | None
    outcome: str
    status: int
    duration_ms: float
    ttft_ms: float | None
    output_tokens: int


class TimelineList(Struct, frozen=True, kw_only=True):
    """List of the last requests, the latest first."""

    object: Literal["list"] = "list"
    data: list[TimelineHead]


class ReplicaBody(Struct, frozen=True, kw_only=True):
    """Body of a replica, from the view of this gateway."""

    object: Literal["replica"] = "replica"
    model: str
    replica: Annotated[str, Meta(description="Its name in the ledger: `local`, an address, or the name of a server.")]
    kind: Annotated[Literal["engine", "upstream"], Meta(description="An engine of maitred's, or a server of others.")]
    state: Annotated[
        AdminStatus,
        Meta(description="What it is to do: take requests, end those it has, or nothing at all."),
    ]
    ready: Annotated[bool, Meta(description="Whether a request would be sent there now.")]
    outage: Annotated[str | None, Meta(description="Why not, where it says so.")]
    requests: Annotated[int, Meta(description="Of this gateway's, that it has not ended. Drained: 0.")]
    sequences: Annotated[int | None, Meta(description="In its batch, of all gateways; null: it does not say.")]
    waiting_sequences: Annotated[int | None, Meta(description="That wait for a place in its batch.")]
    kv_free: Annotated[float | None, Meta(description="The part of its KV cache that is free.")]
    weight: Annotated[float, Meta(description="The part of its load that it gets; less while it comes back.")]
    region: Annotated[str | None, Meta(description="Where it is; null: nobody says.")]
    round_trip_ms: Annotated[
        float | None, Meta(description="The shortest of its last measured round trips; null: it is not measured.")
    ]


class ChangeBody(Struct, frozen=True, kw_only=True):
    """Body of a changed setting, with its old and new value."""

    setting: str
    before: Annotated[str | None, Meta(description="As in YAML, secrets as references; null: it was not there.")]
    after: str | None
    restart: Annotated[str | None, Meta(description="Why it waits for a restart; null: it does not.")]


class ReloadBody(Struct, frozen=True, kw_only=True):
    """Changes that a reload of the configuration has made, or would make."""

    object: Literal["config.reload"] = "config.reload"
    dry_run: bool
    changed: Annotated[list[ChangeBody], Meta(description="What is in force now, or would be.")]
    needs_restart: Annotated[list[ChangeBody], Meta(description="What has changed, and waits for a restart.")]
    seconds: float


class ConfigBody(Struct, frozen=True, kw_only=True):
    """Body of the current configuration."""

    object: Literal["config"] = "config"
    since: Annotated[float, Meta(description="When it was read, in seconds since 1970.")]
    settings: Annotated[str, Meta(description="YAML, with the origin of each setting; secrets as references.")]
    needs_restart: Annotated[list[ChangeBody], Meta(description="What has changed, and waits for a restart.")]
    fault: Annotated[str | None, Meta(description="Why the last reload was refused; null: it was not.")]


class ReplicaList(Struct, frozen=True, kw_only=True):
    """List of all replicas, without pages because there are only a few."""

    object: Literal["list"] = "list"
    data: list[ReplicaBody]


class PooledReplicaBody(Struct, frozen=True, kw_only=True):
    """Body of a replica that comes and goes."""

    replica: str
    phase: Annotated[
        str,
        Meta(description="`starting`, `waking`, `serving`, `draining`, `asleep`, `failed` or `maintenance`."),
    ]
    since_s: Annotated[float, Meta(description="Seconds since this phase began.")]
    ready_in_s: Annotated[float | None, Meta(description="Seconds until it should serve; null: it is not on its way.")]
    start_kind: Annotated[str, Meta(description="What there was when its last start began, such as `weights_cached`.")]
    start_s: Annotated[dict[str, float], Meta(description="Parts of its last complete start in seconds, by name.")]
    failure: Annotated[str | None, Meta(description="Why it does not run; it is started again by itself.")]


class PoolBody(Struct, frozen=True, kw_only=True):
    """Body of a model whose replicas come and go: how many are desired, and those that there are."""

    object: Literal["replica_pool"] = "replica_pool"
    model: str
    serving: Annotated[int, Meta(description="Replicas that are to serve.")]
    asleep: Annotated[int, Meta(description="Replicas that are to sleep, beyond those.")]
    ready_in_s: Annotated[float, Meta(description="Seconds until one serves if none does: what callers are told.")]
    replicas: list[PooledReplicaBody]


class AgentBody(Struct, frozen=True, kw_only=True):
    """Body of an agent, which owns engines on another machine."""

    object: Literal["agent"] = "agent"
    model: str
    agent: Annotated[str, Meta(description="Its name; `NAME-0` is a replica of it.")]
    address: Annotated[str | None, Meta(description="From where it has connected; null: it is away.")]
    region: Annotated[str, Meta(description="Empty: it tells none.")]
    zone: Annotated[str, Meta(description="Empty: it tells none.")]
    connected: bool
    takes_orders: Annotated[bool, Meta(description="Whether this gateway may start replicas there.")]
    fault: Annotated[str | None, Meta(description="Why it is rejected or gets no orders here, and what to do.")]
    gpus: Annotated[int, Meta(description="GPUs that its engines can use, as it tells.")]
    replicas: Annotated[int, Meta(description="Engines that it has, in any phase.")]
    max_replicas: Annotated[int, Meta(description="Most engines that it can have.")]
    pending_orders: Annotated[int, Meta(description="Starts and ends that it has not begun or completed.")]


class AgentList(Struct, frozen=True, kw_only=True):
    """List of all agents, at most 256, without pages."""

    object: Literal["list"] = "list"
    data: list[AgentBody]


class PoolList(Struct, frozen=True, kw_only=True):
    """List of all pools, without pages because there are only a few."""

    object: Literal["list"] = "list"
    data: list[PoolBody]


class WorkerBody(Struct, frozen=True, kw_only=True):
    """Body of a worker process, which handles HTTP for this gateway."""

    object: Literal["worker"] = "worker"
    worker: Annotated[int, Meta(description="Its number, from 1. Its successor has the same.")]
    pid: Annotated[int, Meta(description="Its process id.")]
    started_at: Annotated[str, Meta(description="ISO 8601, in UTC.")]
    leaving: Annotated[bool, Meta(description="Its successor is there, and it ends with the last of its answers.")]
    requests: Annotated[int, Meta(description="That wait or run, and were asked of it.")]


class WorkerList(Struct, frozen=True, kw_only=True):
    """List of all workers; the list is empty if the gateway is one process."""

    object: Literal["list"] = "list"
    data: list[WorkerBody]


class RolloutBody(Struct, frozen=True, kw_only=True):
    """Body of a rollout: the shared decision, and the observations of this gateway."""

    object: Literal["rollout"] = "rollout"
    name: str
    stable: str
    canary: str
    phase: Annotated[RolloutPhase, Meta(description="Only a `running` one is on trial.")]
    weight: Annotated[float, Meta(description="Share of the keys that the canary serves.")]
    shadow: Annotated[float, Meta(description="Share of the stable version's requests that are copied to it.")]
    regions: Annotated[list[str], Meta(description="Regions whose gateways take part; empty: everywhere.")]
    sticky: str
    automatic: str
    why: Annotated[str, Meta(description="The reason of the last change; empty: it began, or its shares were changed.")]
    changed_at: str
    stable_requests: Annotated[int, Meta(description="Of this trial, seen by this gateway.")]
    canary_requests: Annotated[int, Meta(description="The same; copies are among them.")]
    verdict: Annotated[str, Meta(description="What the trial says so far: `continue`, `abort` or `promote`.")]
    faults: Annotated[list[str], Meta(description="What is shown to be wrong with the canary.")]
    unproven: Annotated[list[str], Meta(description="What stands against a promotion still.")]
    evidence: Annotated[
        dict[str, float],
        Meta(description="How strongly each fault is suspected: 1 is enough for an abort, below 0 speaks against it."),
    ]


class RolloutList(Struct, frozen=True, kw_only=True):
    """List of all rollouts, without pages because there are only a few."""

    object: Literal["list"] = "list"
    data: list[RolloutBody]


class LoadableState(StrEnum):
    """State of a model that is loaded on demand."""

    OUT = "out"
    WAITING = "waiting"
    """A load of the model is requested and has not begun."""
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    """The model is in memory, gets no new requests, and is unloaded when its responses have ended."""
    UNLOADING = "unloading"
    ASLEEP = "asleep"
    """The model is not in memory, but its process still runs; waking it is much faster than loading it."""
    WAKING = "waking"
    HELD = "held"
    """The model is not in memory, and requests do not load it."""


class LoadableBody(Struct, frozen=True, kw_only=True):
    """A model that is loaded on demand."""

    object: Literal["loadable_model"] = "loadable_model"
    model: str
    state: LoadableState
    pinned: Annotated[bool, Meta(description="Never unloaded for others.")]
    held: Annotated[bool, Meta(description="Kept out of memory until it is loaded by hand.")]
    reserved_bytes: Annotated[int, Meta(description="What it counts while it is in memory: estimated, or measured.")]
    measured_bytes: Annotated[int | None, Meta(description="What its process takes; null: it has none.")]
    waiting: Annotated[int, Meta(description="Requests in its queue.")]
    running: Annotated[int, Meta(description="Requests that it answers.")]
    loads: Annotated[int, Meta(description="Since the gateway's start.")]
    unloads: int
    failures: Annotated[int, Meta(description="Loads that failed.")]
    idle_s: Annotated[float | None, Meta(description="Since it last had work; null: it never had any.")]
    predicted_load_s: Annotated[float, Meta(description="How long its next load should take.")]
    ready_in_s: Annotated[
        float | None,
        Meta(description="When it would serve a request that came now, with all loads before it; null: it is held."),
    ]


class LoadableList(Struct, frozen=True, kw_only=True):
    """List of all models that are loaded on demand, without pages because there are only a few."""

    object: Literal["list"] = "list"
    budget_bytes: Annotated[int | None, Meta(description="What they may take together; null: there are none.")]
    taken_bytes: Annotated[int, Meta(description="What those take that are in memory.")]
    data: list[LoadableBody]


class SleepState(StrEnum):
    """State of a model that can sleep."""

    AWAKE = "awake"
    DRAINING = "draining"
    """The model gets no new requests, and sleeps when its responses have ended."""
    ASLEEP = "asleep"
    WAKING = "waking"
    AWAY = "away"
    """No engine of the model is running, so none can sleep."""


class SleeperBody(Struct, frozen=True, kw_only=True):
    """A model whose engines can sleep."""

    object: Literal["sleeper"] = "sleeper"
    model: str
    state: SleepState
    engines: Annotated[int, Meta(description="That run it; they sleep together.")]
    measured_bytes: Annotated[
        int | None, Meta(description="What their processes take on this machine; null: they run elsewhere, or not.")
    ]
    wakes_in_s: Annotated[float, Meta(description="How long waking should take.")]


class SleeperList(Struct, frozen=True, kw_only=True):
    """List of all models whose engines can sleep."""

    object: Literal["list"] = "list"
    data: list[SleeperBody]


class PinBody(Struct, frozen=True, kw_only=True):
    """A prefix that stays in the KV caches of a model."""

    object: Literal["pin"] = "pin"
    id: str
    model: str
    tenant: Annotated[str, Meta(description="The organisation whose requests find it.")]
    name: str
    tokens: Annotated[int, Meta(description="Of the prefix; what fills no whole block at its end is not kept.")]
    expires_at: str
    replicas: Annotated[list[str], Meta(description="Whose engines have computed it, and have not been lost since.")]


class PinList(Struct, frozen=True, kw_only=True):
    """List of all pinned prefixes of this gateway."""

    object: Literal["list"] = "list"
    data: list[PinBody]


class Deleted(Struct, frozen=True, kw_only=True):
    """Confirmation of a deleted object."""

    id: str
    object: str
    deleted: bool = True


class TenantList(Struct, frozen=True, kw_only=True):
    """Page of tenants, in the order of their ids."""

    object: Literal["list"] = "list"
    data: list[TenantBody]
    has_more: bool
    next: str | None


class KeyList(Struct, frozen=True, kw_only=True):
    """Page of keys, in the order of their ids."""

    object: Literal["list"] = "list"
    data: list[KeyBody]
    has_more: bool
    next: str | None


class LimitList(Struct, frozen=True, kw_only=True):
    """Page of limits, in the order of their ids."""

    object: Literal["list"] = "list"
    data: list[LimitBody]
    has_more: bool
    next: str | None


class BudgetList(Struct, frozen=True, kw_only=True):
    """Page of budgets, in the order of subject and id."""

    object: Literal["list"] = "list"
    data: list[BudgetBody]
    has_more: bool
    next: str | None


class UsageEventList(Struct, frozen=True, kw_only=True):
    """Page of ledger entries, the newest first."""

    object: Literal["list"] = "list"
    data: list[UsageEventBody]
    has_more: bool
    next: str | None


_encoder = msgspec.json.Encoder()


def encode(body: Struct) -> bytes:
    """Encodes a body as JSON in UTF-8."""
    return _encoder.encode(body)


def _optional_iso(time_s: float | None) -> str | None:
    return None if time_s is None else to_iso(time_s)
