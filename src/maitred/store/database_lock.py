"""Lock on a shared database: gateways that count in their own memory do not share it.

It does for PostgreSQL what `maitred.store.data_lock` does for a folder. The lock is an advisory lock of a session. It
ends with the connection: at once if the process dies, and within half a minute if its machine does.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.store.config import StoreConfig
from maitred.store.driver import make_engine
from maitred.store.location import database_url
from maitred.store.outage import first_line, is_outage

_KEY = 0x6D74
"""First part of the lock's name; the second is the schema, since several installations may share a database."""
_LOCK_TIMEOUT_S = 5.0
"""Longest wait for a gateway that is about to end, such as one that was just killed."""
_POLL_S = 0.2
_CHECK_INTERVAL_S = 5.0
_KEEPALIVE = (
    "SELECT set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false), "
    "set_config('tcp_keepalives_count', '3', false)"
)
"""The server itself would notice a dead machine after two hours."""
_TAKEN = (
    "Another gateway uses this database, and two that count in their own memory would let twice as much through as the "
    "limits say. Stop that one; or give this one a database of its own in store.url; or have all of them count in one "
    "Redis, with counters.url."
)
log = logging.getLogger(__name__)


@asynccontextmanager
async def lock_database(config: StoreConfig, *, exclusive: bool) -> AsyncIterator[None]:
    """Holds the lock on the database while the block runs; SQLite has a lock on its file instead.

    If the connection breaks, the lock is taken again as soon as possible. If another gateway has it by then, both go on
    and the log says so.

    Args:
        config: The settings of the store.
        exclusive: True: no other gateway may use the database; False: others may that also pass False.

    Raises:
        ConfigInvalid: Another gateway uses the database.
        StoreUnavailable: The database cannot be reached.
    """
    if config.url is None or database_url(config).get_backend_name() == "sqlite":
        yield
        return
    lock = _DatabaseLock(config, exclusive=exclusive)
    try:
        await lock.acquire()
        keeping = asyncio.create_task(lock.keep(), name="database lock")
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
    finally:
        await lock.close()


class _DatabaseLock:
    """Advisory lock with the connection that holds it."""

    def __init__(self, config: StoreConfig, *, exclusive: bool) -> None:
        self._url = database_url(config)
        self._engine = make_engine(self._url, config.deadline_s).execution_options(isolation_level="AUTOCOMMIT")
        name = "pg_try_advisory_lock" if exclusive else "pg_try_advisory_lock_shared"
        self._query = text(f"SELECT {name}({_KEY}, hashtext(current_schema()))")
        self._connection: AsyncConnection | None = None
        self._is_taken = False
        """Whether another gateway had the lock when it was last tried."""

    async def acquire(self) -> None:
        """Waits for the lock; raises what `lock_database` raises."""
        try:
            async with asyncio.timeout(_LOCK_TIMEOUT_S):
                while True:
                    if await self._try():
                        break
                    await asyncio.sleep(_POLL_S)
        except Exception as error:
            if isinstance(error, TimeoutError) and self._is_taken:
                raise ConfigInvalid(_TAKEN) from None
            if not is_outage(error):
                raise
            raise StoreUnavailable(
                f"The database {self._url.render_as_string(hide_password=True)} cannot be opened: {first_line(error)}. "
                "Repair it, or name another one in store.url."
            ) from error

    async def keep(self) -> None:
        """Takes the lock again whenever its connection was lost, until the task is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            was_taken = self._is_taken
            try:
                if self._connection is not None and not was_taken:
                    await self._connection.execute(text("SELECT 1"))
                elif not await self._try() and not was_taken:
                    log.error(_TAKEN)
            except Exception:  # the database is away, and those who use it say so
                await self._disconnect()

    async def close(self) -> None:
        """Releases the lock with its connection."""
        await self._disconnect()
        await self._engine.dispose()

    async def _try(self) -> bool:
        if self._connection is None:
            self._connection = await self._engine.connect()
            await self._connection.execute(text(_KEEPALIVE))
        self._is_taken = not (await self._connection.execute(self._query)).scalar_one()
        return not self._is_taken

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                await connection.invalidate()
            with suppress(Exception):
                await connection.close()
