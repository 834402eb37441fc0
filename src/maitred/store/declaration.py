"""Updates the directory to match the entries that the configuration declares.

The configuration has precedence: a declared entry is stored as declared, whatever the API has changed since. There is
one exception: a revoked key stays revoked, because a restart must not reactivate a key that an operator has revoked. An
entry that an earlier configuration declared and this one does not declare is disabled (tenants), revoked (keys) or
deleted (limits).
"""

import logging
from collections.abc import Collection, Sequence

from sqlalchemy import Column, ColumnElement, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.errors import ConfigInvalid
from maitred.core.limits import Limit
from maitred.core.tenancy import ApiKey, Tenant
from maitred.store.keys import add_keys, find_keys, revoke_key
from maitred.store.limits import delete_limit, find_limits, put_limits
from maitred.store.schema import declarations, key_secrets, keys, limits, tenants
from maitred.store.tenants import add_tenants, change_tenant, find_tenants

log = logging.getLogger(__name__)


async def declare(
    connection: AsyncConnection,
    version: int,
    new_tenants: Sequence[Tenant],
    new_keys: Sequence[ApiKey],
    new_limits: Sequence[Limit],
) -> None:
    """Makes the directory match the declared entries; declaring the same entries again changes nothing.

    Args:
        connection: Connection in a transaction of the directory.
        version: Version of that transaction.
        new_tenants: Declared tenants, organisations before their teams.
        new_keys: Declared keys, with one secret each.
        new_limits: Declared limits; the id of each is derived from its subject, kind, model and hardness.

    Raises:
        ConfigInvalid: An id belongs to a deleted entry, or to an entry with another owner.
    """
    previous = await _previous_declarations(connection)
    await _declare_tenants(connection, version, new_tenants)
    await _declare_keys(connection, version, new_keys)
    await _declare_limits(connection, version, new_limits)
    current = {
        "tenant": {tenant.id for tenant in new_tenants},
        "key": {key.id for key in new_keys},
        "limit": {limit.id for limit in new_limits},
    }
    for tenant_id in previous["tenant"] - current["tenant"]:
        if any(not stored.disabled for stored in await find_tenants(connection, tenants.c.id == tenant_id)):
            await change_tenant(connection, version, tenant_id, {"disabled": True})
    for key_id in previous["key"] - current["key"]:
        await revoke_key(connection, version, key_id)
    removed_limits = previous["limit"] - current["limit"]
    await connection.execute(
        update(limits).where(limits.c.id.in_(removed_limits)).values(deleted=True, version=version)
    )
    await connection.execute(delete(declarations))
    rows = [{"sort": sort, "id": entry_id} for sort, ids in current.items() for entry_id in sorted(ids)]
    if rows:
        await connection.execute(insert(declarations), rows)


async def _previous_declarations(connection: AsyncConnection) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"tenant": set(), "key": set(), "limit": set()}
    for sort, entry_id in await connection.execute(select(declarations.c.sort, declarations.c.id)):
        found[sort].add(entry_id)
    return found


async def _declare_tenants(connection: AsyncConnection, version: int, declared: Sequence[Tenant]) -> None:
    known = {tenant.id: tenant for tenant in await find_tenants(connection, _id_in(tenants.c.id, declared))}
    for tenant in declared:
        stored = known.get(tenant.id)
        if stored is None:
            await add_tenants(connection, version, [tenant])
        elif stored.parent != tenant.parent:
            raise ConfigInvalid(
                f"tenants: {tenant.id} belongs to {stored.parent or 'nobody'} in the store, and a tenant does not "
                "move. Give the declared one another id."
            )
        elif stored != tenant:
            fields = [field for field in tenant.__struct_fields__ if field not in ("id", "parent")]
            await change_tenant(connection, version, tenant.id, {field: getattr(tenant, field) for field in fields})


async def _declare_keys(connection: AsyncConnection, version: int, declared: Sequence[ApiKey]) -> None:
    known = {key.id: key for key in await find_keys(connection, _id_in(keys.c.id, declared))}
    for key in declared:
        stored = known.get(key.id)
        if stored is None:
            await add_keys(connection, version, [key])
            continue
        if stored.tenant != key.tenant:
            raise ConfigInvalid(f"tenants: the key {key.id} belongs to {stored.tenant} in the store. Make another key.")
        if stored.revoked:
            log.warning("The declared key %s was revoked and stays so. Declare another one.", key.id)
            continue
        hashes = {secret.sha256 for secret in key.secrets}
        if hashes != {secret.sha256 for secret in stored.secrets}:
            await connection.execute(delete(key_secrets).where(key_secrets.c.key == key.id))
            secrets = [
                {"key": key.id, "sha256": sha256, "made": version, "expires_s": None} for sha256 in sorted(hashes)
            ]
            await connection.execute(insert(key_secrets), secrets)
        values = {
            "name": key.name,
            "scopes": key.scopes,
            "cache_controls": key.cache_controls,
            "expires_s": key.expires_s,
            "version": version,
        }
        await connection.execute(update(keys).where(keys.c.id == key.id).values(values))


async def _declare_limits(connection: AsyncConnection, version: int, declared: Sequence[Limit]) -> None:
    await _delete_replaced_limits(connection, version, declared)
    # The id of a limit is derived from its subject, kind, model and hardness, so a limit that is declared again has its
    # old id.
    redeclared = _id_in(limits.c.id, declared) & limits.c.deleted
    await connection.execute(update(limits).where(redeclared).values(deleted=False, version=version))
    known = {limit.id: limit for limit in await find_limits(connection, _id_in(limits.c.id, declared))}
    changed = [limit for limit in declared if known.get(limit.id) != limit]
    if changed:
        await put_limits(connection, version, changed)


async def _delete_replaced_limits(connection: AsyncConnection, version: int, declared_limits: Sequence[Limit]) -> None:
    """Deletes limits made through the API that conflict with declared ones.

    Each combination of subject, kind, model and hardness has at most one limit.
    """
    declared_ids = {limit.id for limit in declared_limits}
    replaced = {_limit_identity(limit) for limit in declared_limits}
    subjects = {limit.subject for limit in declared_limits}
    for limit in await find_limits(connection, limits.c.subject.in_(subjects), ~limits.c.deleted):
        if limit.id not in declared_ids and _limit_identity(limit) in replaced:
            log.warning("The limit %s (%s of %s) is now the declared one.", limit.id, limit.kind, limit.subject)
            await delete_limit(connection, version, limit.id)


def _limit_identity(limit: Limit) -> tuple[str, str, str | None, bool]:
    """Returns the subject, kind, model and hardness, a combination that identifies one limit."""
    return limit.subject, limit.kind, limit.model, limit.hard


def _id_in(column: Column[str], entities: Collection[Tenant | ApiKey | Limit]) -> ColumnElement[bool]:
    return column.in_([entity.id for entity in entities])
