"""The directory: tenants, keys and limits, as they are kept, and what is new among them.

Whoever changes it takes the next version first and with it the lock of the version's row, so that changes happen one
after the other, on all gateways. What a change relies on, such as that a tenant exists, therefore stays true until it
is committed; and versions become visible in their order, so that `changes` misses none.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy import Column, ColumnElement, Table, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.clock import Clock
from maitred.core.limits import Limit
from maitred.core.tenancy import ApiKey, DirectoryChanges, KeySecret, Tenant
from maitred.store import schema
from maitred.store.admin_replies import AdminReplies
from maitred.store.database import Database
from maitred.store.declaration import declare
from maitred.store.keys import add_keys, change_key, delete_keys, one_key, revoke, rotate, some_keys
from maitred.store.limits import delete_limit, delete_limits_of, longest_refill_s, one_limit, put_limits, some_limits
from maitred.store.rules import (
    check_hash,
    check_key,
    check_limit,
    check_overlap,
    check_page,
    check_subject,
    check_tenant,
)
from maitred.store.tenants import add_tenants, change_tenant, delete_tenant, one_tenant, some_tenants

_BATCH = 1000
_VERSION = schema.directory_version.c.version
_SEEN = f"SELECT {_VERSION.name} FROM {_VERSION.table.name}"
T = TypeVar("T")


class DirectoryStore:
    """Tenants, keys and limits in a database; implements `maitred.core.tenancy.DirectorySource`.

    Every method may raise `StoreUnavailable`; those that take an id `ResourceNotFound`; those that change something
    `InvalidRequest` (it could never be so) and `Conflict` (what exists already does not allow it).
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        replies = AdminReplies(database, clock)
        self.remembered = replies.remembered
        self.remember = replies.remember

    async def changes(self, since: int) -> DirectoryChanges:
        """See `maitred.core.tenancy.DirectorySource`.

        If the version of the answer is below `since`, the database has gone back in time, as it does when a backup is
        restored: what is known from it is void, and 0 asks for all.
        """
        # Every gateway asks several times a second, and hardly ever is there anything new.
        seen = self._database.probe(_SEEN)
        if seen is not None and seen <= since:
            await asyncio.sleep(0)  # who asks in a loop lets others go on
            return DirectoryChanges(seen)
        async with self._database.reading() as connection:
            version = int((await connection.execute(select(_VERSION))).scalar_one())
            if version <= since:
                return DirectoryChanges(version)
            tenants, keys, limits = schema.tenants, schema.keys, schema.limits
            # Ordered so that the index of versions serves: by id, SQLite would read the whole table for one change.
            return DirectoryChanges(
                version,
                await some_tenants(connection, *_newer(tenants, since), order=tenants.c.version),
                await some_keys(connection, *_newer(keys, since), order=keys.c.version),
                await some_limits(connection, *_newer(limits, since), order=limits.c.made),
                *[await _deleted(connection, table, since) for table in (tenants, keys, limits)],
            )

    async def tenant(self, tenant_id: str) -> Tenant:
        """The tenant of that id."""
        async with self._database.reading() as connection:
            return await one_tenant(connection, tenant_id)

    async def tenants(self, parent: str | None = None, after: str = "", limit: int = 100) -> list[Tenant]:
        """A page of tenants in the order of their ids; of one organisation's teams, or of all."""
        check_page(after, limit)
        async with self._database.reading() as connection:
            if parent is not None:
                await one_tenant(connection, parent)
            wanted = [*_after(schema.tenants, after), *_equal(schema.tenants.c.parent, parent)]
            return await some_tenants(connection, *wanted, limit=limit)

    async def create_tenant(self, tenant: Tenant) -> None:
        """Adds an organisation, or a team of one."""
        check_tenant(tenant)
        async with self._change() as (connection, version):
            await add_tenants(connection, version, [tenant])

    async def update_tenant(self, tenant_id: str, **changes: object) -> Tenant:
        """Changes some fields; a team stays with its organisation."""
        async with self._change() as (connection, version):
            return await change_tenant(connection, version, tenant_id, changes)

    async def delete_tenant(self, tenant_id: str) -> None:
        """Deletes a tenant with its dead keys and all their limits, once it has no teams and no live keys."""
        async with self._change() as (connection, version):
            await delete_tenant(connection, version, tenant_id, self._clock.wall_s())
            dead = await delete_keys(connection, version, tenant_id)
            subjects = [f"tenant:{tenant_id}", *(f"key:{key_id}" for key_id in dead)]
            for batch in _batches(subjects):
                await delete_limits_of(connection, version, batch)

    async def key(self, key_id: str) -> ApiKey:
        """The key of that id."""
        async with self._database.reading() as connection:
            return await one_key(connection, key_id)

    async def keys(self, tenant: str | None = None, after: str = "", limit: int = 100) -> list[ApiKey]:
        """A page of keys in the order of their ids; of one tenant, or of all."""
        check_page(after, limit)
        async with self._database.reading() as connection:
            if tenant is not None:
                await one_tenant(connection, tenant)
            wanted = [*_after(schema.keys, after), *_equal(schema.keys.c.tenant, tenant)]
            return await some_keys(connection, *wanted, limit=limit)

    async def create_key(self, key: ApiKey) -> None:
        """Adds a key."""
        check_key(key, self._clock.wall_s())
        async with self._change() as (connection, version):
            await add_keys(connection, version, [key])

    async def update_key(self, key_id: str, **changes: object) -> ApiKey:
        """Changes the name, the scopes or the expiry of a key that is not revoked."""
        async with self._change() as (connection, version):
            return await change_key(connection, version, key_id, changes, self._clock.wall_s())

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Ends a key for good. Doing it again changes nothing."""
        async with self._change() as (connection, version):
            return await revoke(connection, version, key_id)

    async def rotate_key(self, key_id: str, secret: KeySecret, overlap_s: float) -> ApiKey:
        """Gives a key another secret, which does not expire; the older ones do after the overlap.

        Of rotations that race, all happen, and the secret of the last one stays.
        """
        check_hash(secret.sha256)
        check_overlap(overlap_s)
        async with self._change() as (connection, version):
            return await rotate(connection, version, key_id, secret.sha256, overlap_s, self._clock.wall_s())

    async def limit(self, limit_id: str) -> Limit:
        """The limit of that id."""
        async with self._database.reading() as connection:
            return await one_limit(connection, limit_id)

    async def limits(self, subject: str | None = None, after: str = "", limit: int = 100) -> list[Limit]:
        """A page of limits in the order of their ids; of one subject, or of all."""
        check_page(after, limit)
        if subject is not None:
            check_subject(subject)
        async with self._database.reading() as connection:
            wanted = [*_after(schema.limits, after), *_equal(schema.limits.c.subject, subject)]
            return await some_limits(connection, *wanted, limit=limit)

    async def longest_refill_s(self) -> float:
        """How long the slowest rate takes from empty to full; 0 without rates."""
        async with self._database.reading() as connection:
            return await longest_refill_s(connection)

    async def put_limit(self, limit: Limit) -> None:
        """Adds a limit, or changes the value, burst or hardness of the one with that id."""
        check_limit(limit)
        async with self._change() as (connection, version):
            await put_limits(connection, version, [limit])

    async def delete_limit(self, limit_id: str) -> None:
        """Deletes a limit."""
        async with self._change() as (connection, version):
            await delete_limit(connection, version, limit_id)

    async def declare(self, tenants: Sequence[Tenant], keys: Sequence[ApiKey], limits: Sequence[Limit]) -> None:
        """Makes the directory say what a configuration declares; see `maitred.store.declaration`.

        Raises:
            ConfigInvalid: It contradicts what was made otherwise.
        """
        for tenant in tenants:
            check_tenant(tenant)
        for limit in limits:
            check_limit(limit)
        async with self._change() as (connection, version):
            await declare(connection, version, tenants, keys, limits)

    async def load_many(
        self, tenants: Iterable[Tenant] = (), keys: Iterable[ApiKey] = (), limits: Iterable[Limit] = ()
    ) -> None:
        """Adds many at once, a thousand to a transaction. Nothing is added if one of them is wrong by itself.

        Raises:
            Conflict: One of them exists. The transactions before it have happened.
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
        await self._load(add_tenants, tenants)
        await self._load(add_keys, keys)
        await self._load(put_limits, limits)

    async def _load(
        self, add: Callable[[AsyncConnection, int, Sequence[T]], Awaitable[None]], things: Sequence[T]
    ) -> None:
        for batch in _batches(things):
            async with self._change() as (connection, version):
                await add(connection, version, batch)

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[tuple[AsyncConnection, int]]:
        """A transaction with the next version; nobody else changes anything until it ends."""
        next_one = update(schema.directory_version).values(version=_VERSION + 1).returning(_VERSION)
        async with self._database.begin() as connection:
            yield connection, int((await connection.execute(next_one)).scalar_one())


async def _deleted(connection: AsyncConnection, table: Table, since: int) -> list[str]:
    """Ids of what was deleted since; whoever asks for all knows of none that could be gone."""
    if since <= 0:
        return []
    query = select(table.c.id).where(table.c.version > since, table.c.deleted)
    return list((await connection.execute(query)).scalars())


def _newer(table: Table, since: int) -> list[ColumnElement[bool]]:
    return [~table.c.deleted, table.c.version > since]


def _after(table: Table, last: str) -> list[ColumnElement[bool]]:
    return [~table.c.deleted, table.c.id > last]


def _equal(column: Column[str], value: str | None) -> list[ColumnElement[bool]]:
    return [] if value is None else [column == value]


def _batches(things: Sequence[T]) -> Iterable[Sequence[T]]:
    return (things[start : start + _BATCH] for start in range(0, len(things), _BATCH))
