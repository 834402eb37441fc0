"""Directory store: tenants, keys and limits in the database, and their changes.

Each change first takes the next version and locks the version row, so that the changes of all gateways happen one after
the other. A condition that a change relies on, such as that a tenant exists, therefore stays true until the change is
committed. Versions become visible in ascending order, so that `changes` returns every change.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy import Column, ColumnElement, Table, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid, Conflict
from maitred.core.limits import Limit
from maitred.core.tenancy import ApiKey, DirectoryChanges, KeySecret, Tenant
from maitred.store import schema
from maitred.store.admin_replies import AdminReplies
from maitred.store.database import Database
from maitred.store.declaration import declare
from maitred.store.keys import (
    add_keys,
    change_key,
    delete_keys,
    find_keys,
    get_key,
    revoke_key,
    rotate_key,
    usable_admin_keys,
)
from maitred.store.limits import delete_limit, delete_limits_of, find_limits, get_limit, longest_refill_s, put_limits
from maitred.store.rules import (
    check_hash,
    check_key,
    check_limit,
    check_overlap,
    check_page,
    check_subject,
    check_tenant,
)
from maitred.store.tenants import add_tenants, change_tenant, delete_tenant, find_tenants, get_tenant

_BATCH_ROWS = 1000
_END_OF_TIME_S = 1e12
"""Wall time at which every key has expired that ever does."""
_VERSION = schema.directory_version.c.version
_VERSION_QUERY = f"SELECT {_VERSION.name} FROM {_VERSION.table.name}"
T = TypeVar("T")


class DirectoryStore:
    """Store of tenants, keys and limits in a database. Implements `maitred.core.tenancy.DirectorySource`.

    Every method may raise `StoreUnavailable`. Methods that take an id may raise `ResourceNotFound`. Methods that change
    the directory may raise `InvalidRequest` (the entry is never valid) and `Conflict` (existing entries do not allow
    the change).
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        replies = AdminReplies(database, clock)
        self.find_reply = replies.find_reply
        self.store_reply = replies.store_reply

    async def changes(self, since: int) -> DirectoryChanges:
        """Returns the changes since a version; implements `DirectorySource.changes`.

        If the version of the result is below `since`, the database has gone back in time, as it does when a backup is
        restored: what is known from it is void, and 0 asks for all entries.
        """
        # Every gateway polls several times a second, and changes are rare.
        current = self._database.probe(_VERSION_QUERY)
        if current is not None and current <= since:
            await asyncio.sleep(0)  # this await lets other tasks run when a caller polls in a loop
            return DirectoryChanges(current)
        async with self._database.begin_read() as connection:
            version = int((await connection.execute(select(_VERSION))).scalar_one())
            if version <= since:
                return DirectoryChanges(version)
            tenants, keys, limits = schema.tenants, schema.keys, schema.limits
            # The order lets the database use the index of versions: ordered by id, SQLite would read the whole table
            # for one change.
            return DirectoryChanges(
                version,
                tenants=await find_tenants(connection, *_newer(tenants, since), order=tenants.c.version),
                keys=await find_keys(connection, *_newer(keys, since), order=keys.c.version),
                limits=await find_limits(connection, *_newer(limits, since), order=limits.c.made),
                deleted_tenants=await _deleted_ids(connection, tenants, since),
                deleted_keys=await _deleted_ids(connection, keys, since),
                deleted_limits=await _deleted_ids(connection, limits, since),
            )

    async def tenant(self, tenant_id: str) -> Tenant:
        """Returns the tenant with this id."""
        async with self._database.begin_read() as connection:
            return await get_tenant(connection, tenant_id)

    async def tenants(self, parent: str | None = None, after: str = "", limit: int = 100) -> list[Tenant]:
        """Returns a page of tenants in the order of their ids: the teams of one organisation, or all tenants."""
        check_page(after, limit)
        async with self._database.begin_read() as connection:
            if parent is not None:
                await get_tenant(connection, parent)
            wanted = [*_id_after(schema.tenants, after), *_equal(schema.tenants.c.parent, parent)]
            return await find_tenants(connection, *wanted, limit=limit)

    async def create_tenant(self, tenant: Tenant) -> None:
        """Adds an organisation, or a team of an organisation."""
        check_tenant(tenant)
        async with self._begin_change() as (connection, version):
            await add_tenants(connection, version, [tenant])

    async def update_tenant(self, tenant_id: str, **changes: object) -> Tenant:
        """Changes fields of a tenant; a team cannot move to another organisation.

        Raises:
            Conflict: The change would leave nobody who can administer the installation.
        """
        async with self._begin_access_change() as (connection, version):
            return await change_tenant(connection, version, tenant_id, changes)

    async def delete_tenant(self, tenant_id: str) -> None:
        """Deletes a tenant, its ended keys, and the limits of the tenant and of these keys.

        The tenant must have neither teams nor active keys.
        """
        async with self._begin_change() as (connection, version):
            await delete_tenant(connection, version, tenant_id, self._clock.wall_s())
            key_ids = await delete_keys(connection, version, tenant_id)
            subjects = [f"tenant:{tenant_id}", *(f"key:{key_id}" for key_id in key_ids)]
            for batch in _batches(subjects):
                await delete_limits_of(connection, version, batch)

    async def key(self, key_id: str) -> ApiKey:
        """Returns the key with this id."""
        async with self._database.begin_read() as connection:
            return await get_key(connection, key_id)

    async def keys(self, tenant: str | None = None, after: str = "", limit: int = 100) -> list[ApiKey]:
        """Returns a page of keys in the order of their ids: those of one tenant, or all keys."""
        check_page(after, limit)
        async with self._database.begin_read() as connection:
            if tenant is not None:
                await get_tenant(connection, tenant)
            wanted = [*_id_after(schema.keys, after), *_equal(schema.keys.c.tenant, tenant)]
            return await find_keys(connection, *wanted, limit=limit)

    async def create_key(self, key: ApiKey) -> None:
        """Adds a key to its tenant."""
        check_key(key, self._clock.wall_s())
        async with self._begin_change() as (connection, version):
            await add_keys(connection, version, [key])

    async def update_key(self, key_id: str, **changes: object) -> ApiKey:
        """Changes the name, the scopes, the expiry or the cache controls of a key; the key must not be revoked.

        Raises:
            Conflict: The change would leave nobody who can administer the installation, now or once the key expires.
        """
        async with self._begin_access_change() as (connection, version):
            before = await get_key(connection, key_id)
            key = await change_key(connection, version, key_id, changes, self._clock.wall_s())
            if key.expires_s is not None and (before.expires_s is None or key.expires_s < before.expires_s):
                _require_admin(await usable_admin_keys(connection, self._clock.wall_s()) != {key_id})
            return key

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Revokes a key permanently. Revoking it again changes nothing.

        Raises:
            Conflict: It is the last key that can administer the installation.
        """
        async with self._begin_access_change() as (connection, version):
            return await revoke_key(connection, version, key_id)

    async def rotate_key(self, key_id: str, secret: KeySecret, overlap_s: float) -> ApiKey:
        """Gives a key a new secret, which does not expire; the older secrets expire after the overlap.

        All rotations that run at the same time are applied, and the secret of the last one stays valid.
        """
        check_hash(secret.sha256)
        check_overlap(overlap_s)
        async with self._begin_change() as (connection, version):
            return await rotate_key(connection, version, key_id, secret.sha256, overlap_s, self._clock.wall_s())

    async def limit(self, limit_id: str) -> Limit:
        """Returns the limit with this id."""
        async with self._database.begin_read() as connection:
            return await get_limit(connection, limit_id)

    async def limits(self, subject: str | None = None, after: str = "", limit: int = 100) -> list[Limit]:
        """Returns a page of limits in the order of their ids: those of one subject, or all limits."""
        check_page(after, limit)
        if subject is not None:
            check_subject(subject)
        async with self._database.begin_read() as connection:
            wanted = [*_id_after(schema.limits, after), *_equal(schema.limits.c.subject, subject)]
            return await find_limits(connection, *wanted, limit=limit)

    async def longest_refill_s(self) -> float:
        """Returns the longest time that any rate takes from empty to full, or 0 if there are no rates."""
        async with self._database.begin_read() as connection:
            return await longest_refill_s(connection)

    async def put_limit(self, limit: Limit) -> None:
        """Adds a limit, or changes the value, burst or hardness of the limit with that id."""
        check_limit(limit)
        async with self._begin_change() as (connection, version):
            await put_limits(connection, version, [limit])

    async def delete_limit(self, limit_id: str) -> None:
        """Deletes the limit with this id."""
        async with self._begin_change() as (connection, version):
            await delete_limit(connection, version, limit_id)

    async def declare(self, tenants: Sequence[Tenant], keys: Sequence[ApiKey], limits: Sequence[Limit]) -> None:
        """Makes the directory match the entries that a configuration declares (`maitred.store.declaration`).

        Raises:
            ConfigInvalid: The configuration contradicts entries that exist, or would leave nobody who can administer
                the installation.
        """
        for tenant in tenants:
            check_tenant(tenant)
        for limit in limits:
            check_limit(limit)
        async with self._begin_change() as (connection, version):
            before = await usable_admin_keys(connection, self._clock.wall_s())
            await declare(connection, version, tenants, keys, limits)
            if before and not await usable_admin_keys(connection, self._clock.wall_s()):
                raise ConfigInvalid(
                    "tenants: the keys that can administer this installation are no longer declared. Declare one with "
                    "the scope `admin`."
                )

    async def add_many(
        self, tenants: Iterable[Tenant] = (), keys: Iterable[ApiKey] = (), limits: Iterable[Limit] = ()
    ) -> None:
        """Adds many entries in transactions of a thousand entries each.

        If one of the entries is invalid by itself, nothing is added.

        Raises:
            Conflict: One of the entries exists already; earlier transactions stay committed.
        """
        # Organisations come before the teams that name them.
        tenants = sorted(tenants, key=lambda tenant: tenant.parent is not None)
        keys, limits, now_s = list(keys), list(limits), self._clock.wall_s()
        for tenant in tenants:
            check_tenant(tenant)
        for key in keys:
            check_key(key, now_s)
        for limit in limits:
            check_limit(limit)
        await self._add_batches(add_tenants, tenants)
        await self._add_batches(add_keys, keys)
        await self._add_batches(put_limits, limits)

    async def _add_batches(
        self, add: Callable[[AsyncConnection, int, Sequence[T]], Awaitable[None]], entities: Sequence[T]
    ) -> None:
        for batch in _batches(entities):
            async with self._begin_change() as (connection, version):
                await add(connection, version, batch)

    @asynccontextmanager
    async def _begin_change(self) -> AsyncIterator[tuple[AsyncConnection, int]]:
        """Opens a transaction with the next version; other changes wait until it ends."""
        next_version = update(schema.directory_version).values(version=_VERSION + 1).returning(_VERSION)
        async with self._database.begin() as connection:
            yield connection, int((await connection.execute(next_version)).scalar_one())

    @asynccontextmanager
    async def _begin_access_change(self) -> AsyncIterator[tuple[AsyncConnection, int]]:
        """Opens a transaction for a change that is undone if it leaves nobody who can administer the installation.

        If there was a key that does not expire, there must be one afterwards: others would lock everybody out later.
        """
        async with self._begin_change() as (connection, version):
            times_s = self._clock.wall_s(), _END_OF_TIME_S
            before = [await usable_admin_keys(connection, time_s) for time_s in times_s]
            yield connection, version
            for time_s, keys in zip(times_s, before, strict=True):
                if keys:
                    _require_admin(bool(await usable_admin_keys(connection, time_s)))


def _require_admin(remains: bool) -> None:
    if not remains:
        raise Conflict(
            "Nobody could administer this installation any more, now or once keys expire. Create another key with the "
            "scope `admin`, and without an expiry, first."
        )


async def _deleted_ids(connection: AsyncConnection, table: Table, since: int) -> list[str]:
    """Returns the ids deleted since a version.

    For version 0 the list is empty, because the caller does not have any entries yet.
    """
    if since <= 0:
        return []
    query = select(table.c.id).where(table.c.version > since, table.c.deleted)
    return list((await connection.execute(query)).scalars())


def _newer(table: Table, since: int) -> list[ColumnElement[bool]]:
    return [~table.c.deleted, table.c.version > since]


def _id_after(table: Table, last: str) -> list[ColumnElement[bool]]:
    return [~table.c.deleted, table.c.id > last]


def _equal(column: Column[str], value: str | None) -> list[ColumnElement[bool]]:
    return [] if value is None else [column == value]


def _batches(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[start : start + _BATCH_ROWS] for start in range(0, len(items), _BATCH_ROWS))
