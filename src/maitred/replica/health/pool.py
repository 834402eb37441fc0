"""Health of a pool: ejects outliers, and ignores ejections if no other replica is available."""

import math

from maitred.replica.health.breaker import BreakerAttempt, BreakerState
from maitred.replica.health.config import OutlierConfig
from maitred.replica.health.outliers import find_outliers
from maitred.replica.health.replica import ReplicaAvailability, ReplicaHealth


class PoolHealth:
    """Health of all replicas of a pool.

    At most `share` of the replicas in service is ejected, and at least one replica with a closed breaker remains. If
    all others fail or go away afterwards, ejections no longer count: a slow answer is better than none (Envoy's panic
    mode).

    Args:
        config: The settings.
    """

    def __init__(self, config: OutlierConfig) -> None:
        self._config = config
        self._replicas: dict[str, ReplicaHealth] = {}
        self._next_comparison_s = float("-inf")

    def reconfigure(self, config: OutlierConfig) -> None:
        """Applies new settings, which take effect at the next comparison."""
        self._config = config

    def add(self, member: ReplicaHealth) -> None:
        """Adds a replica to the pool."""
        self._replicas[member.name] = member

    def remove(self, name: str) -> None:
        """Removes a replica from the pool."""
        self._replicas.pop(name, None)

    def in_panic_mode(self, now_s: float) -> bool:
        """Returns whether no replica is available, so that ejections are ignored."""
        return not any(member.availability(now_s).is_available for member in self._replicas.values())

    def availability(self, name: str, now_s: float) -> ReplicaAvailability:
        """Returns the availability of one replica, with panic mode taken into account.

        No replica of the pool is available only if each one is out of service or its breaker allows no request.
        """
        availability = self._replicas[name].availability(now_s)
        if availability.is_available or not self.in_panic_mode(now_s):
            return availability
        return self._replicas[name].availability(now_s, ignore_ejection=True)

    def start_attempt(self, name: str, now_s: float) -> BreakerAttempt | None:
        """Starts an attempt at one replica (see `ReplicaHealth.start_attempt`); applies panic mode."""
        member = self._replicas[name]
        return member.start_attempt(now_s, ignore_ejection=member.is_ejected(now_s) and self.in_panic_mode(now_s))

    def eject_outliers(self, now_s: float) -> list[str]:
        """Compares the replicas if the interval has passed; returns the names of newly ejected ones."""
        if now_s < self._next_comparison_s:
            return []
        self._next_comparison_s = now_s + self._config.every_s
        in_service = [replica for replica in self._replicas.values() if not replica.is_out_of_service]
        candidates = {
            replica.name: replica
            for replica in in_service
            if not replica.is_ejected(now_s) and replica.breaker.state(now_s) is BreakerState.CLOSED
        }
        max_new_ejections = math.floor(self._config.share * len(in_service) + 1e-9) - sum(
            replica.is_ejected(now_s) for replica in in_service
        )
        outliers = find_outliers(
            {name: replica.recent_stats(now_s) for name, replica in candidates.items()}, self._config
        )
        new_ejections = outliers[: max(0, min(max_new_ejections, len(candidates) - 1))]
        for name in new_ejections:
            candidates[name].eject(now_s)
        for member in candidates.values():
            if member.name not in outliers:
                member.forgive_ejection()
        return new_ejections
