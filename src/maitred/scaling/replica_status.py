"""Status of a replica as the autoscaler sees it."""

from enum import StrEnum

import msgspec

from maitred.scaling.startup_times import StartKind, StartupTimes, remaining_s


class ReplicaPhase(StrEnum):
    """Phase of a replica's life, as the autoscaler sees it."""

    STARTING = "starting"
    WAKING = "waking"
    SERVING = "serving"
    DRAINING = "draining"
    ASLEEP = "asleep"
    FAILED = "failed"
    """Its start or its process has failed; it is not running."""
    MAINTENANCE = "maintenance"
    """State of a replica that runs, and that an operator has take no new request."""


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
    is_own: bool = True
    """Whether it is in the region of its gateway; others are neither started nor stopped from here."""

    def serves_in_s(self, startup_times: StartupTimes, quantile: float, now_s: float) -> float:
        """Returns the seconds until it serves, while it starts or wakes.

        Args:
            startup_times: How long starts take.
            quantile: Share of the starts that are complete by then.
            now_s: The present time.
        """
        if self.ready_in_s is not None:
            return max(0.0, self.ready_in_s)
        kind = StartKind.ASLEEP if self.phase is ReplicaPhase.WAKING else self.start_kind
        return remaining_s(startup_times.quantile(kind, quantile), now_s - self.since_s)
