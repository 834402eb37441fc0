"""The replicas of a pool beside each other: who is left out for being worse, and who can be used."""

import math
from collections.abc import Iterable

from maitred.replica.health.breaker import BreakerAttempt, BreakerState
from maitred.replica.health.config import OutlierConfig
from maitred.replica.health.health import HealthVerdict, ReplicaHealth
from maitred.replica.health.outliers import find_outliers


class PoolHealth:
    """The health of a pool.

    Of those that are there, never more than the configured share is left out, and at least one that works is not. If
    all that are not left out fail or go away afterwards, being left out no longer counts: a slow answer is better than
    none (Envoy's panic).

    Args:
        config: The settings.
        members: Its replicas.
    """

    def __init__(self, config: OutlierConfig, members: Iterable[ReplicaHealth]) -> None:
        self._config = config
        self._members = {member.name: member for member in members}
        self._next_s = float("-inf")

    def reconfigure(self, config: OutlierConfig) -> None:
        """Compares them by these settings from now on."""
        self._config = config

    def __getitem__(self, name: str) -> ReplicaHealth:
        return self._members[name]

    def join(self, member: ReplicaHealth) -> None:
        """A replica is added."""
        self._members[member.name] = member

    def leave(self, name: str) -> None:
        """A replica is gone."""
        self._members.pop(name, None)

    def panics(self, now_s: float) -> bool:
        """Whether those that are left out are used all the same, since there is no other."""
        return not any(member.verdict(now_s).may for member in self._members.values())

    def verdict(self, name: str, now_s: float) -> HealthVerdict:
        """That of one replica, as `verdicts`."""
        verdict = self._members[name].verdict(now_s)
        if verdict.may or not self.panics(now_s):
            return verdict
        return self._members[name].verdict(now_s, ejected_too=True)

    def verdicts(self, now_s: float) -> dict[str, HealthVerdict]:
        """Every replica's. None may be sent to only if none is there whose breaker lets anything through."""
        panics = self.panics(now_s)
        return {name: member.verdict(now_s, ejected_too=panics) for name, member in self._members.items()}

    def start_attempt(self, name: str, now_s: float) -> BreakerAttempt | None:
        """A request on its way to that replica, as `ReplicaHealth.start_attempt`."""
        member = self._members[name]
        return member.start_attempt(now_s, ejected_too=member.ejected(now_s) and self.panics(now_s))

    def sweep(self, now_s: float) -> list[str]:
        """Compares them, if it is time to; returns the names of those that are left out from now on."""
        if now_s < self._next_s:
            return []
        self._next_s = now_s + self._config.every_s
        there = [each for each in self._members.values() if not each.absent]
        working = {
            each.name: each
            for each in there
            if not each.ejected(now_s) and each.breaker.state(now_s) is BreakerState.CLOSED
        }
        room = math.floor(self._config.share * len(there) + 1e-9) - sum(each.ejected(now_s) for each in there)
        outliers = find_outliers({name: each.recent(now_s) for name, each in working.items()}, self._config)
        ejected = outliers[: max(0, min(room, len(working) - 1))]
        for outlier in ejected:
            working[outlier.name].eject(now_s, outlier.why)
        for member in working.values():
            if all(member.name != outlier.name for outlier in outliers):
                member.forgive()
        return [outlier.name for outlier in ejected]
