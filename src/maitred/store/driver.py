"""Connection settings of each database, and the code that breaks connections at their deadline."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from sqlalchemy import event
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

WRITES_OPTION = "maitred_writes"
"""Execution option of a connection: True if its transaction will write."""
DEADLINE_OPTION = "maitred_ends_s"
"""Execution option of a connection: end time of its transaction on the event loop's clock."""
_POLL_S = 0.05
T = TypeVar("T")
if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

    Insert = type[postgresql.Insert] | type[sqlite.Insert]


def make_engine(url: URL, deadline_s: float) -> AsyncEngine:
    """Makes SQLAlchemy's engine for an address; the engine connects when it is first used."""
    make = _sqlite if url.get_backend_name() == "sqlite" else _postgres
    engine = make(url, deadline_s)
    _break_on_invalidate(engine)
    return engine


def make_insert(engine: AsyncEngine) -> "Insert":
    """Returns the insert class of the database, which supports rows that exist already."""
    if engine.dialect.name == "sqlite":
        return sqlite.Insert
    # The import is slow, so it happens only when PostgreSQL is used.
    from sqlalchemy.dialects import postgresql

    return postgresql.Insert


def _postgres(url: URL, deadline_s: float) -> AsyncEngine:
    deadline_ms = str(int(deadline_s * 1000))
    settings = {
        "application_name": "maitred",
        # The server cancels statements that this process no longer waits for; a gateway that hangs therefore holds no
        # locks.
        "statement_timeout": deadline_ms,
        "idle_in_transaction_session_timeout": deadline_ms,
        "jit": "off",  # The statements of maitred are short, and compiling them takes longer than running them.
    }
    engine = create_async_engine(
        url,
        isolation_level="READ COMMITTED",
        connect_args={"timeout": deadline_s, "server_settings": settings},
        pool_timeout=deadline_s,
        hide_parameters=True,
        **_json_options(),
    )

    @event.listens_for(engine.sync_engine, "checkout")
    def refuse_closed(connection: Any, _record: object, _proxy: object) -> None:  # noqa: ANN401 - the driver's.
        # This check keeps callers from getting a connection that ended when the server restarted. A query to the server
        # would cost each transaction one round trip.
        if connection.driver_connection.is_closed():
            raise DisconnectionError

    return engine


def _sqlite(url: URL, deadline_s: float) -> AsyncEngine:
    engine = create_async_engine(
        url,
        connect_args={"timeout": deadline_s},
        pool_timeout=deadline_s,
        hide_parameters=True,
        **_json_options(),
    )

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: Any, _record: object) -> None:  # noqa: ANN401 - the driver's, and each has its own.
        driver = connection.driver_connection
        driver.stop = _call_once(driver.stop)
        # The driver must not begin transactions by itself, because it would begin none for a SELECT.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys = ON")
        # With a write-ahead log, only a power failure can lose the last commits, and the file is never corrupted.
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        # SQLite waits in its own thread, which cannot be interrupted, so SQLite itself must know the deadline.
        # If a writer took its lock only at its first write, its snapshot could be outdated by then.
        options = connection.get_execution_options()
        now_s = asyncio.get_running_loop().time()
        remaining_s = max(0.0, options.get(DEADLINE_OPTION, now_s + deadline_s) - now_s)
        begin = "BEGIN IMMEDIATE" if options.get(WRITES_OPTION, False) else "BEGIN"

        def begin_within(database: sqlite3.Connection) -> None:
            database.execute(f"PRAGMA busy_timeout = {int(remaining_s * 1000)}")
            database.execute(begin)

        adapter: Any = connection.connection.dbapi_connection
        adapter.run_async(partial(_run_in_driver_thread, operation=begin_within))

    return engine


async def run_in_sqlite_thread(connection: AsyncConnection, operation: Callable[[sqlite3.Connection], T]) -> T:
    """Runs `operation` in SQLite's thread in one call, so that both threads wake only once."""
    return await _run_in_driver_thread((await connection.get_raw_connection()).driver_connection, operation)


async def _run_in_driver_thread(driver: Any, operation: Callable[[sqlite3.Connection], T]) -> T:  # noqa: ANN401 - aiosqlite's
    result: T = await driver._execute(operation, driver._connection)  # each method of aiosqlite runs only one statement
    return result


def _call_once(stop: Callable[[], T]) -> Callable[[], T | None]:
    """Wraps aiosqlite's `stop` so that only the first call runs it.

    The thread of the driver ends at the first call and never answers a second call. When a caller is cancelled while
    its connection is being closed, both the closing and SQLAlchemy's invalidation call `stop`: without this wrapper the
    closing would wait forever, and the program's exit would wait for the closing.
    """
    stopped = False

    def stop_once() -> T | None:
        nonlocal stopped
        if stopped:
            return None
        stopped = True
        return stop()

    return stop_once


def _json_options() -> dict[str, Any]:
    return {
        "json_serializer": lambda value: msgspec.json.encode(value).decode(),
        "json_deserializer": msgspec.json.decode,
    }


def _break_on_invalidate(engine: AsyncEngine) -> None:
    """Breaks every connection that is invalidated, before it is closed.

    Without this, closing would wait for a reply from the server, which a hanging server never sends, or for the end of
    a statement.
    """

    @event.listens_for(engine.sync_engine, "invalidate")
    def break_it(connection: Any, _record: object, _error: object) -> None:  # noqa: ANN401 - the driver's.
        _break_connection(connection.driver_connection)


def _break_connection(driver: Any) -> None:  # noqa: ANN401 - each driver has its own type.
    breaker = make_breaker(driver)

    def again() -> None:
        """Interrupts repeatedly until the connection is closed.

        A statement may still be on its way to SQLite's thread.
        """
        if breaker():
            with suppress(RuntimeError):  # If no event loop runs, the program is ending.
                asyncio.get_running_loop().call_later(_POLL_S, again)

    again()


def make_breaker(driver: Any) -> Callable[[], bool]:  # noqa: ANN401
    """Returns a function that aborts the current operation of a connection.

    The function returns True if the connection may still be running an operation.
    """
    if hasattr(driver, "terminate"):

        def drop() -> bool:
            driver.terminate()  # asyncpg drops the connection.
            return False

        return drop
    # This is SQLite's own connection: aiosqlite drops its reference when closing begins, while its thread still uses
    # the connection.
    connection = driver._connection

    def interrupt() -> bool:
        try:
            connection.interrupt()
        except (AttributeError, sqlite3.ProgrammingError):
            return False  # The connection is closed, or it was never open.
        return True

    return interrupt


class SqliteChangeProbe:
    """Probe that detects commits to one SQLite file without a transaction.

    Each probe belongs to one thread.

    A transaction exchanges wake-ups with SQLite's thread for each of its steps, which costs a hundred times as much as
    reading one number. A probe has its own connection and answers at once on the event loop: the number is in memory
    unless something was written, readers never wait for a writer with a write-ahead log, and in all other cases the
    probe returns None and its caller uses a transaction. The journal, in a folder next to the database, is also written
    synchronously.

    Args:
        file: The database.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._connection: sqlite3.Connection | None = None
        self._connections = 0

    def read(self, query: str) -> int | None:
        """Runs a query for one number, or returns None if the answer would require waiting."""
        try:
            if self._connection is None:
                address = f"{self._file.absolute().as_uri()}?mode=rw"  # this mode never creates a missing file
                self._connection = sqlite3.connect(address, timeout=0.0, isolation_level=None, uri=True)
                self._connections += 1
            return int(self._connection.execute(query).fetchone()[0])
        except sqlite3.Error:
            self.close()
            return None

    def change_token(self) -> tuple[int, int] | None:
        """Returns a token that changes with every commit of any process, or None if reading it would wait."""
        # `data_version` is specific to a connection, and a new connection may have the same number.
        version = self.read("PRAGMA data_version")
        return None if version is None else (self._connections, version)

    def close(self) -> None:
        """Closes the probe's connection to the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
