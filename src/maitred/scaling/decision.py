"""A scaling decision with its reason and its evidence."""

from enum import StrEnum

import msgspec

from maitred.scaling.forecast import ForecastRange
from maitred.scaling.objectives import ScalingObjectives


class ScalingReason(StrEnum):
    """Why a model has the number of replicas that was decided."""

    STEADY = "steady"
    """The present number is the least that meets the objectives."""
    BACKLOG = "backlog"
    """More: what waits now would miss the objective."""
    FORECAST = "forecast"
    """More: what is to come would miss the objective before further replicas were ready."""
    UTILISATION = "utilisation"
    """More: the replicas would be busier than `target_utilisation`."""
    SURPLUS = "surplus"
    """Fewer: one less meets the objectives, and holding it any longer would cost more than a start."""
    HOLDING = "holding"
    """Fewer would do, but the demand may return: holding the replica costs less than another start."""
    IDLE = "idle"
    """None: nothing is asked for and nothing expected."""
    MINIMUM = "minimum"
    """`min_replicas` is more than the demand needs."""
    LIMITED = "limited"
    """More would be needed than the limits allow; see `ScalingEvidence.limits`."""
    UNREACHABLE = "unreachable"
    """The objective would be missed with any number of replicas: more would not help, and none are added for it."""
    UNKNOWN_CAPACITY = "unknown_capacity"
    """No replica has been measured yet: none goes, and one is there for what is asked for."""
    OVERRIDE = "override"
    """A person has set the number for a time."""


class ScalingLimit(StrEnum):
    """A limit that keeps the number of replicas from being what the demand needs."""

    MIN_REPLICAS = "min_replicas"
    MAX_REPLICAS = "max_replicas"
    GPUS = "gpus"
    USD_PER_HOUR = "usd_per_hour"


class ScalingEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers from which a decision follows."""

    objectives: ScalingObjectives
    """Objectives and limits at that time; a reload may have changed them since."""
    ready: int
    """Replicas that serve now."""
    coming: int
    """Replicas that start or wake."""
    ttft_s: float | None
    """Highest predicted TTFT over the horizon with the decided number; None: the capacity is not known."""
    ttft_with_one_less_s: float | None
    itl_s: float | None
    """Predicted time between tokens with the decided number."""
    utilisation: float | None
    """Share of the capacity within the objectives that the forecast needs, with the decided number."""
    replica_requests_per_s: float | None
    """Requests per second that one replica serves within the objectives (the knee)."""
    requests_per_s: ForecastRange
    """Forecast for the end of the lead time."""
    forecast_coverage: float | None
    """Share of outcomes in the 90 % band of the forecast; None: not known yet."""
    waiting: int
    running: int
    lead_time_s: float
    """Time until another replica would serve."""
    hold_until_s: float | None = None
    """Until when a replica that is not needed is kept, if the demand stays as it is."""
    limits: tuple[ScalingLimit, ...] = ()
    """Limits that bind."""


class ScalingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas a model should have from now on."""

    at_s: float
    desired: int
    """Replicas that serve or are on their way to it."""
    asleep: int
    """Replicas to keep asleep beside these."""
    reason: ScalingReason
    evidence: ScalingEvidence
    override_until_s: float | None = None
    """End of the override, if there is one."""
