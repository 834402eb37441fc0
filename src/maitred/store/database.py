"""Database of a gateway: SQLite in its own folder, or PostgreSQL that several gateways share.

Every access happens within `Database.begin_read` or `Database.begin`: one transaction with a deadline. Its errors say
either that the database cannot be reached (`StoreUnavailable`) or that a statement is wrong.
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
from maitred.store.driver import DEADLINE_OPTION, WRITES_OPTION, SqliteChangeProbe, make_breaker, make_engine
from maitred.store.location import database_url, make_folder
from maitred.store.migration import migrate
from maitred.store.outage import first_line, is_full, is_outage

__all__ = ["Database", "open_database"]

_MIGRATION_DEADLINE_S = 120.0
_POLL_S = 0.05
_FULL = "The disk of this service's database is full. Make room there."


class Database:
    """Open database with all its tables.

    Args:
        engine: The engine of SQLAlchemy.
        deadline_s: Longest time in seconds that a transaction may take.
        file: The existing SQLite file, or None if the database is not SQLite.
    """

    def __init__(self, engine: AsyncEngine, deadline_s: float, file: Path | None = None) -> None:
        self.engine = engine
        self._deadline_s = deadline_s
        self._file = None if file is None else (file, file.stat())
        self._change_probe = None if file is None else SqliteChangeProbe(file)
        # SQLite allows one writer at a time. This lock wakes the next writer immediately, while SQLite itself would
        # poll.
        self._lock = asyncio.Lock() if engine.dialect.name == "sqlite" else None

    @asynccontextmanager
    async def begin_read(self) -> AsyncIterator[AsyncConnection]:
        """Opens a read transaction, in which all statements see the same snapshot.

        Raises:
            StoreUnavailable: The database cannot be reached or is too slow.
        """
        options = {"isolation_level": "REPEATABLE READ"} if self.engine.dialect.name == "postgresql" else {}
        async with self._transaction(self._deadline_s, options) as connection:
            yield connection

    @asynccontextmanager
    async def begin(self, deadline_s: float | None = None) -> AsyncIterator[AsyncConnection]:
        """Opens a write transaction, which is committed at the end and rolled back when the body raises.

        Raises:
            StoreUnavailable: The database cannot be reached or is too slow; if the connection broke during the commit,
                the change may be stored.
        """
        async with self._transaction(deadline_s or self._deadline_s, {WRITES_OPTION: True}, self._lock) as connection:
            yield connection

    def probe(self, query: str) -> int | None:
        """Runs a query for one number on committed data, without a transaction.

        Returns:
            The number, or None if only a transaction can read it.

        Raises:
            StoreUnavailable: The database file does not exist any more.
        """
        if self._change_probe is None:
            return None
        self._check_file()
        return self._change_probe.read(query)

    def change_token(self) -> tuple[int, int] | None:
        """Returns a token that changes with every commit of any process, or None if there is no such token.

        Raises:
            StoreUnavailable: The database file does not exist any more.
        """
        if self._change_probe is None:
            return None
        self._check_file()
        return self._change_probe.change_token()

    def close(self) -> None:
        """Closes the change probe; the owner of the engine disposes of the engine."""
        if self._change_probe is not None:
            self._change_probe.close()

    @asynccontextmanager
    async def _transaction(
        self, deadline_s: float, options: dict[str, Any], lock: asyncio.Lock | None = None
    ) -> AsyncIterator[AsyncConnection]:
        ends_s = asyncio.get_running_loop().time() + deadline_s
        self._check_file()
        try:
            async with (
                asyncio.timeout_at(ends_s) as timeout,
                lock or nullcontext(),
                self.engine.connect() as connection,
            ):
                await connection.execution_options(**options, **{DEADLINE_OPTION: ends_s})
                async with _break_at_deadline(connection, ends_s):
                    await connection.begin()
                    yield connection
                    await connection.commit()
        except MaitredError:
            raise
        except Exception as error:
            if is_outage(error) or (isinstance(error, DBAPIError) and timeout.expired()):
                raise StoreUnavailable(_FULL if is_full(error) else "") from error
            raise

    def _check_file(self) -> None:
        """Raises StoreUnavailable if the SQLite file does not exist or was replaced by another file.

        An open connection could still read and write the removed file, and all of its data would be lost when the
        connection is closed.
        """
        if self._file is None:
            return
        path, opened_stat = self._file
        try:
            if os.path.samestat(path.stat(), opened_stat):
                return
            reason = "it was replaced"
        except OSError as error:
            reason = error.strerror or "it was deleted"
        raise StoreUnavailable from FileNotFoundError(
            f"{path} is not the file that was opened ({reason}). Put that one back, or start maitred again"
        )


@asynccontextmanager
async def _break_at_deadline(connection: AsyncConnection, ends_s: float) -> AsyncIterator[None]:
    """Breaks the connection when the deadline passes or the caller is cancelled."""
    driver = (await connection.get_raw_connection()).driver_connection
    timer = asyncio.get_running_loop().call_at(ends_s, make_breaker(driver))
    try:
        yield
    except asyncio.CancelledError:
        await connection.invalidate()
        raise
    except BaseException:
        # The first error is more useful than the rollback error of a lost connection.
        with suppress(Exception):
            await connection.rollback()
        raise
    finally:
        timer.cancel()


@asynccontextmanager
async def open_database(config: StoreConfig) -> AsyncIterator[Database]:
    """Opens the database, makes or updates its tables, and closes it at the end.

    Raises:
        ConfigInvalid: The settings do not name a usable database.
        StoreUnavailable: The database cannot be reached now.
    """
    url = database_url(config)
    engine = make_engine(url, config.deadline_s)
    database: Database | None = None
    try:
        try:
            database = await _open(engine, url, config)
        except StoreUnavailable as error:
            if error.__cause__ is None or error.message != error.default_message:
                raise
            address = url.render_as_string(hide_password=True)
            raise StoreUnavailable(
                f"The database {address} cannot be opened: {first_line(error.__cause__)}. Repair it, restore a backup "
                "of it, or name another one in store.url or store.folder."
            ) from error
        yield database
    finally:
        if database is not None:
            database.close()
        await engine.dispose()


async def _open(engine: AsyncEngine, url: URL, config: StoreConfig) -> Database:
    file = None
    async with AsyncExitStack() as stack:
        if url.database is not None and url.get_backend_name() == "sqlite":
            file = Path(url.database)
            await stack.enter_async_context(_lock_file(file))
            await _enable_wal(engine)
        database = Database(engine, config.deadline_s, file)
        connection = await stack.enter_async_context(database.begin(_MIGRATION_DEADLINE_S))
        await connection.run_sync(migrate)
    return database


@asynccontextmanager
async def _lock_file(file: Path) -> AsyncIterator[None]:
    """Makes the folder and lets one process at a time prepare the file.

    The locks of SQLite do not cover all preparation steps.
    """
    make_folder(file.parent)
    try:
        descriptor = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(f"The database {file} cannot be opened: {error.strerror}.") from error
    try:
        _make_private(file)
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


def _make_private(file: Path) -> None:
    """Lets only the owner read the database: the folder may have existed before, and others may read it.

    SQLite makes its further files with the mode of the database.
    """
    try:
        with suppress(FileExistsError):
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        for suffix in ("", "-wal", "-shm", "-journal"):
            path = file.with_name(file.name + suffix)
            with suppress(FileNotFoundError):
                status = path.stat()
                if status.st_mode & 0o077 and status.st_uid == os.geteuid():
                    path.chmod(0o600)
    except OSError as error:
        raise StoreUnavailable(f"The database {file} cannot be opened: {error.strerror}.") from error


async def _enable_wal(engine: AsyncEngine) -> None:
    """Turns on the write-ahead log, so that readers and the writer do not block each other.

    SQLite stores this setting in the database file.
    """
    try:
        async with engine.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            await driver.execute("PRAGMA journal_mode = WAL")
    except Exception as error:
        if is_outage(error):
            raise StoreUnavailable from error
        raise
