"""Reconciler of a replica pool: compares the replicas that there are with those that are desired.

It knows only the present, so it may be called after every change and as often as one likes: whatever has happened
meanwhile, the next call orders what is missing now. One order leads to another:

::

    start -> serving --drain--> draining --no request runs--> stop
                ^                  |   `--no request runs--> sleep -> asleep -> stop
                |-------serve------'                                    |
                `---------------------------wake------------------------'

A replica that drains gets no new request and ends its running ones, also those of other gateways, so no stream is cut.
Nothing waits for it either: if more are desired again, it serves again at once.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from maitred.scaling.replica_status import ReplicaPhase

_HEALTHY = (ReplicaPhase.STARTING, ReplicaPhase.WAKING, ReplicaPhase.SERVING)


class DesiredReplicas(msgspec.Struct, frozen=True):
    """Desired numbers of replicas of one model."""

    serving: int
    asleep: int = 0
    """Replicas beyond those, which sleep and are woken before any other is started."""


class PooledReplica(msgspec.Struct, frozen=True, kw_only=True):
    """State of one replica of a pool, with the orders that the pool has given."""

    name: str
    phase: ReplicaPhase
    """`DRAINING` and `ASLEEP` from the order on, even if the replica still starts or has just failed."""
    is_ready: bool
    """Whether its engine is connected."""
    running: int = 0
    """Requests of this gateway that run there."""
    others: int = 0
    """Requests of other gateways that run or wait there."""
    must_wait: bool = False
    """Whether it may not end yet, because other gateways have requests there, or may not have heard that it leaves."""
    cached_blocks: int = 0
    """KV blocks that hold a prefix, which would be lost with the replica."""

    @property
    def loss(self) -> tuple[bool, bool, int, int]:
        """Loss if the replica goes: first that it is there, then its requests, then its cache."""
        return self.is_ready, self.phase is not ReplicaPhase.WAKING, self.running + self.others, self.cached_blocks


class OrderKind(StrEnum):
    """Kind of an order to a pool."""

    START = "start"
    SERVE = "serve"
    """A draining replica takes requests again."""
    WAKE = "wake"
    DRAIN = "drain"
    SLEEP = "sleep"
    STOP = "stop"


class ReplicaOrder(msgspec.Struct, frozen=True):
    """Order to a pool."""

    kind: OrderKind
    name: str = ""
    """The replica; empty for a start, which makes a new one."""


class PoolLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a pool, by what its machines can do."""

    max_replicas: int
    """Most replicas in any phase."""
    max_starts: int
    """Most replicas that start at a time."""
    can_sleep: bool


def reconcile(desired: DesiredReplicas, replicas: Sequence[PooledReplica], limits: PoolLimits) -> list[ReplicaOrder]:
    """Returns the orders that lead from the replicas that there are towards the desired ones.

    A replica that has failed is not replaced by a new one, which would start at the same place. One that sleeps is
    woken in its stead, and the failed one sleeps in its turn once it works again. One in maintenance does not count,
    and gets no order: the operator decides on it.

    Args:
        desired: The desired numbers.
        replicas: All replicas that are not being stopped.
        limits: The limits.
    """
    rest = desired.asleep if limits.can_sleep else 0
    healthy = [replica for replica in replicas if replica.phase in _HEALTHY]
    failed = [replica for replica in replicas if replica.phase is ReplicaPhase.FAILED]
    draining = [replica for replica in replicas if replica.phase is ReplicaPhase.DRAINING]
    asleep = [replica for replica in replicas if replica.phase is ReplicaPhase.ASLEEP]

    lacking = max(0, desired.serving - len(healthy))
    draining.sort(key=lambda replica: replica.loss, reverse=True)
    returning, draining = draining[:lacking], draining[lacking:]
    lacking -= len(returning)
    asleep.sort(key=lambda replica: not replica.is_ready)
    waking, asleep = asleep[:lacking], asleep[lacking:]
    served = min(desired.serving, len(healthy) + len(returning) + len(waking))

    healthy.reverse()  # of those whose loss is equal the last one leaves, so that names do not wander
    leaving = sorted(healthy, key=lambda replica: replica.loss)[: max(0, len(healthy) - desired.serving)]
    going = sorted([*draining, *leaving], key=lambda replica: (not replica.is_ready, replica.loss))
    asleep, stopping = asleep[:rest], asleep[rest:]
    rest -= len(asleep)
    resting, going = going[:rest], going[rest:]
    rest -= len(resting)
    kept_failed = desired.serving - served + rest
    stopping += [replica for replica in (*going, *failed[kept_failed:]) if not (replica.running or replica.must_wait)]

    missing = kept_failed - min(kept_failed, len(failed))
    allowed = limits.max_replicas - (len(replicas) - len(stopping))
    starting = sum(
        not replica.is_ready and replica.phase is not ReplicaPhase.FAILED
        for replica in replicas
        if replica not in stopping
    )
    return [
        *(ReplicaOrder(OrderKind.SERVE, replica.name) for replica in returning),
        *(ReplicaOrder(OrderKind.WAKE, replica.name) for replica in waking),
        *(ReplicaOrder(OrderKind.DRAIN, replica.name) for replica in (*leaving, *failed[kept_failed:])),
        *(
            ReplicaOrder(OrderKind.SLEEP, replica.name)
            for replica in resting
            if replica.is_ready and not replica.running
        ),
        *(ReplicaOrder(OrderKind.STOP, replica.name) for replica in stopping),
        *[ReplicaOrder(OrderKind.START)] * min(missing, allowed, limits.max_starts - starting),
    ]
