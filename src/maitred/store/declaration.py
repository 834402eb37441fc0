"""Puts into the directory what a configuration declares, and takes out what it no longer does.

The configuration is right: what it declares is made so, whatever was changed through the API since. Except for one
thing: a key that was revoked stays revoked, because whoever revoked it did not want it to come back with a restart.
What an earlier configuration declared and this one does not is disabled (tenants), revoked (keys) or deleted (limits).
"""

import logging
from collections.abc import Collection, Sequence

from sqlalchemy import Column, ColumnElement, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.errors import ConfigInvalid
from maitred.core.limits import Limit
from maitred.core.tenancy import ApiKey, Tenant
from maitred.store.keys import add_keys, revoke, some_keys
from maitred.store.limits import delete_limit, put_limits, some_limits
from maitred.store.schema import declarations, key_secrets, keys, limits, tenants
from maitred.store.tenants import add_tenants, change_tenant, some_tenants

log = logging.getLogger(__name__)


async def declare(
    connection: AsyncConnection,
    version: int,
    new_tenants: Sequence[Tenant],
    new_keys: Sequence[ApiKey],
    new_limits: Sequence[Limit],
) -> None:
    """Makes the directory say what is declared; declaring the same again changes nothing.

    Args:
        connection: In a transaction of the directory.
        version: Of that transaction.
        new_tenants: Organisations before their teams.
        new_keys: With one secret each.
        new_limits: Their ids follow from what they limit.

    Raises:
        ConfigInvalid: An id is that of something that was deleted, or of something else.
    """
    before = await _declared_before(connection)
    await _declare_tenants(connection, version, new_tenants)
    await _declare_keys(connection, version, new_keys)
    await _declare_limits(connection, version, new_limits)
    now = {
        "tenant": {tenant.id for tenant in new_tenants},
        "key": {key.id for key in new_keys},
        "limit": {limit.id for limit in new_limits},
    }
    for tenant_id in before["tenant"] - now["tenant"]:
        if any(not known.disabled for known in await some_tenants(connection, tenants.c.id == tenant_id)):
            await change_tenant(connection, version, tenant_id, {"disabled": True})
    for key_id in before["key"] - now["key"]:
        await revoke(connection, version, key_id)
    gone = before["limit"] - now["limit"]
    await connection.execute(update(limits).where(limits.c.id.in_(gone)).values(deleted=True, version=version))
    await connection.execute(delete(declarations))
    rows = [{"sort": sort, "id": one} for sort, ids in now.items() for one in sorted(ids)]
    if rows:
        await connection.execute(insert(declarations), rows)


async def _declared_before(connection: AsyncConnection) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"tenant": set(), "key": set(), "limit": set()}
    for sort, one in await connection.execute(select(declarations.c.sort, declarations.c.id)):
        found[sort].add(one)
    return found


async def _declare_tenants(connection: AsyncConnection, version: int, wanted: Sequence[Tenant]) -> None:
    known = {tenant.id: tenant for tenant in await some_tenants(connection, _among(tenants.c.id, wanted))}
    for tenant in wanted:
        before = known.get(tenant.id)
        if before is None:
            await add_tenants(connection, version, [tenant])
        elif before.parent != tenant.parent:
            raise ConfigInvalid(
                f"tenants: {tenant.id} belongs to {before.parent or 'nobody'} in the store, and a tenant does not "
                "move. Give the declared one another id."
            )
        elif before != tenant:
            fields = [field for field in tenant.__struct_fields__ if field not in ("id", "parent")]
            await change_tenant(connection, version, tenant.id, {field: getattr(tenant, field) for field in fields})


async def _declare_keys(connection: AsyncConnection, version: int, wanted: Sequence[ApiKey]) -> None:
    known = {key.id: key for key in await some_keys(connection, _among(keys.c.id, wanted))}
    for key in wanted:
        before = known.get(key.id)
        if before is None:
            await add_keys(connection, version, [key])
            continue
        if before.tenant != key.tenant:
            raise ConfigInvalid(f"tenants: the key {key.id} belongs to {before.tenant} in the store. Make another key.")
        if before.revoked:
            log.warning("The declared key %s was revoked and stays so. Declare another one.", key.id)
            continue
        hashes = {secret.sha256 for secret in key.secrets}
        if hashes != {secret.sha256 for secret in before.secrets}:
            await connection.execute(delete(key_secrets).where(key_secrets.c.key == key.id))
            secrets = [{"key": key.id, "sha256": one, "made": version, "expires_s": None} for one in sorted(hashes)]
            await connection.execute(insert(key_secrets), secrets)
        values = {"name": key.name, "scopes": [scope.value for scope in key.scopes], "version": version}
        await connection.execute(update(keys).where(keys.c.id == key.id).values(values))


async def _declare_limits(connection: AsyncConnection, version: int, wanted: Sequence[Limit]) -> None:
    await _make_room(connection, version, wanted)
    # Their ids follow from what they limit, so one that comes back has its old id.
    again = _among(limits.c.id, wanted) & limits.c.deleted
    await connection.execute(update(limits).where(again).values(deleted=False, version=version))
    known = {limit.id: limit for limit in await some_limits(connection, _among(limits.c.id, wanted))}
    changed = [limit for limit in wanted if known.get(limit.id) != limit]
    if changed:
        await put_limits(connection, version, changed)


async def _make_room(connection: AsyncConnection, version: int, wanted: Sequence[Limit]) -> None:
    """Deletes what was made through the API and is declared now; there is one limit for each thing."""
    declared = {limit.id for limit in wanted}
    replaced = {_limit_identity(limit) for limit in wanted}
    subjects = {limit.subject for limit in wanted}
    for limit in await some_limits(connection, limits.c.subject.in_(subjects), ~limits.c.deleted):
        if limit.id not in declared and _limit_identity(limit) in replaced:
            log.warning("The limit %s (%s of %s) is now the declared one.", limit.id, limit.kind, limit.subject)
            await delete_limit(connection, version, limit.id)


def _limit_identity(limit: Limit) -> tuple[str, str, str | None, bool]:
    """What a limit is about; there is one for each."""
    return limit.subject, limit.kind, limit.model, limit.hard


def _among(column: Column[str], things: Collection[Tenant | ApiKey | Limit]) -> ColumnElement[bool]:
    return column.in_([thing.id for thing in things])
