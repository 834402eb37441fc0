"""Requests, queries and responses of the admin API for scaling: how many replicas models have, and why."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.wire.admin.responses import PooledReplicaBody

MAX_OVERRIDE_S = 30 * 86_400
"""Longest time in seconds that an override may hold."""
MAX_REPLICAS = 1_000

_Model = Annotated[str, Meta(description="Name of the model.")]


class SetScalingOverride(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body that sets the number of a model's replicas for a time."""

    model: _Model
    replicas: Annotated[int, Meta(description="Replicas that serve, from `min_replicas` to `max_replicas`.")]
    for_s: Annotated[float, Meta(description="Seconds after which the demand decides again, at most 30 days.")]


class EndScalingOverride(Struct, frozen=True, kw_only=True):
    """Query that names the model whose number of replicas the demand is to decide again."""

    model: _Model


class ScalingHistoryQuery(Struct, frozen=True, kw_only=True):
    """Query that selects the decisions of one model to list."""

    model: _Model
    unchanged: Annotated[
        bool,
        Meta(
            description="Also the decisions that changed nothing: those of this gateway in the last minutes, on one "
            "page. Otherwise only those that changed a number, of all gateways, as far back as they are kept."
        ),
    ] = False
    after: Annotated[str, Meta(description="`next` of the page before.")] = ""
    limit: Annotated[int, Meta(description="Entries of a page, 1 to 500.")] = 100


class ForecastBody(Struct, frozen=True, kw_only=True):
    """Forecast of the requests per second at the end of the lead time."""

    low: Annotated[float, Meta(description="Less come in 5 % of the cases.")]
    mean: float
    high: Annotated[float, Meta(description="More come in 5 % of the cases.")]
    coverage: Annotated[
        float | None,
        Meta(description="Share of what came that lay between low and high lately, 0.9 at best; null: not known yet."),
    ]


class ScalingDecisionBody(Struct, frozen=True, kw_only=True):
    """Decision on the number of replicas, with its reason and its evidence."""

    object: Literal["scaling_decision"] = "scaling_decision"
    at: str
    desired: Annotated[int, Meta(description="Replicas that should serve from then on.")]
    asleep: Annotated[int, Meta(description="Replicas that should sleep beside them.")]
    reason: Annotated[str, Meta(description="In one word, such as `forecast`.")]
    text: Annotated[str, Meta(description="The reason in a sentence, with its numbers.")]
    changed: Annotated[bool, Meta(description="Whether a number was another one before.")]
    epoch: Annotated[int, Meta(description="It grows when another gateway begins to decide.")]
    ready: Annotated[int, Meta(description="Replicas that served.")]
    coming: Annotated[int, Meta(description="Replicas that started or woke.")]
    waiting: int
    running: int
    predicted_ttft_s: Annotated[
        float | None,
        Meta(
            description="Highest predicted time to first token, of 95 % of the requests; null: the capacity was not "
            "known, or the queue would grow without end."
        ),
    ]
    predicted_ttft_with_one_less_s: Annotated[float | None, Meta(description="The same with one replica less.")]
    predicted_itl_s: Annotated[float | None, Meta(description="Predicted mean time between tokens; null: as above.")]
    utilisation: Annotated[
        float | None,
        Meta(description="Part of what the replicas serve within the objectives that the forecast needs."),
    ]
    replica_requests_per_s: Annotated[
        float | None, Meta(description="What one replica serves within the objectives; null: not known yet.")
    ]
    forecast: Annotated[ForecastBody, Meta(description="Requests per second when another replica would serve.")]
    lead_time_s: Annotated[float, Meta(description="Time until another replica would serve.")]
    hold_until: Annotated[
        str | None, Meta(description="Until when a replica that is not needed is kept, if nothing changes.")
    ]
    limits: Annotated[list[str], Meta(description="Limits that bind, such as `max_replicas`.")]


class ScalingDecisionList(Struct, frozen=True, kw_only=True):
    """Page of decisions, the newest first."""

    object: Literal["list"] = "list"
    data: list[ScalingDecisionBody]
    has_more: bool
    next: str | None


class ScalingOverrideBody(Struct, frozen=True, kw_only=True):
    """Number of replicas that an operator has set."""

    replicas: int
    until: str


class ScalingObjectivesBody(Struct, frozen=True, kw_only=True):
    """Objectives and limits that hold now."""

    ttft_s: float
    itl_s: float
    min_replicas: int
    max_replicas: int
    sleeping_replicas: int
    target_utilisation: float
    gpus_per_replica: float
    max_gpus: float | None
    usd_per_hour: float
    max_usd_per_hour: float | None


class StartTimesBody(Struct, frozen=True, kw_only=True):
    """Measured durations of one kind of starts."""

    kind: str
    starts: Annotated[int, Meta(description="Starts that are kept.")]
    p50_s: float
    p90_s: float


class TTFTOutcomeBody(Struct, frozen=True, kw_only=True):
    """Predicted and measured time to first token of one minute."""

    at: Annotated[str, Meta(description="Its end.")]
    predicted_s: Annotated[
        float | None, Meta(description="Highest prediction, of 95 % of the requests; null: not known, or without end.")
    ]
    measured_s: Annotated[float | None, Meta(description="95th percentile; null: there was no first token.")]
    requests: int


class ScalingBody(Struct, frozen=True, kw_only=True):
    """State of one model whose number of replicas follows the demand."""

    object: Literal["scaling"] = "scaling"
    model: str
    desired: Annotated[int, Meta(description="Replicas that should serve.")]
    asleep: Annotated[int, Meta(description="Replicas that should sleep beside them.")]
    actual: Annotated[dict[str, int], Meta(description="Replicas by phase.")]
    reachable: Annotated[
        bool | None,
        Meta(description="Whether more replicas could meet the objectives; null: nothing was decided yet."),
    ]
    override: ScalingOverrideBody | None
    objectives: ScalingObjectivesBody
    decision: Annotated[
        ScalingDecisionBody | None, Meta(description="The last one of this gateway; null: there is none yet.")
    ]
    deciding: Annotated[bool, Meta(description="Whether this gateway decides now.")]
    owner: Annotated[str, Meta(description="The gateway that decides; empty: none yet.")]
    epoch: int
    replicas: list[PooledReplicaBody]
    starts: Annotated[list[StartTimesBody], Meta(description="Measured starts, by kind.")]
    outcomes: Annotated[list[TTFTOutcomeBody], Meta(description="The last hour by minute, the newest last.")]


class ScalingList(Struct, frozen=True, kw_only=True):
    """List of all models whose number of replicas follows the demand."""

    object: Literal["list"] = "list"
    data: list[ScalingBody]
