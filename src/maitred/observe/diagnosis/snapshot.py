"""What a server did during a few seconds, in the terms that rules need: typed, and without names of metrics.

Gauges are means over all looks, counters what was added between the first look and the last. Nothing here is a
judgement; those are in the rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayVitals:
    """The gateway's process."""

    cpu_share: float = 0.0
    """Seconds of CPU in a second, of all its threads."""
    cpu_wait_share: float = 0.0
    """Seconds in a second that its threads were ready to run and got no core, added up."""
    loop_cpu_share: float = 0.0
    """Of the thread that has the event loop: the part of the time in which it ran..."""
    loop_wait_share: float = 0.0
    """...and in which it was ready to run and got no core."""
    open_fds: float = 0.0
    max_fds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVitals:
    """One engine."""

    model: str
    replica: str
    up: float = 1.0
    """Part of the looks at which it was there."""
    on_demand: bool = False
    """Whether it may be away as long as nobody asks for it."""
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
        """Of prompts and of answers."""
        return self.prefill_tokens + self.decode_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueVitals:
    """The queue of one model in the gateway."""

    model: str
    waiting: float = 0.0
    running: float = 0.0
    predicted_wait_s: float = 0.0
    """The longest of all classes."""
    released: float = 0.0
    waited_s: Mapping[str, float] = field(default_factory=dict)
    """Cause -> what those that were released had waited for it."""
    refused: Mapping[str, float] = field(default_factory=dict)
    """By reason."""
    free_slots: float = 0.0
    total_slots: float = 0.0
    free_kv_tokens: float = 0.0
    total_kv_tokens: float = 0.0

    @property
    def pressure(self) -> float:
        """Part of the requests that wait."""
        return self.waiting / (self.waiting + self.running) if self.waiting else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVitals:
    """What requests for one model got."""

    model: str
    answered: float = 0.0
    """That got tokens."""
    prefill_s: float = 0.0
    """Mean time to the first token, without what they waited in our queue."""
    tpot_s: float = 0.0
    """Mean time per token behind the first."""
    first_token_within_s: float | None = None
    """The tightest objective for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamVitals:
    """A server of somebody else's."""

    model: str
    upstream: str
    up: float = 1.0
    open_requests: float = 0.0
    waiting: float = 0.0
    """In it, by its own word."""
    kv_usage: float = 0.0
    breaker_open: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreVitals:
    """What is kept and counted."""

    down: Mapping[str, float] = field(default_factory=dict)
    """Store -> part of the looks at which it did not answer; only those."""
    backlog: float = 0.0
    backlog_age_s: float = 0.0
    """As of the last look."""
    leases_late: float = 0.0
    directory_age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthVitals:
    """How something grows in a process while its load stays the same."""

    process: str
    resource: str
    per_hour: float
    trend: float
    """Agreement about the direction, from -1 to 1."""
    level: float
    """What there is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSnapshot:
    """All of it."""

    seconds: float
    ended: float = 0.0
    """Requests for work."""
    stalled: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    """By code."""
    unserved: Mapping[str, float] = field(default_factory=dict)
    """Model -> requests that failed because nothing could run them."""
    limit_refusals: Mapping[str, float] = field(default_factory=dict)
    """By the kind of limit."""
    refused_tenants: Mapping[str, float] = field(default_factory=dict)
    """Organisation -> its refused requests, whatever the reason."""
    gateway: GatewayVitals = GatewayVitals()
    engines: Sequence[EngineVitals] = ()
    lines: Sequence[QueueVitals] = ()
    models: Sequence[ModelVitals] = ()
    upstreams: Sequence[UpstreamVitals] = ()
    stores: StoreVitals = StoreVitals()
    growths: Sequence[GrowthVitals] = ()
    reload_refused: bool = False
    """Whether the configuration was changed, and the last attempt to put that in force was refused."""
    pending_settings: float = 0.0
    """That have changed and wait for a restart."""

    def engines_of(self, model: str) -> list[EngineVitals]:
        """Those that run it."""
        return [engine for engine in self.engines if engine.model == model]
