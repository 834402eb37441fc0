"""Tenants in the database: what a directory's transaction does to them."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound
from maitred.core.tenancy import Tenant, is_id
from maitred.store.rules import changed, check_tenant
from maitred.store.schema import keys, tenants

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
_MAY_CHANGE = frozenset({"name", "weight", "models", "priority_ceiling", "regions", "tags", "disabled"})
_NAMED = 5
"""A message names so many of the things that are in the way."""


async def one_tenant(connection: AsyncConnection, tenant_id: str) -> Tenant:
    """The tenant of that id."""
    found = await some_tenants(connection, tenants.c.id == tenant_id, ~tenants.c.deleted) if is_id(tenant_id) else []
    if not found:
        raise ResourceNotFound("There is no tenant of that id. GET /admin/v1/tenants lists them.")
    return found[0]


async def some_tenants(
    connection: AsyncConnection,
    *conditions: ColumnElement[bool],
    order: Column[Any] = tenants.c.id,
    limit: int | None = None,
) -> list[Tenant]:
    """The tenants that fulfil all conditions."""
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
    """Adds tenants, organisations before their teams. They have been checked by themselves."""
    taken = await _known(connection, {tenant.id for tenant in new})
    parents = await _known(connection, {tenant.parent for tenant in new if tenant.parent is not None})
    rows: list[dict[str, Any]] = []
    for tenant in new:
        if tenant.id in taken:
            raise _taken(tenant.id, deleted=taken[tenant.id][1])
        if tenant.parent is not None:
            _check_parent(tenant.parent, parents)
        rows.append(_row(tenant, version))
        taken[tenant.id] = (tenant.parent, False)
        parents.setdefault(tenant.id, taken[tenant.id])
    await connection.execute(insert(tenants), rows)


async def change_tenant(
    connection: AsyncConnection, version: int, tenant_id: str, changes: dict[str, object]
) -> Tenant:
    """Changes some fields."""
    tenant = changed(await one_tenant(connection, tenant_id), changes, _MAY_CHANGE)
    check_tenant(tenant)
    await connection.execute(update(tenants).where(tenants.c.id == tenant_id).values(_row(tenant, version)))
    return tenant


async def delete_tenant(connection: AsyncConnection, version: int, tenant_id: str, now_s: float) -> None:
    """Deletes a tenant that has no teams and no key that could still be used."""
    await one_tenant(connection, tenant_id)
    teams = select(tenants.c.id).where(tenants.c.parent == tenant_id, ~tenants.c.deleted)
    await _check_free(connection, teams.order_by(tenants.c.id), f"The tenant {tenant_id} has teams", "Delete them")
    unexpired = keys.c.expires_s.is_(None) | (keys.c.expires_s > now_s)
    live = select(keys.c.id).where(keys.c.tenant == tenant_id, ~keys.c.deleted, ~keys.c.revoked, unexpired)
    await _check_free(connection, live.order_by(keys.c.id), f"The tenant {tenant_id} has keys", "Revoke them")
    await connection.execute(update(tenants).where(tenants.c.id == tenant_id).values(deleted=True, version=version))


async def missing_tenants(connection: AsyncConnection, ids: set[str]) -> set[str]:
    """Those that do not exist, or no longer."""
    known = await _known(connection, ids)
    return {tenant_id for tenant_id in ids if tenant_id not in known or known[tenant_id][1]}


async def _known(connection: AsyncConnection, ids: set[str]) -> dict[str, tuple[str | None, bool]]:
    """Id -> its parent, and whether it was deleted."""
    query = select(tenants.c.id, tenants.c.parent, tenants.c.deleted).where(tenants.c.id.in_(ids))
    return {tenant_id: (parent, deleted) for tenant_id, parent, deleted in await connection.execute(query)}


async def _check_free(connection: AsyncConnection, query: Any, has: str, remedy: str) -> None:  # noqa: ANN401
    found = (await connection.execute(query.limit(_NAMED + 1))).scalars().all()
    if found:
        names = ", ".join(found[:_NAMED]) + (" and more" if len(found) > _NAMED else "")
        raise Conflict(f"{has}: {names}. {remedy} first.")


def _check_parent(parent: str, known: dict[str, tuple[str | None, bool]]) -> None:
    grandparent, deleted = known.get(parent, (None, True))
    if deleted:
        raise InvalidRequest(f"There is no organisation {parent}. Create it first.", param="parent")
    if grandparent is not None:
        raise InvalidRequest(
            f"{parent} is a team of {grandparent}, and a team has no teams. Name an organisation.", param="parent"
        )


def _taken(tenant_id: str, *, deleted: bool) -> Conflict:
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
