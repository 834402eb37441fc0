"""Health of a pool: which of its replicas are ejected as outliers, and which can be used."""

import math
from collections.abc import Iterable

from maitred.replica.health.breaker import BreakerAttempt, BreakerState
from maitred.replica.health.config import OutlierConfig
from maitred.replica.health.health import ReplicaAvailability, ReplicaHealth
from maitred.replica.health.outliers import find_outliers


class PoolHealth:
    """Health of all replicas of a pool.

    Of the replicas that are present, no more than the configured share is ejected, and at least one that works stays.
    If all others fail or go away afterwards, ejections no longer count: a slow answer is better than none (Envoy's
    panic mode).

    Args:
        config: The settings.
        members: The replicas of the pool.
    """

    def __init__(self, config: OutlierConfig, members: Iterable[ReplicaHealth]) -> None:
        self._config = config
        self._members = {member.name: member for member in members}
        self._next_sweep_s = float("-inf")

    def reconfigure(self, config: OutlierConfig) -> None:
        """Applies new settings to later comparisons."""
        self._config = config

    def __getitem__(self, name: str) -> ReplicaHealth:
        return self._members[name]

    def add(self, member: ReplicaHealth) -> None:
        """Adds a replica to the pool."""
        self._members[member.name] = member

    def remove(self, name: str) -> None:
        """Removes a replica from the pool."""
        self._members.pop(name, None)

    def in_panic_mode(self, now_s: float) -> bool:
        """Returns whether ejected replicas are used all the same, because no other is available."""
        return not any(member.availability(now_s).is_available for member in self._members.values())

    def availability(self, name: str, now_s: float) -> ReplicaAvailability:
        """Returns the availability of one replica, with panic mode taken into account."""
        availability = self._members[name].availability(now_s)
        if availability.is_available or not self.in_panic_mode(now_s):
            return availability
        return self._members[name].availability(now_s, ignore_ejection=True)

    def availabilities(self, now_s: float) -> dict[str, ReplicaAvailability]:
        """Returns the availability of every replica.

        No replica is available only if none is present whose breaker lets a request through.
        """
        in_panic_mode = self.in_panic_mode(now_s)
        return {
            name: member.availability(now_s, ignore_ejection=in_panic_mode) for name, member in self._members.items()
        }

    def start_attempt(self, name: str, now_s: float) -> BreakerAttempt | None:
        """Returns an attempt for a request to that replica, as `ReplicaHealth.start_attempt` does."""
        member = self._members[name]
        return member.start_attempt(now_s, ignore_ejection=member.is_ejected(now_s) and self.in_panic_mode(now_s))

    def eject_outliers(self, now_s: float) -> list[str]:
        """Compares the replicas if the interval is over, and returns the names of those that are now ejected."""
        if now_s < self._next_sweep_s:
            return []
        self._next_sweep_s = now_s + self._config.every_s
        present = [replica for replica in self._members.values() if not replica.is_absent]
        working = {
            replica.name: replica
            for replica in present
            if not replica.is_ejected(now_s) and replica.breaker.state(now_s) is BreakerState.CLOSED
        }
        ejectable = math.floor(self._config.share * len(present) + 1e-9) - sum(
            replica.is_ejected(now_s) for replica in present
        )
        outliers = find_outliers({name: replica.recent_sums(now_s) for name, replica in working.items()}, self._config)
        ejected = outliers[: max(0, min(ejectable, len(working) - 1))]
        for outlier in ejected:
            working[outlier.name].eject(now_s, outlier.reason)
        for member in working.values():
            if all(member.name != outlier.name for outlier in outliers):
                member.forgive_ejection()
        return [outlier.name for outlier in ejected]
