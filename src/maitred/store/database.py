"""The database: SQLite in a folder of this gateway, or PostgreSQL that several share.

Everything that reads or writes does so within `Database.reading` or `Database.begin`: one transaction, with a
deadline, whose errors say either that the database is away (`StoreUnavailable`) or that we made a mistake.
"""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from maitred.core.errors import MaitredError, StoreUnavailable
from maitred.store.config import StoreConfig
from maitred.store.migration import migrate
from maitred.store.outage import is_outage
from maitred.store.place import data_folder, database_url, make_folder

__all__ = ["Database", "data_folder", "open_database"]

_MIGRATION_DEADLINE_S = 120.0
_POLL_S = 0.05
_WRITES = "maitred_writes"
"""Execution option of a connection whose transaction will write."""
_ENDS_S = "maitred_ends_s"
"""Execution option: when its time is up, by the event loop's clock."""


class Database:
    """A database that is open and has its tables.

    Args:
        engine: SQLAlchemy's.
        deadline_s: Of every transaction.
    """

    def __init__(self, engine: AsyncEngine, deadline_s: float) -> None:
        self.engine = engine
        self._deadline_s = deadline_s
        # SQLite has one writer. Queueing here wakes the next at once, where SQLite itself would poll.
        self._turn = asyncio.Lock() if engine.dialect.name == "sqlite" else None

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that sees one moment, however many statements it has.

        Raises:
            StoreUnavailable: The database is away, or too slow.
        """
        options = {"isolation_level": "REPEATABLE READ"} if self.engine.dialect.name == "postgresql" else {}
        async with self._transaction(self._deadline_s, options) as connection:
            yield connection

    @asynccontextmanager
    async def begin(self, deadline_s: float | None = None) -> AsyncIterator[AsyncConnection]:
        """A transaction that is committed at the end, and undone when the body raises.

        Raises:
            StoreUnavailable: The database is away, or too slow. If the connection broke while it committed, the change
                may have happened.
        """
        async with self._transaction(deadline_s or self._deadline_s, {_WRITES: True}, self._turn) as connection:
            yield connection

    @asynccontextmanager
    async def _transaction(
        self, deadline_s: float, options: dict[str, Any], turn: asyncio.Lock | None = None
    ) -> AsyncIterator[AsyncConnection]:
        ends_s = asyncio.get_running_loop().time() + deadline_s
        try:
            async with (
                asyncio.timeout_at(ends_s) as timeout,
                turn or nullcontext(),
                self.engine.connect() as connection,
            ):
                await connection.execution_options(**options, **{_ENDS_S: ends_s})
                async with _hanging_up(connection, ends_s):
                    await connection.begin()
                    yield connection
                    await connection.commit()
        except MaitredError:
            raise
        except Exception as error:
            if is_outage(error) or (isinstance(error, DBAPIError) and timeout.expired()):
                raise StoreUnavailable from error
            raise


@asynccontextmanager
async def _hanging_up(connection: AsyncConnection, ends_s: float) -> AsyncIterator[None]:
    """Breaks the connection when time is up or the caller leaves."""
    driver = (await connection.get_raw_connection()).driver_connection
    timer = asyncio.get_running_loop().call_at(ends_s, _hang_up, driver)
    try:
        yield
    except asyncio.CancelledError:
        await connection.invalidate()
        raise
    except BaseException:
        # What went wrong first says more than that it cannot be undone on a connection that is lost.
        with suppress(Exception):
            await connection.rollback()
        raise
    finally:
        timer.cancel()


def _hang_up_when_given_up(engine: AsyncEngine) -> None:
    """Has every connection that is not to be used again broken before it is closed.

    Closing it alone would wait for a server to say goodbye, which one that hangs never does, or for a statement to end.
    """

    @event.listens_for(engine.sync_engine, "invalidate")
    def hang_up(connection: Any, _record: object, _error: object) -> None:  # noqa: ANN401 - the driver's.
        _break(connection.driver_connection)


def _break(driver: Any) -> None:  # noqa: ANN401 - each driver has its own type.
    """Hangs up until the connection is closed: a statement may still be on its way to SQLite's thread."""
    if _hang_up(driver):
        with suppress(RuntimeError):  # Without a loop, the program ends.
            asyncio.get_running_loop().call_later(_POLL_S, _break, driver)


def _hang_up(driver: Any) -> bool:  # noqa: ANN401
    """Ends whatever the connection does now; says whether it could do something yet."""
    if hasattr(driver, "terminate"):
        driver.terminate()  # asyncpg drops the connection.
        return False
    try:
        # aiosqlite makes the statement that runs in its thread give up. Its coroutine waits for nothing, so that one
        # step runs it whole.
        driver.interrupt().send(None)
    except StopIteration:
        return True
    except (ValueError, sqlite3.ProgrammingError):
        return False  # It is closed.
    return True


@asynccontextmanager
async def open_database(config: StoreConfig) -> AsyncIterator[Database]:
    """Opens the database, makes or updates its tables, and closes it at the end.

    Raises:
        ConfigInvalid: The settings name no database that could be used.
        StoreUnavailable: It cannot be reached now.
    """
    url = database_url(config)
    engine = _sqlite(url, config) if url.get_backend_name() == "sqlite" else _postgres(url, config)
    _hang_up_when_given_up(engine)
    database = Database(engine, config.deadline_s)
    try:
        async with AsyncExitStack() as stack:
            if url.database is not None and url.get_backend_name() == "sqlite":
                await stack.enter_async_context(_opening_alone(Path(url.database)))
                await _keep_write_ahead_log(engine)
            connection = await stack.enter_async_context(database.begin(_MIGRATION_DEADLINE_S))
            await connection.run_sync(migrate)
        yield database
    finally:
        await engine.dispose()


def _postgres(url: URL, config: StoreConfig) -> AsyncEngine:
    deadline_ms = str(int(config.deadline_s * 1000))
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
        connect_args={"timeout": config.deadline_s, "server_settings": settings},
        pool_timeout=config.deadline_s,
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


def _sqlite(url: URL, config: StoreConfig) -> AsyncEngine:
    engine = create_async_engine(
        url,
        connect_args={"timeout": config.deadline_s},
        pool_timeout=config.deadline_s,
        hide_parameters=True,
        **_json(),
    )

    @event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: Any, _record: object) -> None:  # noqa: ANN401 - the driver's, and each has its own.
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
        left_s = max(0.0, options.get(_ENDS_S, now_s + config.deadline_s) - now_s)
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(left_s * 1000)}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES, False) else "BEGIN")

    return engine


def _json() -> dict[str, Any]:
    return {
        "json_serializer": lambda value: msgspec.json.encode(value).decode(),
        "json_deserializer": msgspec.json.decode,
    }


@asynccontextmanager
async def _opening_alone(file: Path) -> AsyncIterator[None]:
    """Makes the folder, and lets one process at a time prepare the file: SQLite's own locks do not cover all of it."""
    make_folder(file.parent)
    try:
        descriptor = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(f"The database {file} cannot be opened: {error.strerror}.") from error
    try:
        async with asyncio.timeout(_MIGRATION_DEADLINE_S):
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_POLL_S)
        yield
    except TimeoutError:
        raise StoreUnavailable(f"Another process has been opening the database {file} for too long.") from None
    finally:
        os.close(descriptor)


async def _keep_write_ahead_log(engine: AsyncEngine) -> None:
    """Readers and the writer do not wait for each other. The file remembers it."""
    try:
        async with engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            await driver.execute("PRAGMA journal_mode = WAL")
    except Exception as error:
        if is_outage(error):
            raise StoreUnavailable from error
        raise
