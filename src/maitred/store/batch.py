"""Writes one batch of usage: the events that are not there yet, and what they charge, in one transaction.

Events are inserted unless their ids are there already, and the charges of exactly those that were new are added to
`spend`. So a batch may be written any number of times, by several writers at once, and counts once.

SQLite is given what it can take with the fewest steps: between two steps its thread hands the interpreter's lock to and
fro, which costs a busy gateway more than the rows do. So many rows go into one statement, and values are bound as they
are.
"""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import JSON, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.usage import UsageEvent
from maitred.store.database import Database
from maitred.store.schema import StoredText, spend, usage

_COLUMNS = [column.name for column in usage.columns]
_TEXTS = [index for index, column in enumerate(usage.columns) if isinstance(column.type, StoredText)]
_JSONS = [index for index, column in enumerate(usage.columns) if isinstance(column.type, JSON)]
_VARIABLES = 32_766 if sqlite3.sqlite_version_info >= (3, 32) else 999
"""Of one statement in SQLite, at most."""
_KNOWN = f"SELECT json_group_array(id) FROM {usage.name} WHERE id IN (SELECT value FROM json_each(?))"
_ADD = "ON CONFLICT (counter) DO UPDATE SET charged_nusd = charged_nusd + excluded.charged_nusd"
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
                add = self._add_on_sqlite if self._on_sqlite else self._add_on_postgres
                await add(connection, sorted(charges.items()))

    async def _insert_on_postgres(self, connection: AsyncConnection, events: list[UsageEvent]) -> list[UsageEvent]:
        rows = [dict(zip(_COLUMNS, _row(event), strict=True)) for event in events]
        new = set(await connection.scalars(self._insert, rows))
        return [event for event in events if event.id in new]

    async def _insert_on_sqlite(self, connection: AsyncConnection, events: list[UsageEvent]) -> list[UsageEvent]:
        """Asks what is there first: a writer has SQLite to itself, so nothing comes in between."""
        ids = _encode([event.id for event in events]).decode()
        known = msgspec.json.decode((await connection.exec_driver_sql(_KNOWN, (ids,))).scalar_one(), type=set[str])
        new = [event for event in events if event.id not in known]
        await _fill(connection, usage, [_bound(event) for event in new])
        return new

    async def _add_on_postgres(self, connection: AsyncConnection, charges: list[tuple[str, int]]) -> None:
        rows = [{"counter": counter, "charged_nusd": charged} for counter, charged in charges]
        await connection.execute(self._charge, rows)

    async def _add_on_sqlite(self, connection: AsyncConnection, charges: list[tuple[str, int]]) -> None:
        rows = [(_text(counter), charged) for counter, charged in charges]
        await _fill(connection, spend, rows, _ADD)


async def _fill(connection: AsyncConnection, table: Table, rows: list[tuple[Any, ...]], then: str = "") -> None:
    """Inserts rows with as few statements as their variables allow."""
    names = ", ".join(f'"{column.name}"' for column in table.columns)
    row = f"({', '.join('?' * len(table.columns))})"
    most = _VARIABLES // len(table.columns)
    for at in range(0, len(rows), most):
        block = rows[at : at + most]
        statement = f"INSERT INTO {table.name} ({names}) VALUES {', '.join([row] * len(block))} {then}"
        await connection.exec_driver_sql(statement, tuple(chain.from_iterable(block)))


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
        row[index] = _text(row[index])
    for index in _JSONS:
        row[index] = _encode(row[index]).decode()
    return tuple(row)


def _text(value: str) -> str | None:
    return value if value.isprintable() else _STORED.process_bind_param(value, _SQLITE)
