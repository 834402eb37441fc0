"""Writes one batch of usage: the events that are not there yet, and what they charge, in one transaction.

Events are inserted unless their ids are there already, and the charges of exactly those that were new are added to
`spend`. So a batch may be written any number of times, by several writers at once, and counts once.

SQLite is given what it can take with the fewest steps: between two steps its thread hands the interpreter's lock to and
fro, which costs a busy gateway more than the rows do. So many rows go into one statement, always the same one, and
values are bound as they are.
"""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import JSON
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.usage import UsageEvent
from maitred.store.database import Database
from maitred.store.schema import StoredText, spend, usage

_COLUMNS = [column.name for column in usage.columns]
_TEXTS = [index for index, column in enumerate(usage.columns) if isinstance(column.type, StoredText)]
_JSONS = [index for index, column in enumerate(usage.columns) if isinstance(column.type, JSON)]
_VARIABLES = 999
"""Of one statement: as many as every SQLite takes."""
_ROWS = _VARIABLES // len(_COLUMNS)
_KNOWN = f"SELECT json_group_array(id) FROM {usage.name} WHERE id IN (SELECT value FROM json_each(?))"
_STORED = StoredText()
_SQLITE = sqlite.dialect()
_values = attrgetter(*_COLUMNS)
_encode = msgspec.json.encode


class BatchWriter:
    """Writes usage into a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._on_sqlite = database.engine.dialect.name == "sqlite"
        dialect = sqlite if self._on_sqlite else postgresql
        self._insert = dialect.insert(usage).on_conflict_do_nothing().returning(usage.c.id)
        charge = dialect.insert(spend)
        self._charge = charge.on_conflict_do_update(
            index_elements=[spend.c.counter],
            set_={"charged_nusd": spend.c.charged_nusd + charge.excluded.charged_nusd},
        )

    async def write(self, events: Sequence[UsageEvent]) -> None:
        """Writes what is new of these events.

        Raises:
            StoreUnavailable: The database cannot be written; nothing has changed, or all of it.
        """
        unique: dict[str, UsageEvent] = {}
        for event in events:
            unique.setdefault(event.id, event)
        if not unique:
            return
        # Everybody takes rows in the same order, so that two writers of the same events never wait for each other.
        ordered = [unique[identity] for identity in sorted(unique)]
        async with self._database.begin() as connection:
            insert = self._insert_on_sqlite if self._on_sqlite else self._insert_on_postgres
            charges: Counter[str] = Counter()
            for event in await insert(connection, ordered):
                charges.update(event.charges)
            if charges:
                changes = [{"counter": counter, "charged_nusd": charges[counter]} for counter in sorted(charges)]
                await connection.execute(self._charge, changes)

    async def _insert_on_postgres(self, connection: AsyncConnection, events: list[UsageEvent]) -> list[UsageEvent]:
        rows = [dict(zip(_COLUMNS, _row(event), strict=True)) for event in events]
        new = set(await connection.scalars(self._insert, rows))
        return [event for event in events if event.id in new]

    async def _insert_on_sqlite(self, connection: AsyncConnection, events: list[UsageEvent]) -> list[UsageEvent]:
        """Asks what is there first: a writer has SQLite to itself, so nothing comes in between."""
        ids = _encode([event.id for event in events]).decode()
        known = msgspec.json.decode((await connection.exec_driver_sql(_KNOWN, (ids,))).scalar_one(), type=set[str])
        new = [event for event in events if event.id not in known]
        whole = len(new) - len(new) % _ROWS
        rows = [_bound(event) for event in new]
        blocks = [tuple(value for row in rows[at : at + _ROWS] for value in row) for at in range(0, whole, _ROWS)]
        if blocks:
            await connection.exec_driver_sql(_insert_of(_ROWS), blocks)
        if rows[whole:]:
            await connection.exec_driver_sql(_insert_of(1), rows[whole:])
        return new


def _insert_of(rows: int) -> str:
    row = f"({', '.join('?' * len(_COLUMNS))})"
    columns = ", ".join(f'"{name}"' for name in _COLUMNS)
    return f"INSERT INTO {usage.name} ({columns}) VALUES {', '.join([row] * rows)}"


def _row(event: UsageEvent) -> list[Any]:
    """The columns in their order, as SQLAlchemy takes them."""
    row = list(_values(event))
    for index in _JSONS:
        row[index] = dict(row[index])
    return row


def _bound(event: UsageEvent) -> tuple[Any, ...]:
    """The columns in their order, as the driver of SQLite binds them."""
    row = list(_values(event))
    for index in _TEXTS:
        if not row[index].isprintable():
            row[index] = _STORED.process_bind_param(row[index], _SQLITE)
    for index in _JSONS:
        row[index] = _encode(row[index]).decode()
    return tuple(row)

