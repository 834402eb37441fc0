"""Rollouts in the database, which all gateways of an installation share.

Each change reads a rollout, decides and writes in one transaction that holds the lock of its row. If an operator and an
automatic decision change a rollout at the same time, the second change therefore sees the result of the first. The
table has only a few rows, and each gateway reads all of them about once a second.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.clock import Clock
from maitred.core.rollout import RolloutPhase, RolloutState
from maitred.store.database import Database
from maitred.store.driver import make_insert
from maitred.store.schema import rollouts

RolloutChange = Callable[[RolloutState | None], RolloutState]
"""Function from the old state of a rollout to its new state.

The old state is None if no rollout of that name has ever existed.

If the function raises, the rollout stays unchanged.
"""

_COUNT_QUERY = f"SELECT count(*) FROM {rollouts.name}"
_STATE_COLUMNS = [rollouts.c[name] for name in RolloutState.__struct_fields__]


class RolloutStore:
    """Store of rollouts. Every method may raise `StoreUnavailable`.

    Args:
        database: The database.
        clock: Clock for the times of changes.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._insert = make_insert(database.engine)
        self._cached: tuple[tuple[int, int] | None, list[RolloutState]] = (None, [])
        """States of the last read, and the change token from before that read."""

    async def all(self) -> list[RolloutState]:
        """Returns the states of all rollouts in the order of names, including ended ones."""
        if self._database.probe(_COUNT_QUERY) == 0:
            return []  # most installations have none; every commit of another table would ask for a read of this one
        change_token = self._database.change_token()
        if change_token is None or change_token != self._cached[0]:
            self._cached = (change_token, await self._load_all())
        return [*self._cached[1]]

    async def _load_all(self) -> list[RolloutState]:
        async with self._database.begin_read() as connection:
            rows = (await connection.execute(select(*_STATE_COLUMNS).order_by(rollouts.c.name))).mappings().all()
        return [_parse_state(row) for row in rows]

    async def change(self, name: str, change: RolloutChange) -> RolloutState:
        """Applies `change` to the state of a rollout and returns the new state."""
        async with self._database.begin() as connection:
            found = (await self._lock_rows(connection, name)).get(name)
            after = change(None if found is None else found[0])
            await self._write(connection, after, None if found is None else found[1])
        return after

    async def declare(self, declared: Mapping[str, Mapping[str, Any]]) -> None:
        """Applies the rollouts that the configuration declares.

        A new or changed declaration starts the rollout with a new trial. An unchanged declaration leaves the rollout as
        it is, with all later decisions. A rollout that is no longer declared ends.
        """
        now_s = self._clock.wall_s()
        async with self._database.begin() as connection:
            known = await self._lock_rows(connection)
            for name, settings in declared.items():
                state, previous = known.get(name, (None, None))
                if previous == settings:
                    continue
                base = state or RolloutState(name=name, settings={}, trial=0)
                await self._write(connection, base.start(dict(settings), now_s), settings)
            for name, (state, previous) in known.items():
                if previous is not None and name not in declared:
                    reason = "the configuration no longer names it"
                    await self._write(connection, state.with_phase(RolloutPhase.ENDED, now_s, reason), None)

    async def _lock_rows(
        self, connection: AsyncConnection, *names: str
    ) -> dict[str, tuple[RolloutState, Mapping[str, Any] | None]]:
        """Locks and returns the rows of some rollouts, or of all: their states and last declarations."""
        query = select(*_STATE_COLUMNS, rollouts.c.declared).with_for_update()
        if names:
            query = query.where(rollouts.c.name.in_(names))
        rows = (await connection.execute(query)).mappings().all()
        return {row["name"]: (_parse_state(row), row["declared"]) for row in rows}

    async def _write(
        self, connection: AsyncConnection, state: RolloutState, declared: Mapping[str, Any] | None
    ) -> None:
        values = {**msgspec.structs.asdict(state), "phase": state.phase.value, "declared": declared}
        insert = self._insert(rollouts).values(values)
        await connection.execute(insert.on_conflict_do_update(index_elements=[rollouts.c.name], set_=values))


def _parse_state(row: RowMapping) -> RolloutState:
    values = {name: row[name] for name in RolloutState.__struct_fields__}
    return RolloutState(**{**values, "phase": RolloutPhase(values["phase"])})
