"""Leases of scalers: who decides on the number of a pool's replicas, and what was decided.

Gateways may share a pool of replicas, and only one of them may decide. Its row in the database names the owner with an
epoch, which grows with each new owner. A decision is written with the epoch of its owner, and only if that is still
the epoch of the row; who acts only on what was written can never act in the epoch of another (a fencing token).

No clock of two machines is compared. The owner renews its row, which counts renewals, and another gateway takes it
when it has seen the same count for too long on its own clock.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import asdict, replace
from sqlalchemy import Update, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.clock import Clock
from maitred.store.database import Database
from maitred.store.driver import make_insert
from maitred.store.schema import scaler_leases, scaling_decisions

_KEPT_DECISIONS = 1_000
"""Decisions that are kept of each pool."""
_KEPT_S = 90 * 86_400.0
"""Time in seconds after its last change at which the row of a pool is deleted, with its decisions."""


class ScalerLease(Struct, frozen=True, kw_only=True):
    """Lease of one pool, as the database has it."""

    pool: str
    owner: str = ""
    """Name of the process that decides; empty: none has yet."""
    epoch: int = 0
    renewals: int = 0
    desired: int | None = None
    """Replicas that should serve; None: nobody has decided yet."""
    asleep: int = 0
    """Replicas that should sleep beside them."""
    override_replicas: int | None = None
    """Number that an operator has set; None: none."""
    override_until_s: float | None = None
    """Wall time at which that ends."""


class StoredDecision(Struct, frozen=True):
    """Decision that was written."""

    id: int
    at_s: float
    """Wall time."""
    epoch: int
    decision: bytes


class ScalerLeases:
    """Store of the leases of scalers. Every method may raise `StoreUnavailable`.

    Args:
        database: The database.
        clock: Clock for the times of decisions.

    Attributes:
        database: See above.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self._clock = clock
        self._insert = make_insert(database.engine)

    async def read(self, pool: str) -> ScalerLease:
        """Returns the lease of a pool, without an owner if it never had one."""
        async with self.database.begin_read() as connection:
            return await _read(connection, pool)

    async def take(self, seen: ScalerLease, owner: str, after_epoch: int = 0) -> ScalerLease | None:
        """Takes a lease and begins its next epoch.

        Args:
            seen: The lease as it was when its owner was judged to be gone.
            owner: Who takes it.
            after_epoch: An epoch that somebody has seen; the next one is later than that, too.

        Returns:
            The new lease; None: its owner has renewed it since, or another one has taken it.
        """
        taken = replace(seen, owner=owner, epoch=max(seen.epoch, after_epoch) + 1, renewals=0)
        async with self.database.begin() as connection:
            await self._make(connection, seen.pool)
            now = await _read(connection, seen.pool, lock=True)
            if (now.epoch, now.renewals) != (seen.epoch, seen.renewals):
                return None
            values = {"owner": owner, "epoch": taken.epoch, "renewals": 0, "updated_s": self._clock.wall_s()}
            await connection.execute(_update(seen.pool).values(values))
            old = select(scaler_leases.c.pool).where(scaler_leases.c.updated_s < self._clock.wall_s() - _KEPT_S)
            await connection.execute(delete(scaling_decisions).where(scaling_decisions.c.pool.in_(old)))
            await connection.execute(delete(scaler_leases).where(scaler_leases.c.pool.in_(old)))
        return replace(now, owner=owner, epoch=taken.epoch, renewals=0)

    async def renew(self, lease: ScalerLease) -> ScalerLease | None:
        """Renews a lease and returns it as it is now; None: it has another owner."""
        async with self.database.begin() as connection:
            now = await _read(connection, lease.pool, lock=True)
            if now.epoch != lease.epoch:
                return None
            renewed = replace(now, renewals=now.renewals + 1)
            values = {"renewals": renewed.renewals, "updated_s": self._clock.wall_s()}
            await connection.execute(_update(lease.pool).values(values))
        return renewed

    async def decide(self, lease: ScalerLease, desired: int, asleep: int, decision: bytes) -> ScalerLease | None:
        """Writes a decision, which also renews the lease.

        Returns:
            The lease as it is now; None: it has another owner. Nothing was written then, and nothing may be done.
        """
        now_s = self._clock.wall_s()
        async with self.database.begin() as connection:
            now = await _read(connection, lease.pool, lock=True)
            if now.epoch != lease.epoch:
                return None
            decided = replace(now, desired=desired, asleep=asleep, renewals=now.renewals + 1)
            values = {name: value for name, value in asdict(decided).items() if name != "pool"}
            await connection.execute(_update(lease.pool).values(**values, updated_s=now_s))
            await self._keep_decision(connection, lease, decision)
        return decided

    async def keep_decision(self, lease: ScalerLease, decision: bytes) -> None:
        """Keeps a decision for `decisions`, without a look at who has the lease."""
        async with self.database.begin() as connection:
            await self._keep_decision(connection, lease, decision)

    async def _keep_decision(self, connection: AsyncConnection, lease: ScalerLease, decision: bytes) -> None:
        row = {"pool": lease.pool, "at_s": self._clock.wall_s(), "epoch": lease.epoch, "decision": decision}
        await connection.execute(insert(scaling_decisions), row)
        columns = scaling_decisions.c
        kept = select(columns.id).where(columns.pool == lease.pool).order_by(columns.id.desc())
        oldest = (await connection.execute(kept.offset(_KEPT_DECISIONS - 1).limit(1))).scalar_one_or_none()
        if oldest is not None:
            await connection.execute(delete(scaling_decisions).where(columns.pool == lease.pool, columns.id < oldest))

    async def set_override(self, pool: str, replicas: int | None, until_s: float | None) -> None:
        """Sets the number that an operator wants until a wall time; None: what is decided holds again."""
        values = {"override_replicas": replicas, "override_until_s": until_s, "updated_s": self._clock.wall_s()}
        async with self.database.begin() as connection:
            await self._make(connection, pool)
            await connection.execute(_update(pool).values(values))

    async def decisions(self, pool: str, *, before: int | None = None, limit: int = 100) -> Sequence[StoredDecision]:
        """Returns the written decisions of a pool, the newest first.

        Args:
            pool: The pool.
            before: Id of the last decision of the page before.
            limit: Most decisions.
        """
        columns = scaling_decisions.c
        query = select(columns.id, columns.at_s, columns.epoch, columns.decision).where(columns.pool == pool)
        if before is not None:
            query = query.where(columns.id < before)
        async with self.database.begin_read() as connection:
            rows = (await connection.execute(query.order_by(columns.id.desc()).limit(limit))).all()
        return [StoredDecision(*row) for row in rows]

    async def _make(self, connection: AsyncConnection, pool: str) -> None:
        """Makes the row of a pool, if there is none."""
        values = {"pool": pool, "owner": "", "epoch": 0, "renewals": 0, "asleep": 0, "updated_s": self._clock.wall_s()}
        await connection.execute(self._insert(scaler_leases).values(values).on_conflict_do_nothing())


_COLUMNS = [scaler_leases.c[name] for name in ScalerLease.__struct_fields__]


async def _read(connection: AsyncConnection, pool: str, *, lock: bool = False) -> ScalerLease:
    query = select(*_COLUMNS).where(scaler_leases.c.pool == pool)
    row = (await connection.execute(query.with_for_update() if lock else query)).mappings().one_or_none()
    return ScalerLease(pool=pool) if row is None else ScalerLease(**row)


def _update(pool: str) -> Update:
    return update(scaler_leases).where(scaler_leases.c.pool == pool)
