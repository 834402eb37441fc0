"""Rollouts, as all gateways of an installation know them.

Whoever changes one reads it, decides and writes in one transaction that holds its row, so that of an operator and a
verdict that meet, the second sees what the first has done. There are a handful of rows, and each gateway reads all of
them about once a second.
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

Change = Callable[[RolloutState | None], RolloutState]
"""What a rollout becomes; None: there has never been one of that name. What it raises changes nothing."""

_STATE = [rollouts.c[name] for name in RolloutState.__struct_fields__]


class RolloutStore:
    """Reads and writes them. Every method may raise `StoreUnavailable`.

    Args:
        database: Where they are.
        clock: For the times of changes.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._insert = make_insert(database.engine)
        self._read: tuple[tuple[int, int] | None, list[RolloutState]] = (None, [])
        """What was read last, and a mark from before it was."""

    async def all(self) -> list[RolloutState]:
        """As they are now, by name; those that have ended, too."""
        mark = self._database.mark()
        if mark is None or mark != self._read[0]:
            self._read = (mark, await self._all())
        return [*self._read[1]]

    async def _all(self) -> list[RolloutState]:
        async with self._database.reading() as connection:
            rows = (await connection.execute(select(*_STATE).order_by(rollouts.c.name))).mappings().all()
        return [_state(row) for row in rows]

    async def change(self, name: str, change: Change) -> RolloutState:
        """Makes one what `change` says, given what it is."""
        async with self._database.begin() as connection:
            found = (await self._rows(connection, name)).get(name)
            after = change(None if found is None else found[0])
            await self._write(connection, after, None if found is None else found[1])
        return after

    async def declare(self, declared: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over what the configuration says.

        What it says for the first time, or otherwise than before, begins, with a trial of its own; what it says as
        before stays as it is, whatever was decided since; what it no longer says ends.
        """
        now_s = self._clock.wall_s()
        async with self._database.begin() as connection:
            known = await self._rows(connection)
            for name, settings in declared.items():
                state, before = known.get(name, (None, None))
                if before == settings:
                    continue
                blank = state or RolloutState(name=name, settings={}, trial=0)
                await self._write(connection, blank.started(dict(settings), now_s), settings)
            for name, (state, before) in known.items():
                if before is not None and name not in declared:
                    why = "the configuration no longer names it"
                    await self._write(connection, state.moved(RolloutPhase.ENDED, now_s, why), None)

    async def _rows(
        self, connection: AsyncConnection, *names: str
    ) -> dict[str, tuple[RolloutState, Mapping[str, Any] | None]]:
        """What is known of these, or of all, and what the configuration last said of each; nobody else changes them."""
        query = select(*_STATE, rollouts.c.declared).with_for_update()
        if names:
            query = query.where(rollouts.c.name.in_(names))
        rows = (await connection.execute(query)).mappings().all()
        return {row["name"]: (_state(row), row["declared"]) for row in rows}

    async def _write(
        self, connection: AsyncConnection, state: RolloutState, declared: Mapping[str, Any] | None
    ) -> None:
        values = {**msgspec.structs.asdict(state), "phase": state.phase.value, "declared": declared}
        insert = self._insert(rollouts).values(values)
        await connection.execute(insert.on_conflict_do_update(index_elements=[rollouts.c.name], set_=values))


def _state(row: RowMapping) -> RolloutState:
    values = {name: row[name] for name in RolloutState.__struct_fields__}
    return RolloutState(**{**values, "phase": RolloutPhase(values["phase"])})
