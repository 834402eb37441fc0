"""Limits in the database, read and changed inside directory transactions."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, Double, cast, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import is_id
from maitred.store.keys import missing_keys
from maitred.store.schema import limits
from maitred.store.tenants import missing_tenants

_COLUMNS = (
    limits.c.id,
    limits.c.subject,
    limits.c.kind,
    limits.c.value,
    limits.c.model,
    limits.c.burst,
    limits.c.hard,
)
_KINDS = {kind.value: kind for kind in LimitKind}


async def get_limit(connection: AsyncConnection, limit_id: str) -> Limit:
    """Returns the limit with this id."""
    found = await find_limits(connection, limits.c.id == limit_id, ~limits.c.deleted) if is_id(limit_id) else []
    if not found:
        raise ResourceNotFound("There is no limit of that id. GET /admin/v1/limits lists them.")
    return found[0]


async def find_limits(
    connection: AsyncConnection,
    *conditions: ColumnElement[bool],
    order: Column[Any] = limits.c.id,
    limit: int | None = None,
) -> list[Limit]:
    """Returns the limits that match all conditions."""
    query = select(*_COLUMNS).where(*conditions).order_by(order, limits.c.id).limit(limit)
    result = await connection.execute(query)
    return [
        Limit(
            id=limit_id,
            subject=subject,
            kind=_KINDS[kind],
            value=value,
            model=model or None,
            burst=burst,
            hard=hard,
        )
        for limit_id, subject, kind, value, model, burst, hard in result
    ]


async def longest_refill_s(connection: AsyncConnection) -> float:
    """Returns the longest time that any rate takes from empty to full, or 0 if there are no rates."""
    minutes = func.coalesce(limits.c.burst, limits.c.value) / cast(limits.c.value, Double)
    rates = [kind.value for kind in LimitKind if kind.per_minute]
    query = select(func.max(minutes)).where(~limits.c.deleted, limits.c.kind.in_(rates))
    return 60.0 * (await connection.scalar(query) or 0.0)


async def put_limits(connection: AsyncConnection, version: int, new: Sequence[Limit]) -> None:
    """Adds limits, or changes the values of existing limits.

    The caller has checked each limit by itself.
    """
    await _check_subjects(connection, {limit.subject for limit in new})
    ids = {limit.id for limit in new}
    by_id = {row.id: row for row in await connection.execute(select(limits).where(limits.c.id.in_(ids)))}
    existing = select(limits).where(limits.c.subject.in_({limit.subject for limit in new}), ~limits.c.deleted)
    id_by_identity = {
        (row.subject, row.model, row.kind, row.hard): row.id for row in await connection.execute(existing)
    }
    added: dict[str, dict[str, Any]] = {}
    for limit in new:
        identity = (limit.subject, limit.model or "", limit.kind.value, limit.hard)
        if limit.id in added or (limit.id in by_id and by_id[limit.id].deleted):
            raise Conflict(f"There was a limit {limit.id} before, and ids are not used again. Choose another id.")
        existing_id = id_by_identity.setdefault(identity, limit.id)
        if existing_id != limit.id:
            raise Conflict(
                f"The limit {existing_id} already sets {limit.kind} for {limit.subject}"
                f"{'' if limit.model is None else f' and the model {limit.model}'}. Change that one, or delete it."
            )
        if (stored := by_id.get(limit.id)) is None:
            added[limit.id] = _row(limit, version)
            continue
        if (stored.subject, stored.model, stored.kind) != identity[:3]:
            raise Conflict(
                f"The limit {limit.id} sets {stored.kind} for {stored.subject}, and only its value, burst and hardness "
                "can be changed. Make another one."
            )
        values = {"value": limit.value, "burst": limit.burst, "hard": limit.hard, "version": version}
        await connection.execute(update(limits).where(limits.c.id == limit.id).values(values))
    if added:
        await connection.execute(insert(limits), list(added.values()))


async def delete_limit(connection: AsyncConnection, version: int, limit_id: str) -> None:
    """Deletes the limit with this id."""
    await get_limit(connection, limit_id)
    await connection.execute(update(limits).where(limits.c.id == limit_id).values(deleted=True, version=version))


async def delete_limits_of(connection: AsyncConnection, version: int, subjects: Sequence[str]) -> None:
    """Deletes the limits of subjects that are being deleted."""
    of_subjects = limits.c.subject.in_(subjects) & ~limits.c.deleted
    await connection.execute(update(limits).where(of_subjects).values(deleted=True, version=version))


async def _check_subjects(connection: AsyncConnection, subjects: set[str]) -> None:
    for sort, find_missing in (("tenant", missing_tenants), ("key", missing_keys)):
        prefix = f"{sort}:"
        ids = {subject.removeprefix(prefix) for subject in subjects if subject.startswith(prefix)} - {"*"}
        if ids and (missing := await find_missing(connection, ids)):
            raise InvalidRequest(f"There is no {sort} {min(missing)}. Create it first.", param="subject")


def _row(limit: Limit, version: int) -> dict[str, Any]:
    return {
        "id": limit.id,
        "subject": limit.subject,
        "kind": limit.kind.value,
        "model": limit.model or "",
        "value": limit.value,
        "burst": limit.burst,
        "hard": limit.hard,
        "deleted": False,
        "made": version,
        "version": version,
    }
