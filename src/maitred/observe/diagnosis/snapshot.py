"""Snapshot of a server over a few seconds, in the terms of the rules: typed, and without metric names.

Gauges are means over all scrapes; counters are what was added between the first scrape and the last. The snapshot has
no judgements; those are in the rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayVitals:
    """Vitals of the gateway's process."""

    cpu_share: float = 0.0
    """Seconds of CPU in a second, of all its threads."""
    cpu_wait_share: float = 0.0
    """Seconds in a second that its threads were ready to run and got no core, added up."""
    loop_cpu_share: float = 0.0
    """Part of the time in which the event loop's thread ran."""
    loop_wait_share: float = 0.0
    """Part of the time in which the event loop's thread was ready to run and got no core."""
    open_fds: float = 0.0
    max_fds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVitals:
    """Vitals of one engine."""

    model: str
    replica: str
    up: float = 1.0
    """Part of the scrapes in which the engine was connected."""
    on_demand: bool = False
    """Whether the engine may be away while no request needs it."""
    restarts: float = 0.0
    busy_share: float = 0.0
    """Part of the time in which it computed steps."""
    steps: float = 0.0
    step_s: float = 0.0
    """Mean time of a step."""
    running: float = 0.0
    waiting: float = 0.0
    paused: float = 0.0
    kv_free_share: float = 1.0
    kv_capacity_tokens: float = 0.0
    preemptions: float = 0.0
    recomputed_tokens: float = 0.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0

    @property
    def computed_tokens(self) -> float:
        """Computed tokens of prompts and of responses."""
        return self.prefill_tokens + self.decode_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueVitals:
    """Vitals of the dispatch queue of one model."""

    model: str
    waiting: float = 0.0
    running: float = 0.0
    predicted_wait_s: float = 0.0
    """The longest of all classes."""
    dispatched: float = 0.0
    waited_s: Mapping[str, float] = field(default_factory=dict)
    """Cause -> how long the dispatched requests had waited for it."""
    rejected: Mapping[str, float] = field(default_factory=dict)
    """Rejected requests by reason."""
    free_slots: float = 0.0
    total_slots: float = 0.0
    free_kv_tokens: float = 0.0
    total_kv_tokens: float = 0.0

    @property
    def pressure(self) -> float:
        """Share of the requests that wait."""
        return self.waiting / (self.waiting + self.running) if self.waiting else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVitals:
    """Latencies of the requests for one model."""

    model: str
    answered: float = 0.0
    """Requests that got tokens."""
    prefill_s: float = 0.0
    """Mean time to first token, without the wait in the queue."""
    tpot_s: float = 0.0
    """Mean time per output token after the first."""
    first_token_within_s: float | None = None
    """Tightest objective for the time to first token; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamVitals:
    """Vitals of one upstream server."""

    model: str
    upstream: str
    up: float = 1.0
    open_requests: float = 0.0
    waiting: float = 0.0
    """Requests that wait in the server, as it reports."""
    kv_usage: float = 0.0
    breaker_open: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreVitals:
    """Vitals of the stores: database, counters and journal."""

    down: Mapping[str, float] = field(default_factory=dict)
    """Store -> part of the scrapes in which it did not answer; only stores that were away."""
    backlog: float = 0.0
    backlog_age_s: float = 0.0
    """Age of the oldest event in the backlog, at the last scrape."""
    leases_late: float = 0.0
    directory_age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthVitals:
    """Growth of a resource of a process at comparable load."""

    process: str
    resource: str
    per_hour: float
    trend: float
    """Agreement about the direction, from -1 to 1."""
    level: float
    """Current amount of the resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSnapshot:
    """Snapshot of a server over a few seconds."""

    seconds: float
    ended: float = 0.0
    """Ended requests to models."""
    stalled: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    """Failed requests by error code."""
    unserved: Mapping[str, float] = field(default_factory=dict)
    """Model -> requests that failed because nothing could run them."""
    limit_rejections: Mapping[str, float] = field(default_factory=dict)
    """Rejected requests by the kind of limit."""
    rejected_by_tenant: Mapping[str, float] = field(default_factory=dict)
    """Organisation -> its rejected requests, whatever the reason."""
    gateway: GatewayVitals = GatewayVitals()
    engines: Sequence[EngineVitals] = ()
    queues: Sequence[QueueVitals] = ()
    models: Sequence[ModelVitals] = ()
    upstreams: Sequence[UpstreamVitals] = ()
    stores: StoreVitals = StoreVitals()
    growth: Sequence[GrowthVitals] = ()
    reload_rejected: bool = False
    """Whether the last reload of the configuration was rejected."""
    pending_settings: float = 0.0
    """Settings that have changed and wait for a restart."""

    def engines_for(self, model: str) -> list[EngineVitals]:
        """Returns the engines that run a model."""
        return [engine for engine in self.engines if engine.model == model]
