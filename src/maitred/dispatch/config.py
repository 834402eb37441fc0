"""Settings of the `dispatch` section: queue order, queue limits, reserved shares and pools."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct, field

from maitred.core.flow import Flow, PriorityClass, ServiceWeights
from maitred.fairness.config import QueueOrderConfig

_Share = Annotated[float, Meta(gt=0, le=1)]
_Seconds = Annotated[float, Meta(gt=0, extra={"unit": "seconds"})]


class TenantPoolConfig(Struct, frozen=True, kw_only=True):
    """Isolated share of the replicas for some tenants."""

    tenants: Annotated[
        list[str],
        Meta(min_length=1, description="Ids of organisations, teams or keys. They can use nothing but this pool."),
    ]
    share: Annotated[_Share, Meta(description="Of every replica's slots and KV blocks.")]


class ServiceConfig(Struct, frozen=True, kw_only=True):
    """Service per token, used for fair sharing between flows."""

    prompt: Annotated[float, Meta(gt=0, description="A token of a prompt that has to be computed.")] = 1.0
    cached: Annotated[float, Meta(ge=0, description="A token of a prompt that was found in the prefix cache.")] = 0.1
    output: Annotated[float, Meta(gt=0, description="A token of an answer.")] = 2.0

    @property
    def weights(self) -> ServiceWeights:
        """The weights as `ServiceWeights`."""
        return ServiceWeights(self.prompt, self.cached, self.output)


class ReportsConfig(Struct, frozen=True, kw_only=True):
    """Trust in load reports of replicas when they are late.

    A late report neither excludes a replica nor makes it look idle: its weight moves to the mean of the other reports,
    and the gateway knows its own requests without a report.
    """

    fresh_s: Annotated[
        float,
        Meta(
            ge=0,
            description="So late a report may be and counts in full. Engines owe one after every step, servers of "
            "others at every look (`probe_every_s`).",
            extra={"unit": "seconds"},
        ),
    ] = 2.0
    half_s: Annotated[_Seconds, Meta(description="After every so much more it counts half of what it did.")] = 5.0


class OverflowConfig(Struct, frozen=True, kw_only=True):
    """When overflow to another model ends; see [degradation](degradation.md#who-leaves)."""

    back_below: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Once a request was predicted to miss its objective, those that may leave do so until the rest "
            "is predicted to take no more than this part of it. 1: only as many as have to.",
        ),
    ] = 0.7
    back_after_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="When predictions have been below that part for so long, requests stay here again until one is "
            "predicted to miss its objective.",
            extra={"unit": "seconds"},
        ),
    ] = 5.0


class HedgingConfig(Struct, frozen=True, kw_only=True):
    """Hedging: small interactive requests go to a second replica when the first is late."""

    models: Annotated[
        list[str],
        Meta(
            description="Names of the models for which it is done, as below `models` or as ours is served. None: off."
        ),
    ] = []
    share: Annotated[
        float, Meta(gt=0, le=0.5, description="Part of these requests that may be sent twice, at most.")
    ] = 0.05
    quantile: Annotated[
        float,
        Meta(
            ge=0.5,
            le=0.999,
            description="A request is late once this part of the last 256 has had its first token in less time.",
        ),
    ] = 0.95
    least_s: Annotated[float, Meta(gt=0, description="None is late before this.", extra={"unit": "seconds"})] = 0.05
    most_tokens: Annotated[
        int,
        Meta(
            gt=0,
            description="Prompt and longest answer together of what counts as small; an answer whose request names no "
            "length is as long as `admission.default_output_tokens`, or as the window.",
            extra={"unit": "tokens"},
        ),
    ] = 2_048


class RegionsConfig(Struct, frozen=True, kw_only=True):
    """When requests leave the gateway's own region, if the model has replicas elsewhere; see [regions](regions.md)."""

    ttft_s: Annotated[
        dict[PriorityClass, _Seconds],
        Meta(
            description="A request without an objective of its own (`dispatch.ttft_s`, a deadline) leaves its region "
            "when its first token is predicted to come later than this there. A class that is not named does not "
            "leave for being late.",
            extra={"unit": "seconds"},
        ),
    ] = field(default_factory=lambda: {PriorityClass.INTERACTIVE: 1.0, PriorityClass.STANDARD: 3.0})
    margin_s: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="It leaves only if the first token then comes so much earlier, with the round trip and the "
            "difference in price counted.",
            extra={"unit": "seconds"},
        ),
    ] = 0.1
    back_below: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Once a request was predicted to miss its objective here, those of its tenant and class may "
            "leave until the predictions take no more than this part of it.",
        ),
    ] = 0.7
    back_after_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="When predictions have been below that part for so long, requests stay here again until one is "
            "predicted to miss its objective.",
            extra={"unit": "seconds"},
        ),
    ] = 10.0
    usd_per_mtok: Annotated[
        dict[str, Annotated[float, Meta(ge=0)]],
        Meta(
            description="Region -> what a million tokens cost there. A region that is not named costs nothing.",
            extra={"unit": "USD"},
        ),
    ] = {}
    usd_per_s: Annotated[
        float,
        Meta(
            gt=0,
            description="What a first token that comes a second earlier may cost. It turns differences in price into "
            "seconds.",
            extra={"unit": "USD"},
        ),
    ] = 0.001


class DispatchConfig(Struct, frozen=True, kw_only=True):
    """Settings of the queues: order, limits, reserved shares and pools."""

    line: QueueOrderConfig = QueueOrderConfig()
    service: ServiceConfig = ServiceConfig()
    reports: ReportsConfig = ReportsConfig()
    max_waiting: Annotated[
        dict[PriorityClass, Annotated[int, Meta(ge=0)]],
        Meta(
            description="Requests of each class that may wait; more are refused with 429. One key takes eight ninths "
            "at most, so that others can wait, of its own organisation as well. A class that is not named has no "
            "limit.",
            extra={"unit": "requests"},
        ),
    ] = field(
        default_factory=lambda: {
            PriorityClass.INTERACTIVE: 1_000,
            PriorityClass.STANDARD: 2_000,
            PriorityClass.BATCH: 10_000,
            PriorityClass.BACKGROUND: 10_000,
        }
    )
    max_wait_s: Annotated[
        dict[PriorityClass, _Seconds],
        Meta(
            description="A request that is predicted to wait longer than this is refused with 429. Also how long a "
            "request goes on waiting while no replica is ready. A class that is not named has no limit.",
            extra={"unit": "seconds"},
        ),
    ] = field(
        default_factory=lambda: {
            PriorityClass.INTERACTIVE: 30.0,
            PriorityClass.STANDARD: 60.0,
            PriorityClass.BATCH: 900.0,
            PriorityClass.BACKGROUND: 3_600.0,
        }
    )
    ttft_s: Annotated[
        dict[PriorityClass, _Seconds],
        Meta(
            description="By when the first token of a request must come that names no deadline. A class that is not "
            "named has none.",
            extra={"unit": "seconds"},
        ),
    ] = {}
    tenant_ttft_s: Annotated[
        dict[str, _Seconds],
        Meta(
            description="Tenant (organisation, team or key) -> the same for its requests, whatever their class. The "
            "narrowest one that is named counts.",
            extra={"unit": "seconds"},
        ),
    ] = {}
    overflow: OverflowConfig = OverflowConfig()
    regions: RegionsConfig = RegionsConfig()
    least_itl_s: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description="Shortest time between two tokens that a request can ask for with `x-maitred-itl-ms`; who asks "
            "for less gets this. The shorter it is for one reader, the smaller the pieces in which everybody's prompts "
            "are computed meanwhile.",
            extra={"unit": "seconds"},
        ),
    ] = 0.02
    headroom: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="Part of the KV blocks that is kept for tenants who hold less than their fair share, so that a "
            "light one finds room at once in the middle of a flood; of replicas without guests (see `engine.guests`) "
            "also part of the slots, to the nearest whole one. Has no effect while only one tenant sends requests, "
            "nor under policies other than `fair`.",
        ),
    ] = 0.07
    reserved: Annotated[
        dict[str, _Share],
        Meta(
            description="Tenant (organisation, team or key) -> part of the slots and KV blocks that nobody else can "
            "use. Beyond it the tenant gets what nobody else waits for."
        ),
    ] = {}
    pools: Annotated[
        dict[str, TenantPoolConfig],
        Meta(description="Isolated pools by name. Their tenants use nothing else, and nobody else uses them."),
    ] = {}
    output_quantile: Annotated[
        float,
        Meta(
            ge=0.5,
            le=0.99,
            description="An answer is predicted to be as long as this part of its tenant's answers were at most. "
            "Higher: fewer preemptions. Lower: fuller batches.",
        ),
    ] = 0.8
    unknown_output_share: Annotated[
        float,
        Meta(gt=0, le=1, description="Part of `max_tokens` that an answer is predicted to use before any was seen."),
    ] = 0.5

    recoveries: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="How often one request may go on at another replica, or at the same one once it is back, after "
            "its replica was lost or refused it. The client sees nothing of it. 0: it sees every failure.",
        ),
    ] = 5

    retries: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="How often a request may be sent again after a server of somebody else's has failed it before "
            "the first part of the answer: to another one that is ready, else to the same one after a pause. Within "
            "the tenant's budget, `server.retry_share`.",
        ),
    ] = 2
    hedging: HedgingConfig = HedgingConfig()

    def ttft_objective_s(self, flow: Flow) -> float | None:
        """Returns the default TTFT objective of a flow in seconds; None: there is none."""
        for level in reversed(flow.path):
            if level.id in self.tenant_ttft_s:
                return self.tenant_ttft_s[level.id]
        return self.ttft_s.get(flow.priority)


_MAX_RESERVED_SHARE = 0.95
"""Largest sum of reserved shares and pools; the rest is for all other tenants."""


def dispatch_faults(config: DispatchConfig) -> Iterator[tuple[str, str]]:
    """Yields the configuration key and the message of each error."""
    set_aside = sum(config.reserved.values()) + sum(pool.share for pool in config.pools.values())
    if set_aside > _MAX_RESERVED_SHARE:
        key = "dispatch.pools" if config.pools else "dispatch.reserved"
        yield (
            key,
            f"Reserved shares and pools take {set_aside:.0%} of the replicas, so nothing is left for everybody else. "
            f"Together they may take {_MAX_RESERVED_SHARE:.0%}. Lower some of them.",
        )
    named = Counter([*config.reserved, *(tenant for pool in config.pools.values() for tenant in set(pool.tenants))])
    for tenant, times in named.items():
        if times > 1:
            key = "dispatch.reserved" if tenant in config.reserved else "dispatch.pools"
            yield (
                key,
                f"{tenant!r} is named {times} times in reserved shares and pools. It can have one part only; leave it "
                "in the one that it is to use.",
            )
