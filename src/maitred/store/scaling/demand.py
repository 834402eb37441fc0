"""Exchange of demand: gateways that share a pool of replicas tell each other theirs.

Each process has one row, which it writes again and again. No clock of two machines is compared: a reader sees by the
sequence number whether a process still writes.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from sqlalchemy import delete, or_, select

from maitred.store.database import Database
from maitred.store.driver import make_insert
from maitred.store.schema import scaling_demands


class GatewayDemand(Struct, frozen=True):
    """Demand that a process has written."""

    gateway: str
    """Name of the process."""
    sequence: int
    """Number of the write; it grows."""
    demand: bytes


class DemandExchange:
    """Store of the demands. Every method may raise `StoreUnavailable`.

    Args:
        database: The database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._insert = make_insert(database.engine)

    async def exchange(self, pool: str, own: GatewayDemand) -> Sequence[GatewayDemand]:
        """Writes the demand of this process and returns that of all others."""
        columns = scaling_demands.c
        changed = {"sequence": own.sequence, "demand": own.demand}
        write = self._insert(scaling_demands).values(pool=pool, gateway=own.gateway, **changed)
        query = select(columns.gateway, columns.sequence, columns.demand)
        async with self._database.begin() as connection:
            await connection.execute(write.on_conflict_do_update(index_elements=["pool", "gateway"], set_=changed))
            others = query.where(columns.pool == pool, columns.gateway != own.gateway)
            rows = (await connection.execute(others)).all()
        return [GatewayDemand(*row) for row in rows]

    async def remove(self, pool: str, gone: Mapping[str, int]) -> None:
        """Removes the rows of processes that are gone, as long as their sequence numbers are these."""
        columns = scaling_demands.c
        rows = [(columns.gateway == gateway) & (columns.sequence == sequence) for gateway, sequence in gone.items()]
        async with self._database.begin() as connection:
            await connection.execute(delete(scaling_demands).where(columns.pool == pool, or_(*rows)))
