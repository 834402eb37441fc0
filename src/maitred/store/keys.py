"""Keys and their secrets in the database, read and changed inside directory transactions."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Column, ColumnElement, String, cast, delete, exists, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound
from maitred.core.tenancy import ApiKey, CacheDirective, KeySecret, Scope, is_id
from maitred.store.rules import apply_changes, check_key
from maitred.store.schema import key_secrets, keys, tenants
from maitred.store.tenants import missing_tenants

_COLUMNS = (
    *(keys.c.id, keys.c.tenant, keys.c.name, keys.c.scopes, keys.c.expires_s, keys.c.revoked),
    keys.c.cache_controls,
)
_MUTABLE_FIELDS = frozenset({"name", "scopes", "expires_s", "cache_controls"})
_SCOPES = {scope.value: scope for scope in Scope}


async def get_key(connection: AsyncConnection, key_id: str) -> ApiKey:
    """Returns the key with this id."""
    found = await find_keys(connection, keys.c.id == key_id, ~keys.c.deleted) if is_id(key_id) else []
    if not found:
        raise ResourceNotFound("There is no key of that id. GET /admin/v1/keys lists them.")
    return found[0]


async def find_keys(
    connection: AsyncConnection,
    *conditions: ColumnElement[bool],
    order: Column[Any] = keys.c.id,
    limit: int | None = None,
) -> list[ApiKey]:
    """Returns the keys that match all conditions, each with its secrets from the oldest to the newest."""
    query = select(*_COLUMNS).where(*conditions).order_by(order).limit(limit)
    rows = (await connection.execute(query)).all()
    if not rows:
        return []
    # For a page, the keys are listed by id; without a limit there may be too many ids for one statement.
    key_filter = select(keys.c.id).where(*conditions) if limit is None else [row.id for row in rows]
    found = await connection.execute(
        select(key_secrets.c.key, key_secrets.c.sha256, key_secrets.c.expires_s)
        .where(key_secrets.c.key.in_(key_filter))
        .order_by(key_secrets.c.made, key_secrets.c.sha256)
    )
    secrets: defaultdict[str, list[KeySecret]] = defaultdict(list)
    for key_id, sha256, expires_s in found:
        secrets[key_id].append(KeySecret(sha256, expires_s))
    return [
        ApiKey(
            id=key_id,
            tenant=tenant,
            name=name,
            scopes=tuple([_SCOPES[scope] for scope in scopes]),
            secrets=tuple(secrets[key_id]),
            expires_s=expires_s,
            revoked=revoked,
            cache_controls=None if controls is None else tuple([CacheDirective(control) for control in controls]),
        )
        for key_id, tenant, name, scopes, expires_s, revoked, controls in rows
    ]


async def add_keys(connection: AsyncConnection, version: int, new: Sequence[ApiKey]) -> None:
    """Adds keys; the caller has checked each key by itself."""
    if missing := await missing_tenants(connection, {key.tenant for key in new}):
        raise InvalidRequest(f"There is no tenant {min(missing)}. Create it first.", param="tenant")
    query = select(keys.c.id, keys.c.deleted).where(keys.c.id.in_({key.id for key in new}))
    deleted_by_id = {row.id: row.deleted for row in await connection.execute(query)}
    for key in new:
        if key.id in deleted_by_id:
            existence = "There was a key" if deleted_by_id[key.id] else "There is a key"
            raise Conflict(f"{existence} {key.id}, and ids are not used again. Choose another id.")
        deleted_by_id[key.id] = False
    await connection.execute(insert(keys), [_row(key, version) for key in new])
    secrets = [_secret_row(key.id, secret, version) for key in new for secret in key.secrets]
    await connection.execute(insert(key_secrets), secrets)


async def usable_admin_keys(connection: AsyncConnection, now_s: float) -> set[str]:
    """Returns the ids of the keys that can administer the installation at this time, if nothing is changed before."""
    parents = tenants.alias()
    secret = exists().where(
        key_secrets.c.key == keys.c.id, or_(key_secrets.c.expires_s.is_(None), key_secrets.c.expires_s > now_s)
    )
    query = (
        select(keys.c.id, keys.c.scopes)
        .join(tenants, keys.c.tenant == tenants.c.id)
        .outerjoin(parents, tenants.c.parent == parents.c.id)
        .where(cast(keys.c.scopes, String).contains(Scope.ADMIN.value), ~keys.c.revoked, ~keys.c.deleted, secret)
        .where(or_(keys.c.expires_s.is_(None), keys.c.expires_s > now_s))
        .where(~tenants.c.disabled, or_(parents.c.disabled.is_(None), ~parents.c.disabled))
    )
    return {row.id for row in await connection.execute(query) if Scope.ADMIN.value in row.scopes}


async def change_key(
    connection: AsyncConnection, version: int, key_id: str, changes: dict[str, object], now_s: float
) -> ApiKey:
    """Changes fields of a key that is not revoked."""
    stored = await get_key(connection, key_id)
    if stored.revoked:
        raise Conflict(f"The key {key_id} is revoked. Create another one.")
    key = apply_changes(stored, changes, _MUTABLE_FIELDS)
    # Only changed fields are checked, so an expired key may get another name.
    check_key(
        msgspec.structs.replace(
            key,
            expires_s=key.expires_s if "expires_s" in changes else None,
            secrets=tuple(KeySecret(secret.sha256) for secret in key.secrets),
        ),
        now_s,
    )
    await connection.execute(update(keys).where(keys.c.id == key_id).values(_row(key, version)))
    return key


async def revoke_key(connection: AsyncConnection, version: int, key_id: str) -> ApiKey:
    """Revokes a key permanently. Revoking it again changes nothing."""
    key = await get_key(connection, key_id)
    await connection.execute(update(keys).where(keys.c.id == key_id).values(revoked=True, version=version))
    return msgspec.structs.replace(key, revoked=True)


async def rotate_key(
    connection: AsyncConnection, version: int, key_id: str, sha256: bytes, overlap_s: float, now_s: float
) -> ApiKey:
    """Gives an active key a new secret.

    Older secrets end after the overlap, or earlier if they expire earlier.
    """
    key = await get_key(connection, key_id)
    if key.revoked or (key.expires_s is not None and key.expires_s <= now_s):
        raise Conflict(f"The key {key_id} is {'revoked' if key.revoked else 'expired'}. Create another one.")
    if any(secret.sha256 == sha256 for secret in key.secrets):
        raise Conflict(f"The key {key_id} has that secret already. Make a new one.")
    of_key, overlap_ends_s = key_secrets.c.key == key_id, now_s + overlap_s
    ends_later = or_(key_secrets.c.expires_s.is_(None), key_secrets.c.expires_s > overlap_ends_s)
    await connection.execute(update(key_secrets).where(of_key, ends_later).values(expires_s=overlap_ends_s))
    await connection.execute(delete(key_secrets).where(of_key, key_secrets.c.expires_s <= now_s))
    await connection.execute(insert(key_secrets), [_secret_row(key_id, KeySecret(sha256), version)])
    await connection.execute(update(keys).where(keys.c.id == key_id).values(version=version))
    return await get_key(connection, key_id)


async def delete_keys(connection: AsyncConnection, version: int, tenant_id: str) -> list[str]:
    """Deletes the keys of a tenant that is being deleted, with all hashes of their secrets."""
    query = select(keys.c.id).where(keys.c.tenant == tenant_id, ~keys.c.deleted)
    key_ids = list((await connection.execute(query)).scalars())
    of_tenant = select(keys.c.id).where(keys.c.tenant == tenant_id)
    await connection.execute(delete(key_secrets).where(key_secrets.c.key.in_(of_tenant)))
    await connection.execute(
        update(keys).where(keys.c.tenant == tenant_id, ~keys.c.deleted).values(deleted=True, version=version)
    )
    return key_ids


async def missing_keys(connection: AsyncConnection, ids: set[str]) -> set[str]:
    """Returns the ids that belong to no key or to a deleted key."""
    query = select(keys.c.id).where(keys.c.id.in_(ids), ~keys.c.deleted)
    return ids - set((await connection.execute(query)).scalars())


def _row(key: ApiKey, version: int) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "scopes": key.scopes,
        "expires_s": key.expires_s,
        "revoked": key.revoked,
        "cache_controls": key.cache_controls,
        "deleted": False,
        "version": version,
    }


def _secret_row(key_id: str, secret: KeySecret, version: int) -> dict[str, Any]:
    return {"key": key_id, "sha256": secret.sha256, "made": version, "expires_s": secret.expires_s}
