"""Batches of usage events, written in one transaction each from a bounded queue of journaled events.

The database inserts each event whose id it does not have yet, and adds the charge of each inserted event to `spend`. A
batch may therefore be written several times, and by several writers at once: each event still counts once.

The thread of SQLite writes a whole batch in one call. If each statement were a separate call, that thread and the event
loop would exchange the interpreter lock at every statement, which costs a busy gateway more time than writing the rows.

The backlog has the events that are in the journal and not yet in the database. The backlog holds a bounded number of
events in memory; all further events are only in the journal. The queue in memory always holds the oldest part of the
backlog: after one event is left out of the queue, all newer events are left out too, until the queue has been refilled
from the journal up to its end.
"""

import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import update
from sqlalchemy.dialects import sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.errors import StoreUnavailable
from maitred.core.stored_response import StoredItem, StoredResponse
from maitred.core.usage import UsageEvent
from maitred.store.conversations import append_items
from maitred.store.database import Database
from maitred.store.driver import make_insert, run_in_sqlite_thread
from maitred.store.journal import Journal, JournalPosition
from maitred.store.schema import StoredText, response_items, responses, row_of, spend, usage

log = logging.getLogger(__name__)

_COLUMN_NAMES = [column.name for column in usage.columns]
_TEXT_NAMES = [column.name for column in usage.columns if isinstance(column.type, StoredText)]
_get_texts = attrgetter(*_TEXT_NAMES)
_get_values = attrgetter(*_COLUMN_NAMES)
_LAST_ROWID_SQL = f"SELECT coalesce(max(rowid), 0) FROM {usage.name}"
_NEW_IDS_SQL = f"SELECT id FROM {usage.name} WHERE rowid > ?"
_INSERT_SQL = f"INSERT INTO {usage.name} VALUES ({', '.join('?' * len(_COLUMN_NAMES))}) ON CONFLICT DO NOTHING"
_ADD_CHARGE_SQL = (
    f"INSERT INTO {spend.name} VALUES (?, ?) "
    "ON CONFLICT (counter) DO UPDATE SET charged_nusd = charged_nusd + excluded.charged_nusd"
)
_TEXT_TYPE = StoredText()
_SQLITE_DIALECT = sqlite.dialect()
_encode = msgspec.json.encode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode


class BatchWriter:
    """Writer of usage events and their charges into a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_sqlite = database.engine.dialect.name == "sqlite"
        insert = make_insert(database.engine)
        self._insert = insert(usage).on_conflict_do_nothing().returning(usage.c.id)
        self._insert_response = insert(responses).on_conflict_do_nothing()
        self._insert_item = insert(response_items).on_conflict_do_nothing()
        charge = insert(spend)
        self._charge = charge.on_conflict_do_update(
            index_elements=[spend.c.counter],
            set_={"charged_nusd": spend.c.charged_nusd + charge.excluded.charged_nusd},
        )

    async def write(self, events: Sequence[UsageEvent], stored: Sequence[StoredResponse] = ()) -> None:
        """Writes each event that is not in the database yet, and responses, in one transaction.

        Raises:
            StoreUnavailable: The database cannot be written; then the database has either the whole batch or nothing of
                it.
        """
        unique: dict[str, UsageEvent] = {}
        for event in events:
            unique.setdefault(event.id, event)
        if not unique and not stored:
            return
        # All writers take rows in the same order, so that two writers of the same events never deadlock.
        ordered = sorted(unique.values(), key=attrgetter("id"))
        async with self._database.begin() as connection:
            if self._is_sqlite:
                rows = list(map(_row, ordered))
                await run_in_sqlite_thread(connection, lambda database: _write(database, ordered, rows))
            elif ordered:
                await self._write_on_postgres(connection, ordered)
            if new := [response for response in stored if response.owner is None]:
                await connection.execute(self._insert_response, [row_of(responses, response) for response in new])
            # In the order of their conversations, so that two writers never deadlock.
            for response in sorted(stored, key=lambda response: (response.conversation or "", response.id)):
                is_written = response.owner is None or await _end_claimed(connection, response)
                if is_written and response.item_ids:
                    named = [{"item": item_id, "response": response.id} for item_id in response.item_ids]
                    await connection.execute(self._insert_item, named)
                if is_written and response.conversation is not None:
                    await append_items(connection, response.conversation, _items_of(response), response.expires_s)

    async def _write_on_postgres(self, connection: AsyncConnection, events: list[UsageEvent]) -> None:
        rows = [{**msgspec.structs.asdict(event), "outcome": event.outcome.value} for event in events]
        new_ids = set(await connection.scalars(self._insert, rows))
        charges = _sum_charges(event for event in events if event.id in new_ids)
        if charges:
            await connection.execute(
                self._charge, [{"counter": counter, "charged_nusd": charged} for counter, charged in charges]
            )


async def _end_claimed(connection: AsyncConnection, response: StoredResponse) -> bool:
    """Writes the end of a response if its gateway still owns it; returns whether it did."""
    change = update(responses).where(responses.c.id == response.id, responses.c.owner == response.owner)
    ended = await connection.execute(
        change.values(
            previous=response.previous,
            output=response.output,
            resource=response.resource,
            last_event=response.last_event,
            owner=None,
            claimed_until_s=None,
        )
    )
    return ended.rowcount > 0


def _write(database: sqlite3.Connection, events: list[UsageEvent], rows: list[tuple[Any, ...]]) -> None:
    """Writes events and charges in SQLite's thread, within a transaction that excludes other writers.

    Row numbers grow with each insertion and rows are never deleted, so the new rows are those after the previously last
    row.
    """
    (last_rowid,) = database.execute(_LAST_ROWID_SQL).fetchone()
    changes_before = database.total_changes
    database.executemany(_INSERT_SQL, rows)
    if database.total_changes - changes_before < len(rows):
        new_ids = {event_id for (event_id,) in database.execute(_NEW_IDS_SQL, (last_rowid,))}
        events = [event for event in events if _storable_text(event.id) in new_ids]
    database.executemany(
        _ADD_CHARGE_SQL, [(_storable_text(counter), charged) for counter, charged in _sum_charges(events)]
    )


def _items_of(response: StoredResponse) -> list[StoredItem]:
    """Returns the items that a response adds to its conversation."""
    items = [item for items in (response.input, response.output) for item in _decode_items(items)]
    return [StoredItem(item["id"], _encode(item)) for item in items]


def _sum_charges(events: Iterable[UsageEvent]) -> list[tuple[str, int]]:
    """Sums the charges of events by counter, in an order that is the same for all writers."""
    sums: dict[str, int] = {}
    for event in events:
        for counter, amount in event.charges.items():
            sums[counter] = sums.get(counter, 0) + amount
    return sorted(sums.items())


def _row(event: UsageEvent) -> tuple[Any, ...]:
    """Returns the columns of an event in their order, as the driver of SQLite takes them."""
    texts = _get_texts(event)
    if not "".join(texts).isprintable():
        event = msgspec.structs.replace(
            event, **{name: _storable_text(text) for name, text in zip(_TEXT_NAMES, texts, strict=True)}
        )
    *values, outcome, charges, taken, rollout, cache_write_tokens, cache, saved_tokens = _get_values(event)
    maps = _encode(charges).decode(), _encode(taken).decode()
    return (*values, str(outcome), *maps, rollout, cache_write_tokens, cache, saved_tokens)


def _storable_text(text: str) -> str:
    return text if text.isprintable() else _TEXT_TYPE.process_bind_param(text, _SQLITE_DIALECT) or ""


_REFILL_EVENTS = 1_000
"""Number of events that one read of the journal returns; it takes the loop a few milliseconds."""


class _Entry(msgspec.Struct):
    """Event that is to be written."""

    event: UsageEvent
    response: str
    """Id of the response that it is written with; empty: it can be written at any time."""
    before: JournalPosition
    """Position in the journal before it."""


class Backlog:
    """Journaled events in their order; each one stays until it is written to the database.

    An event whose answer is stored as a response waits for it: both are written together, or `release` lets the event
    go without it.

    Args:
        journal: The journal; the backlog owns it and closes it.
        max_events: Largest number of events that are held in memory, about 1 KiB each.
    """

    def __init__(self, journal: Journal, *, max_events: int = 10_000) -> None:
        self._journal = journal
        self._max_events = max_events
        self._queue: dict[int, _Entry] = {}
        self._next_number = 0
        self._read_up_to = journal.first_position
        """Position up to which all events are in the queue, or in the database."""
        self._journal_only = 0
        self._journal_only_charges: Counter[str] = Counter()
        self._waiting: dict[str, list[int]] = {}
        """Numbers of the events that wait for a response, by its id."""

    def __len__(self) -> int:
        return len(self._queue) + self._journal_only

    def add(self, event: UsageEvent, response: str = "") -> int:
        """Journals an event and adds it to the backlog.

        Args:
            event: The event.
            response: Id of the response that the event waits for. It does not wait if it does not fit in memory.

        Returns:
            Number of events in the backlog after the addition.

        Raises:
            StoreUnavailable: The journal cannot take the event; nothing has changed.
        """
        count = len(self._queue)
        if self._journal_only or count >= self._max_events:
            self._journal.record(event)
            self._journal_only += 1
            self._journal_only_charges.update(event.charges)
            return count + self._journal_only
        position = self._journal.record(event, response)
        if response:
            self._waiting.setdefault(response, []).append(self._next_number)
        self._append(event, response, position)
        return count + 1

    def awaits(self, response: str) -> bool:
        """Whether events wait for a response."""
        return response in self._waiting

    def oldest_events(self, limit: int, responses: Iterable[str] = ()) -> Mapping[int, UsageEvent]:
        """Returns the oldest events that wait for no response, and leaves them in the backlog.

        Args:
            limit: Largest number of them.
            responses: Ids of responses that are written with them: the events that wait for these are returned, too.

        Returns:
            Maps a number of the event, for `mark_written`, to the event.

        Raises:
            StoreUnavailable: The events are only in the journal, and the journal cannot be read.
        """
        if not self._queue and self._journal_only:
            found = self._journal.read(self._read_up_to, _REFILL_EVENTS)
            for event, position in found:
                self._append(event, "", position)
                self._journal_only_charges.subtract(event.charges)
            self._journal_only_charges = +self._journal_only_charges
            # The journal returned fewer events than expected, because the disk has lost some. The charges of the lost
            # events stay here, so that budgets still count them while this process lives.
            self._journal_only = self._journal_only - len(found) if len(found) == _REFILL_EVENTS else 0
        free = ((number, entry.event) for number, entry in self._queue.items() if not entry.response)
        chosen = dict(islice(free, limit))
        for response in responses:
            chosen |= {number: self._queue[number].event for number in self._waiting.get(response, ())}
        return chosen

    def mark_written(self, numbers: Iterable[int]) -> None:
        """Removes events, which are in the database now."""
        for number in numbers:
            entry = self._queue.pop(number)
            self._waiting.pop(entry.response, None)
        self._journal.release(self._written_up_to)

    def release(self, response: str) -> None:
        """Lets the events that wait for a response go without it, because it is not stored."""
        for number in self._waiting.pop(response, ()):
            entry = self._queue[number]
            entry.response = ""
            try:
                self._journal.release_event(entry.event.id)
            except StoreUnavailable as error:
                log.warning("If this gateway dies now, request %s is not billed: %s", entry.event.request_id, error)

    def pending_charges(self, counters: Sequence[str]) -> dict[str, int]:
        """Returns what the events of the backlog charge to the given counters."""
        charges = {counter: self._journal_only_charges[counter] for counter in counters}
        for entry in self._queue.values():
            for counter in entry.event.charges.keys() & charges.keys():
                charges[counter] += entry.event.charges[counter]
        return charges

    @property
    def oldest_s(self) -> float | None:
        """Wall time of the oldest event, or None if the backlog is empty."""
        return None if (oldest := self._oldest) is None else oldest.event.time_s

    def close(self) -> None:
        """Closes the journal; events that are not written stay in it."""
        self._journal.close(self._written_up_to)

    @property
    def _oldest(self) -> _Entry | None:
        return next(iter(self._queue.values()), None)

    @property
    def _written_up_to(self) -> JournalPosition:
        """Position up to which the database has all events."""
        return self._read_up_to if (oldest := self._oldest) is None else oldest.before

    def _append(self, event: UsageEvent, response: str, position: JournalPosition) -> None:
        self._queue[self._next_number] = _Entry(event, response, self._read_up_to)
        self._next_number += 1
        self._read_up_to = position
