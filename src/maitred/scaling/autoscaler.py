"""Autoscaler: the least number of replicas with which pending and forecast work meets the objectives."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from maitred.scaling.capacity import ReplicaCapacity
from maitred.scaling.decision import ScalingDecision
from maitred.scaling.demand import Demand
from maitred.scaling.forecast import DemandForecast
from maitred.scaling.objectives import ScalingObjectives
from maitred.scaling.startup_times import StartKind, StartupTimes


class ReplicaPhase(StrEnum):
    """Phase of a replica's life, as the autoscaler sees it."""

    STARTING = "starting"
    WAKING = "waking"
    SERVING = "serving"
    DRAINING = "draining"
    ASLEEP = "asleep"
    FAILED = "failed"
    """Its start or its process has failed; it is not running."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one replica for a decision."""

    name: str
    phase: ReplicaPhase
    since_s: float
    """Time at which the phase began."""
    ready_in_s: float | None = None
    """Remaining seconds until it serves, as it reports them itself; None: the start-up times tell."""
    start_kind: StartKind = StartKind.COLD
    """Kind of its start, while it starts or wakes."""


class ScalingOverride(msgspec.Struct, frozen=True, kw_only=True):
    """A number of replicas that a person has set, with its end."""

    replicas: int
    until_s: float


class Autoscaler:
    """Decides the number of replicas of one model.

    Args:
        objectives: Objectives and limits; may be replaced at any time.
        startup_times: How long starts take.
        forecast: Forecast of the demand; `decide` shows it the arrivals.
        start_kind: Kind of the next start of a new replica; may be replaced at any time.
    """

    def __init__(
        self,
        objectives: ScalingObjectives,
        startup_times: StartupTimes,
        forecast: DemandForecast,
        *,
        start_kind: StartKind = StartKind.COLD,
    ) -> None:
        self.objectives = objectives
        self.startup_times = startup_times
        self.forecast = forecast
        self.start_kind = start_kind
        self.override: ScalingOverride | None = None
        """Number that a person has set; it ends by itself. The limits hold for it, too."""

    def decide(
        self, demand: Demand, replicas: Sequence[ReplicaStatus], capacity: ReplicaCapacity | None, now_s: float
    ) -> ScalingDecision:
        """Returns the number of replicas from now on. Call it about once a second, and as soon as requests wait.

        Args:
            demand: Demand now, with what has arrived since the last call.
            replicas: All replicas of the model.
            capacity: Capacity of one replica; None: not known yet.
            now_s: The present time, on the clock of the statuses.
        """
        raise NotImplementedError
