"""Writes one batch of usage: the events that are not there yet, and what they charge, in one transaction.

Events are inserted unless their ids are there already, and the charges of exactly those that were new are added to
`spend`. So a batch may be written any number of times, by several writers at once, and counts once.

SQLite gets a whole batch in one go in its own thread. Step by step, that thread and the event loop would hand the
interpreter's lock to and fro for each, which costs a busy gateway more than the rows do.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy.dialects import sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.usage import UsageEvent
from maitred.store.database import Database
from maitred.store.driver import in_one_go, make_insert
from maitred.store.schema import StoredText, spend, usage

_COLUMNS = [column.name for column in usage.columns]
_TEXT_NAMES = [column.name for column in usage.columns if isinstance(column.type, StoredText)]
_TEXTS = attrgetter(*_TEXT_NAMES)
_VALUES = attrgetter(*_COLUMNS)
_NEWEST = f"SELECT coalesce(max(rowid), 0) FROM {usage.name}"
_NEWER = f"SELECT id FROM {usage.name} WHERE rowid > ?"
_INSERT = f"INSERT INTO {usage.name} VALUES ({', '.join('?' * len(_COLUMNS))}) ON CONFLICT DO NOTHING"
_ADD = (
    f"INSERT INTO {spend.name} VALUES (?, ?) "
    "ON CONFLICT (counter) DO UPDATE SET charged_nusd = charged_nusd + excluded.charged_nusd"
)
_STORED = StoredText()
_SQLITE = sqlite.dialect()
_encode = msgspec.json.encode


class BatchWriter:
    """Writes usage into a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._on_sqlite = database.engine.dialect.name == "sqlite"
        insert = make_insert(database.engine)
        self._insert = insert(usage).on_conflict_do_nothing().returning(usage.c.id)
        charge = insert(spend)
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
            if self._on_sqlite:
                rows = [_row(event) for event in ordered]
                await in_one_go(connection, lambda database: _write(database, ordered, rows))
            else:
                await self._write_on_postgres(connection, ordered)

    async def _write_on_postgres(self, connection: AsyncConnection, events: list[UsageEvent]) -> None:
        rows = [{**msgspec.structs.asdict(event), "outcome": event.outcome.value} for event in events]
        new = set(await connection.scalars(self._insert, rows))
        charges = _make_charges(event for event in events if event.id in new)
        if charges:
            await connection.execute(
                self._charge, [{"counter": counter, "charged_nusd": charged} for counter, charged in charges]
            )


def _write(database: sqlite3.Connection, events: list[UsageEvent], rows: list[tuple[Any, ...]]) -> None:
    """Runs in SQLite's thread, within a transaction: nobody else writes meanwhile.

    Rows are numbered as they come and never deleted, so the new ones are those after the one that was the last.
    """
    (newest,) = database.execute(_NEWEST).fetchone()
    before = database.total_changes
    database.executemany(_INSERT, rows)
    if database.total_changes - before < len(rows):
        new = {identity for (identity,) in database.execute(_NEWER, (newest,))}
        events = [event for event in events if _stored(event.id) in new]
    database.executemany(_ADD, [(_stored(counter), charged) for counter, charged in _make_charges(events)])


def _make_charges(events: Iterable[UsageEvent]) -> list[tuple[str, int]]:
    """What they charge together, in an order that is the same for everybody."""
    sums: dict[str, int] = {}
    for event in events:
        for counter, amount in event.charges.items():
            sums[counter] = sums.get(counter, 0) + amount
    return sorted(sums.items())


def _row(event: UsageEvent) -> tuple[Any, ...]:
    """The columns in their order, as the driver of SQLite takes them."""
    texts = _TEXTS(event)
    if not "".join(texts).isprintable():
        event = msgspec.structs.replace(
            event, **{name: _stored(text) for name, text in zip(_TEXT_NAMES, texts, strict=True)}
        )
    *values, outcome, charges, taken, rollout = _VALUES(event)
    return (*values, outcome.value, _encode(charges).decode(), _encode(taken).decode(), rollout)


def _stored(text: str) -> str:
    return text if text.isprintable() else _STORED.process_bind_param(text, _SQLITE) or ""
