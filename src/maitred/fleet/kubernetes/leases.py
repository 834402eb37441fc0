"""Leases of scalers in a cluster: objects of coordination.k8s.io, which all gateways of a Deployment see.

So the gateways of a Deployment agree on who scales it without a common database. A write holds only if nobody has
written since the lease was read. What was decided is also kept in the database of the gateway that decided.
"""

from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from maitred.core.clock import Clock
from maitred.core.errors import ReplicaUnavailable, StoreUnavailable
from maitred.fleet.kubernetes.api import KubernetesApi, Lease, LeaseSpec, ObjectMetadata, ResourceConflict
from maitred.store.database import Database
from maitred.store.scaling.lease import ScalerLease, ScalerLeases

STATE = "maitred.dev/scaling"
"""Annotation with what a lease of coordination.k8s.io has no field for."""
_DURATION_S = 15
"""Time in seconds that a reader of the object is told; gateways count on their own clocks."""


class _ScalingState(msgspec.Struct, frozen=True, omit_defaults=True):
    renewals: int = 0
    desired: int | None = None
    asleep: int = 0
    override_replicas: int | None = None
    override_until_s: float | None = None


class KubernetesLeases(ScalerLeases):
    """Store of the lease of one Deployment, in its namespace. Every method may raise `StoreUnavailable`.

    Args:
        database: The database of this gateway, for the history of its decisions.
        clock: The clock.
        api: Client of the API server, entered.
        name: Name of the lease.
    """

    def __init__(self, database: Database, clock: Clock, api: KubernetesApi, name: str) -> None:
        super().__init__(database, clock)
        self._api = api
        self._name = name

    async def read(self, pool: str) -> ScalerLease:
        """Returns the lease of the pool, without an owner if it never had one."""
        return (await self._read(pool))[0]

    async def take(self, seen: ScalerLease, owner: str, after_epoch: int = 0) -> ScalerLease | None:
        """Takes the lease and begins its next epoch; see `ScalerLeases.take`."""
        now, found = await self._read(seen.pool)
        if (now.epoch, now.renewals) != (seen.epoch, seen.renewals):
            return None
        taken = replace(now, owner=owner, epoch=max(now.epoch, after_epoch) + 1, renewals=0)
        return await self._write(taken, found, is_taken=True)

    async def renew(self, lease: ScalerLease) -> ScalerLease | None:
        """Renews the lease and returns it as it is now; None: it has another owner."""
        now, found = await self._read(lease.pool)
        if now.epoch != lease.epoch:
            return None
        return await self._write(replace(now, renewals=now.renewals + 1), found)

    async def decide(self, lease: ScalerLease, desired: int, asleep: int, decision: bytes) -> ScalerLease | None:
        """Writes a decision, which also renews the lease; see `ScalerLeases.decide`."""
        now, found = await self._read(lease.pool)
        if now.epoch != lease.epoch:
            return None
        decided = replace(now, desired=desired, asleep=asleep, renewals=now.renewals + 1)
        written = await self._write(decided, found)
        if written is not None:
            await self.keep_decision(lease, decision)
        return written

    async def set_override(self, pool: str, replicas: int | None, until_s: float | None) -> None:
        """Sets the number that an operator wants until a wall time; see `ScalerLeases.set_override`."""
        while True:
            now, found = await self._read(pool)
            wanted = replace(now, override_replicas=replicas, override_until_s=until_s)
            if await self._write(wanted, found) is not None:
                return

    async def _read(self, pool: str) -> tuple[ScalerLease, Lease]:
        try:
            found = await self._api.lease(self._name) or Lease(ObjectMetadata(name=self._name))
            state = msgspec.json.decode(found.metadata.annotations.get(STATE, "{}"), type=_ScalingState)
        except (ReplicaUnavailable, msgspec.MsgspecError) as error:
            raise StoreUnavailable(f"The lease {self._name} cannot be read: {error}") from error
        lease = ScalerLease(
            pool=pool,
            owner=found.spec.owner or "",
            epoch=found.spec.lease_transitions or 0,
            **msgspec.structs.asdict(state),
        )
        return lease, found

    async def _write(self, lease: ScalerLease, found: Lease, *, is_taken: bool = False) -> ScalerLease | None:
        """Writes a lease if it is as it was found; returns None if it is not."""
        now = datetime.fromtimestamp(self._clock.wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        state = _ScalingState(**{name: getattr(lease, name) for name in _ScalingState.__struct_fields__})
        annotations = {**found.metadata.annotations, STATE: msgspec.json.encode(state).decode()}
        spec = LeaseSpec(
            owner=lease.owner or None,
            lease_duration_seconds=_DURATION_S,
            acquire_time=now if is_taken else found.spec.acquire_time,
            renew_time=now,
            lease_transitions=lease.epoch,
        )
        written = Lease(replace(found.metadata, annotations=annotations), spec)
        try:
            await self._api.write_lease(self._name, written)
        except ResourceConflict:
            return None
        except ReplicaUnavailable as error:
            raise StoreUnavailable(f"The lease {self._name} cannot be written: {error.message}") from error
        return lease
