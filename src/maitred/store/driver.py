"""How each database is spoken to: the settings of its connections, and how they are broken when time is up."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from sqlalchemy import event
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

WRITES = "maitred_writes"
"""Execution option of a connection whose transaction will write."""
ENDS_S = "maitred_ends_s"
"""Execution option: when its time is up, by the event loop's clock."""
_POLL_S = 0.05
T = TypeVar("T")
if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

    Insert = type[postgresql.Insert] | type[sqlite.Insert]


def make_engine(url: URL, deadline_s: float) -> AsyncEngine:
    """SQLAlchemy's engine for that address; it connects when it is first used."""
    make = _sqlite if url.get_backend_name() == "sqlite" else _postgres
    engine = make(url, deadline_s)
    _break_what_is_given_up(engine)
    return engine


def make_insert(engine: AsyncEngine) -> "Insert":
    """The insert statement of that database, which knows what to do with rows that are there already."""
    if engine.dialect.name == "sqlite":
        return sqlite.Insert
    # It takes a while to import, and only those who use it wait for it.
    from sqlalchemy.dialects import postgresql

    return postgresql.Insert


def _postgres(url: URL, deadline_s: float) -> AsyncEngine:
    deadline_ms = str(int(deadline_s * 1000))
    settings = {
        "application_name": "maitred",
        # What we have given up, the server gives up too; a gateway that hangs keeps no lock from the others.
        "statement_timeout": deadline_ms,
        "idle_in_transaction_session_timeout": deadline_ms,
        "jit": "off",  # Our statements are short; compiling them takes longer than running them.
    }
    engine = create_async_engine(
        url,
        isolation_level="READ COMMITTED",
        connect_args={"timeout": deadline_s, "server_settings": settings},
        pool_timeout=deadline_s,
        hide_parameters=True,
        **_json(),
    )

    @event.listens_for(engine.sync_engine, "checkout")
    def refuse_closed(connection: Any, _record: object, _proxy: object) -> None:  # noqa: ANN401 - the driver's.
        # After a restart of the server, no caller meets a connection that died with it. Asking the server itself would
        # cost each transaction a round trip.
        if connection.driver_connection.is_closed():
            raise DisconnectionError

    return engine


def _sqlite(url: URL, deadline_s: float) -> AsyncEngine:
    engine = create_async_engine(
        url,
        connect_args={"timeout": deadline_s},
        pool_timeout=deadline_s,
        hide_parameters=True,
        **_json(),
    )

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: Any, _record: object) -> None:  # noqa: ANN401 - the driver's, and each has its own.
        driver = connection.driver_connection
        driver.stop = _once(driver.stop)
        # The driver begins no transactions by itself: left alone, it would begin none for a SELECT.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys = ON")
        # With a write-ahead log, only a power cut can lose the last commits, and never corrupts the file.
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        # SQLite waits in a thread of its own, where nobody can reach it, so that it must know itself how long it may.
        # A writer that took its lock only at the first write could find that its view is too old by then.
        options = connection.get_execution_options()
        now_s = asyncio.get_running_loop().time()
        left_s = max(0.0, options.get(ENDS_S, now_s + deadline_s) - now_s)
        begin = "BEGIN IMMEDIATE" if options.get(WRITES, False) else "BEGIN"

        def begin_within(database: sqlite3.Connection) -> None:
            database.execute(f"PRAGMA busy_timeout = {int(left_s * 1000)}")
            database.execute(begin)

        adapter: Any = connection.connection.dbapi_connection
        adapter.run_async(lambda driver: _in_its_thread(driver, begin_within))

    return engine


async def in_one_go(connection: AsyncConnection, work: Callable[[sqlite3.Connection], T]) -> T:
    """Does all of `work` in SQLite's thread, where each statement by itself would wake that thread and this one."""
    return await _in_its_thread((await connection.get_raw_connection()).driver_connection, work)


async def _in_its_thread(driver: Any, work: Callable[[sqlite3.Connection], T]) -> T:  # noqa: ANN401 - aiosqlite's
    done: T = await driver._execute(work, driver._connection)  # its own methods are one statement each
    return done


def _once(stop: Callable[[], T]) -> Callable[[], T | None]:
    """For aiosqlite, whose thread ends when it is told to for the first time, and never answers who tells it again.

    Where a caller leaves while its connection is being closed, both the closing and SQLAlchemy's breaking off tell it:
    the closing would wait for good, and a program that ends would wait for the closing.
    """
    stopped = False

    def stop_once() -> T | None:
        nonlocal stopped
        if stopped:
            return None
        stopped = True
        return stop()

    return stop_once


def _json() -> dict[str, Any]:
    return {
        "json_serializer": lambda value: msgspec.json.encode(value).decode(),
        "json_deserializer": msgspec.json.decode,
    }


def _break_what_is_given_up(engine: AsyncEngine) -> None:
    """Has every connection that is not to be used again broken before it is closed.

    Closing it alone would wait for a server to say goodbye, which one that hangs never does, or for a statement to end.
    """

    @event.listens_for(engine.sync_engine, "invalidate")
    def break_it(connection: Any, _record: object, _error: object) -> None:  # noqa: ANN401 - the driver's.
        _break(connection.driver_connection)


def _break(driver: Any) -> None:  # noqa: ANN401 - each driver has its own type.
    breaker = make_breaker(driver)

    def again() -> None:
        """Until the connection is closed: a statement may still be on its way to SQLite's thread."""
        if breaker():
            with suppress(RuntimeError):  # Without a loop, the program ends.
                asyncio.get_running_loop().call_later(_POLL_S, again)

    again()


def make_breaker(driver: Any) -> Callable[[], bool]:  # noqa: ANN401
    """What ends whatever the connection does at that moment; it says whether the connection could do something yet."""
    if hasattr(driver, "terminate"):

        def drop() -> bool:
            driver.terminate()  # asyncpg drops the connection.
            return False

        return drop
    # Of SQLite itself: aiosqlite forgets it as soon as anybody wants to close it, while its thread still works on it.
    sqlite = driver._connection

    def interrupt() -> bool:
        try:
            sqlite.interrupt()
        except (AttributeError, sqlite3.ProgrammingError):
            return False  # It is closed, or was never open.
        return True

    return interrupt


class SqliteChangeProbe:
    """Of one file. Belongs to one thread.

    A transaction wakes SQLite's thread and is woken by it for each of its steps, which costs a hundred times what
    reading one number does. A probe has a connection of its own and is done at once, on the event loop: the number is
    in memory unless something was written, a write-ahead log makes no reader wait for a writer, and where anything else
    is in the way the probe gives up and its caller takes the long way. The journal, in a folder beside it, is written
    at once as well.

    Args:
        file: The database.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._connection: sqlite3.Connection | None = None
        self._connections = 0

    def at(self, query: str) -> int | None:
        """The number that a query gives; None: it cannot be told without waiting."""
        try:
            if self._connection is None:
                address = f"{self._file.absolute().as_uri()}?mode=rw"  # a file that is not there is not made
                self._connection = sqlite3.connect(address, timeout=0.0, isolation_level=None, uri=True)
                self._connections += 1
            return int(self._connection.execute(query).fetchone()[0])
        except sqlite3.Error:
            self.close()
            return None

    def mark(self) -> tuple[int, int] | None:
        """Another one when anybody has committed anything since; None: it cannot be told without waiting."""
        # The number is the connection's own, and one that is made anew may come to the same.
        version = self.at("PRAGMA data_version")
        return None if version is None else (self._connections, version)

    def close(self) -> None:
        """Lets go of the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
