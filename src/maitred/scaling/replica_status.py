"""Status of a replica as the autoscaler sees it, and the wait after starts that have failed."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from maitred.core.backoff import BackoffCeiling
from maitred.scaling.startup_times import StartKind

_CEILING = BackoffCeiling(first_s=2.0, most_s=300.0)


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
    """It runs, and an operator has it take no new request."""


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

    @property
    def is_committed(self) -> bool:
        """Whether it serves or is about to."""
        return self.phase in (ReplicaPhase.SERVING, ReplicaPhase.STARTING, ReplicaPhase.WAKING)


class StartBackoff:
    """Failures in a row among a model's replicas, and the time from which another start may be tried."""

    def __init__(self) -> None:
        self.failures = 0
        self.start_from_s = 0.0
        self._failed_s = float("-inf")
        self._seen: set[tuple[str, float]] = set()

    def observe(self, replicas: Sequence[ReplicaStatus]) -> None:
        """Counts failures that are new; a start that succeeds after the last one ends the row."""
        failed = {(replica.name, replica.since_s) for replica in replicas if replica.phase is ReplicaPhase.FAILED}
        for _, since_s in sorted(failed - self._seen, key=lambda one: one[1]):
            self.failures += 1
            self._failed_s = max(self._failed_s, since_s)
            self.start_from_s = max(self.start_from_s, since_s + _CEILING.after(self.failures))
        self._seen = failed
        if self.failures and any(
            replica.phase is ReplicaPhase.SERVING and replica.since_s > self._failed_s for replica in replicas
        ):
            self.failures, self.start_from_s = 0, 0.0
