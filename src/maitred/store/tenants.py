"""Tenants in the database, read and changed inside directory transactions."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound
from maitred.core.tenancy import Tenant, is_id
from maitred.store.rules import apply_changes, check_tenant
from maitred.store.schema import keys, semantic_scopes, tenants

_COLUMNS = (
    tenants.c.id,
    tenants.c.parent,
    tenants.c.name,
    tenants.c.weight,
    tenants.c.models,
    tenants.c.priority_ceiling,
    tenants.c.regions,
    tenants.c.tags,
    tenants.c.disabled,
)
_MUTABLE_FIELDS = frozenset({"name", "weight", "models", "priority_ceiling", "regions", "tags", "disabled"})
_MAX_NAMED = 5
"""Largest number of ids in one error message."""


async def get_tenant(connection: AsyncConnection, tenant_id: str) -> Tenant:
    """Returns the tenant with this id."""
    found = await find_tenants(connection, tenants.c.id == tenant_id, ~tenants.c.deleted) if is_id(tenant_id) else []
    if not found:
        raise ResourceNotFound("There is no tenant of that id. GET /admin/v1/tenants lists them.")
    return found[0]


async def find_tenants(
    connection: AsyncConnection,
    *conditions: ColumnElement[bool],
    order: Column[Any] = tenants.c.id,
    limit: int | None = None,
) -> list[Tenant]:
    """Returns the tenants that match all conditions."""
    result = await connection.execute(select(*_COLUMNS).where(*conditions).order_by(order).limit(limit))
    return [
        Tenant(
            id=tenant_id,
            parent=parent,
            name=name,
            weight=weight,
            models=None if models is None else tuple(models),
            priority_ceiling=priority_ceiling,
            regions=tuple(regions),
            tags=tuple(tags),
            disabled=disabled,
        )
        for tenant_id, parent, name, weight, models, priority_ceiling, regions, tags, disabled in result
    ]


async def add_tenants(connection: AsyncConnection, version: int, new: Sequence[Tenant]) -> None:
    """Adds tenants, with organisations before their teams.

    The caller has checked each tenant by itself.
    """
    existing = await _load_parents(connection, {tenant.id for tenant in new})
    parents = await _load_parents(connection, {tenant.parent for tenant in new if tenant.parent is not None})
    rows: list[dict[str, Any]] = []
    for tenant in new:
        if tenant.id in existing:
            raise _id_taken(tenant.id, deleted=existing[tenant.id][1])
        if tenant.parent is not None:
            _check_parent(tenant.parent, parents)
        rows.append(_row(tenant, version))
        existing[tenant.id] = (tenant.parent, False)
        parents.setdefault(tenant.id, existing[tenant.id])
    await connection.execute(insert(tenants), rows)


async def change_tenant(
    connection: AsyncConnection, version: int, tenant_id: str, changes: dict[str, object]
) -> Tenant:
    """Changes fields of a tenant."""
    tenant = apply_changes(await get_tenant(connection, tenant_id), changes, _MUTABLE_FIELDS)
    check_tenant(tenant)
    await connection.execute(update(tenants).where(tenants.c.id == tenant_id).values(_row(tenant, version)))
    return tenant


async def delete_tenant(connection: AsyncConnection, version: int, tenant_id: str, now_s: float) -> None:
    """Deletes a tenant that has no teams and no key that could still be used, and the questions of its users."""
    await get_tenant(connection, tenant_id)
    teams = select(tenants.c.id).where(tenants.c.parent == tenant_id, ~tenants.c.deleted)
    await _require_none(connection, teams.order_by(tenants.c.id), f"The tenant {tenant_id} has teams", "Delete them")
    unexpired = keys.c.expires_s.is_(None) | (keys.c.expires_s > now_s)
    live = select(keys.c.id).where(keys.c.tenant == tenant_id, ~keys.c.deleted, ~keys.c.revoked, unexpired)
    await _require_none(connection, live.order_by(keys.c.id), f"The tenant {tenant_id} has keys", "Revoke them")
    await connection.execute(update(tenants).where(tenants.c.id == tenant_id).values(deleted=True, version=version))
    # Questions of a scope that all callers share do not say whose they are; it goes only as a whole.
    await connection.execute(delete(semantic_scopes).where(semantic_scopes.c.tenant == tenant_id))


async def missing_tenants(connection: AsyncConnection, ids: set[str]) -> set[str]:
    """Returns the ids that belong to no tenant or to a deleted tenant."""
    existing = await _load_parents(connection, ids)
    return {tenant_id for tenant_id in ids if tenant_id not in existing or existing[tenant_id][1]}


async def _load_parents(connection: AsyncConnection, ids: set[str]) -> dict[str, tuple[str | None, bool]]:
    """Returns a map from each existing id to its parent and whether the tenant is deleted."""
    query = select(tenants.c.id, tenants.c.parent, tenants.c.deleted).where(tenants.c.id.in_(ids))
    return {tenant_id: (parent, deleted) for tenant_id, parent, deleted in await connection.execute(query)}


async def _require_none(connection: AsyncConnection, query: Any, problem: str, remedy: str) -> None:  # noqa: ANN401
    found = (await connection.execute(query.limit(_MAX_NAMED + 1))).scalars().all()
    if found:
        names = ", ".join(found[:_MAX_NAMED]) + (" and more" if len(found) > _MAX_NAMED else "")
        raise Conflict(f"{problem}: {names}. {remedy} first.")


def _check_parent(parent: str, parents: dict[str, tuple[str | None, bool]]) -> None:
    grandparent, deleted = parents.get(parent, (None, True))
    if deleted:
        raise InvalidRequest(f"There is no organisation {parent}. Create it first.", param="parent")
    if grandparent is not None:
        raise InvalidRequest(
            f"{parent} is a team of {grandparent}, and a team has no teams. Name an organisation.", param="parent"
        )


def _id_taken(tenant_id: str, *, deleted: bool) -> Conflict:
    if deleted:
        return Conflict(f"There was a tenant {tenant_id}; ids are not used again. Choose another.")
    return Conflict(f"There is a tenant {tenant_id} already. Change it, or choose another id.")


def _row(tenant: Tenant, version: int) -> dict[str, Any]:
    return {
        "id": tenant.id,
        "parent": tenant.parent,
        "name": tenant.name,
        "weight": tenant.weight,
        "models": tenant.models,
        "priority_ceiling": tenant.priority_ceiling,
        "regions": tenant.regions,
        "tags": tenant.tags,
        "disabled": tenant.disabled,
        "deleted": False,
        "version": version,
    }
