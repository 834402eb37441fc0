"""Back-off of starts that fail: each failure in a row doubles the wait before the next start."""

from collections.abc import Sequence

from maitred.core.backoff import BackoffCeiling
from maitred.scaling.replica_status import ReplicaPhase, ReplicaStatus

_CEILING = BackoffCeiling(first_s=2.0, most_s=300.0)


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
