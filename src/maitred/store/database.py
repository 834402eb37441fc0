"""The database: SQLite in a folder of this gateway, or PostgreSQL that several share.

Everything that reads or writes does so within `Database.reading` or `Database.begin`: one transaction, with a
deadline, whose errors say either that the database is away (`StoreUnavailable`) or that we made a mistake.
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from maitred.core.errors import MaitredError, StoreUnavailable
from maitred.store.config import StoreConfig
from maitred.store.driver import ENDS_S, WRITES, SqliteChangeProbe, make_breaker, make_engine
from maitred.store.location import data_folder, database_url, make_folder
from maitred.store.migration import migrate
from maitred.store.outage import first_line_of, is_outage

__all__ = ["Database", "data_folder", "open_database"]

_MIGRATION_DEADLINE_S = 120.0
_POLL_S = 0.05


class Database:
    """A database that is open and has its tables.

    Args:
        engine: SQLAlchemy's.
        deadline_s: Of every transaction.
        file: Of SQLite. It exists.
    """

    def __init__(self, engine: AsyncEngine, deadline_s: float, file: Path | None = None) -> None:
        self.engine = engine
        self._deadline_s = deadline_s
        self._file = None if file is None else (file, file.stat())
        self._change_probe = None if file is None else SqliteChangeProbe(file)
        # SQLite has one writer. Queueing here wakes the next at once, where SQLite itself would poll.
        self._lock = asyncio.Lock() if engine.dialect.name == "sqlite" else None

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
        async with self._transaction(deadline_s or self._deadline_s, {WRITES: True}, self._lock) as connection:
            yield connection

    def probe(self, query: str) -> int | None:
        """The number that a query gives, of what is committed by now; None: only a transaction can tell.

        Raises:
            StoreUnavailable: The database's file is gone.
        """
        if self._change_probe is None:
            return None
        self._check_file()
        return self._change_probe.at(query)

    def mark(self) -> tuple[int, int] | None:
        """Another one when anybody has committed anything since; None: that cannot be told.

        Raises:
            StoreUnavailable: The database's file is gone.
        """
        if self._change_probe is None:
            return None
        self._check_file()
        return self._change_probe.mark()

    def close(self) -> None:
        """Lets go of what is not the engine's."""
        if self._change_probe is not None:
            self._change_probe.close()

    @asynccontextmanager
    async def _transaction(
        self, deadline_s: float, options: dict[str, Any], turn: asyncio.Lock | None = None
    ) -> AsyncIterator[AsyncConnection]:
        ends_s = asyncio.get_running_loop().time() + deadline_s
        self._check_file()
        try:
            async with (
                asyncio.timeout_at(ends_s) as timeout,
                turn or nullcontext(),
                self.engine.connect() as connection,
            ):
                await connection.execution_options(**options, **{ENDS_S: ends_s})
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

    def _check_file(self) -> None:
        """Raises StoreUnavailable if SQLite's file is gone, or another one is in its place.

        What is open could still be read and written, and all of it would be lost with the last connection.
        """
        if self._file is None:
            return
        path, opened = self._file
        try:
            if os.path.samestat(path.stat(), opened):
                return
            reason = "it was replaced"
        except OSError as error:
            reason = error.strerror or "it was deleted"
        raise StoreUnavailable from FileNotFoundError(
            f"{path} is not the file that was opened ({reason}). Put that one back, or start maitred again"
        )


@asynccontextmanager
async def _hanging_up(connection: AsyncConnection, ends_s: float) -> AsyncIterator[None]:
    """Breaks the connection when time is up or the caller leaves."""
    driver = (await connection.get_raw_connection()).driver_connection
    timer = asyncio.get_running_loop().call_at(ends_s, make_breaker(driver))
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


@asynccontextmanager
async def open_database(config: StoreConfig) -> AsyncIterator[Database]:
    """Opens the database, makes or updates its tables, and closes it at the end.

    Raises:
        ConfigInvalid: The settings name no database that could be used.
        StoreUnavailable: It cannot be reached now.
    """
    url = database_url(config)
    engine = make_engine(url, config.deadline_s)
    database: Database | None = None
    try:
        try:
            database = await _opened(engine, url, config)
        except StoreUnavailable as error:
            if error.__cause__ is None or error.message != error.default_message:
                raise
            place = url.render_as_string(hide_password=True)
            raise StoreUnavailable(
                f"The database {place} cannot be opened: {first_line_of(error.__cause__)}. Repair it, restore a backup "
                "of it, or name another one in store.url or store.folder."
            ) from error
        yield database
    finally:
        if database is not None:
            database.close()
        await engine.dispose()


async def _opened(engine: AsyncEngine, url: URL, config: StoreConfig) -> Database:
    file = None
    async with AsyncExitStack() as stack:
        if url.database is not None and url.get_backend_name() == "sqlite":
            file = Path(url.database)
            await stack.enter_async_context(_opening_alone(file))
            await _keep_write_ahead_log(engine)
        database = Database(engine, config.deadline_s, file)
        connection = await stack.enter_async_context(database.begin(_MIGRATION_DEADLINE_S))
        await connection.run_sync(migrate)
    return database


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
