"""Scopes of the semantic cache in the database, which all gateways of an installation share.

What look-ups have found is applied to a scope in one transaction that holds the lock of its row, so gateways count
together and none overwrites what another one has counted. Beside the row there are the questions of compared answers,
which a verifier learns from, and the verifier's weights. The questions are texts of users: a scope has at most as many
as its training asks for, and they go with it. A scope that nobody has asked for some time is deleted.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import ColumnElement, delete, insert, or_, select, update
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable
from maitred.core.request import LabelledPair
from maitred.core.semantic_scope import ScopeRecord
from maitred.store.database import Database
from maitred.store.driver import make_insert
from maitred.store.schema import semantic_labels, semantic_scopes, semantic_verifiers

log = logging.getLogger(__name__)

ScopeChange = Callable[[ScopeRecord | None], tuple[ScopeRecord, Sequence[LabelledPair]]]
"""Function from the old state of a scope to its new state, and the labels that the new state counts in addition.

The old state is None if there is no such scope.
"""

_KEPT_S = 90 * 86_400.0
"""Time in seconds after its last change at which a scope is deleted, with its texts."""
_SWEEP_INTERVAL_S = 3_600.0
_LISTED = [semantic_scopes.c[name] for name in ("scope", "model", "tenant", "organisation", "updated_s", "record")]


class StoredScope(Struct, frozen=True, kw_only=True):
    """Scope of the semantic cache, for operators.

    Attributes:
        scope: Name: the model and who shares its answers, as a list in JSON.
        model: The model.
        tenant: Tenant that shares the answers, or whose key does; empty: all callers do.
        organisation: Organisation of the tenant; the tenant itself if it is one.
        updated_s: Wall time of the last change.
        record: State.
    """

    scope: str
    model: str
    tenant: str
    organisation: str
    updated_s: float
    record: ScopeRecord


class StoredLabel(Struct, frozen=True, kw_only=True):
    """Compared questions of a scope, for operators.

    Attributes:
        id: Number that only grows.
        scope: Name of the scope.
        asked: The later question.
        cached: The earlier one, whose answer was in the cache.
        same: Whether their answers were the same.
        created_s: Wall time of the comparison.
    """

    id: int
    scope: str
    asked: str
    cached: str
    same: bool
    created_s: float


class SemanticStore:
    """Store of the scopes of the semantic cache. Every method may raise `StoreUnavailable`.

    Args:
        database: The database.
        clock: Clock for the times of changes.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._insert = make_insert(database.engine)

    async def load(self, scope: str) -> ScopeRecord | None:
        """Returns the state of a scope; None: there is none."""
        query = select(semantic_scopes.c.record).where(semantic_scopes.c.scope == scope)
        async with self._database.begin_read() as connection:
            data = (await connection.execute(query)).scalar_one_or_none()
        return None if data is None else _parse_record(data)

    async def weights(self, scope: str, verifier: str) -> bytes | None:
        """Returns the weights of a version of the verifier; None: the scope has another one, or none."""
        columns = semantic_verifiers.c
        query = select(columns.weights).where(columns.scope == scope, columns.version == verifier)
        async with self._database.begin_read() as connection:
            weights: bytes | None = (await connection.execute(query)).scalar_one_or_none()
        return weights

    async def labels(self, scope: str, limit: int) -> list[LabelledPair]:
        """Returns the newest labels of a scope, the newest first."""
        columns = semantic_labels.c
        query = select(columns.asked, columns.cached, columns.same, columns.surroundings)
        query = query.where(columns.scope == scope).order_by(columns.id.desc()).limit(limit)
        async with self._database.begin_read() as connection:
            rows = (await connection.execute(query)).all()
        return [msgspec.convert(list(row), LabelledPair) for row in rows]

    async def list_labels(
        self,
        *,
        model: str | None = None,
        tenant: str | None = None,
        scope: str | None = None,
        same: bool | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[StoredLabel]:
        """Returns a page of labels with their times, the newest first.

        Args:
            model: Only those of this model.
            tenant: Only those of this tenant and of the teams below it.
            scope: Only those of the scope of this name.
            same: Only those whose answers were the same, or were not.
            before: Id of the last label of the page before.
            limit: Most labels.
        """
        columns = semantic_labels.c
        query = select(*(columns[name] for name in StoredLabel.__struct_fields__)).order_by(columns.id.desc())
        if model is not None or tenant is not None:
            query = query.join(semantic_scopes).where(*_selects(model, tenant))
        if scope is not None:
            query = query.where(columns.scope == scope)
        if same is not None:
            query = query.where(columns.same == same)
        if before is not None:
            query = query.where(columns.id < before)
        async with self._database.begin_read() as connection:
            rows = (await connection.execute(query.limit(limit))).all()
        return [StoredLabel(**row._mapping) for row in rows]

    async def change(self, scope: str, change: ScopeChange) -> ScopeRecord:
        """Applies `change` to the state of a scope, stores the labels that count, and returns the new state.

        If the new state has another encoder, nothing is left of the labels and of the verifier that were there.

        Args:
            scope: Its name, as of `StoredScope`.
            change: The change. If it raises, the scope stays unchanged.

        Raises:
            StoreUnavailable: Nothing was stored; only if the connection broke during the commit, it may have been. So
                outcomes that are applied again may count twice.
        """
        async with self._database.begin() as connection:
            before = await self._lock(connection, scope)
            while before is None:
                after, labels = change(None)
                values = {**_owner_of(scope), **self._values(after)}
                made = await connection.execute(self._insert(semantic_scopes).values(values).on_conflict_do_nothing())
                if made.rowcount:
                    break
                # Another gateway has made it at the same time.
                before = await self._lock(connection, scope)
            if before is not None:
                after, labels = change(before)
                if after.encoder != before.encoder:
                    await _delete_parts(connection, scope, keep_labels=False)
                await self._write(connection, scope, after)
            if labels:
                now_s = self._clock.wall_s()
                rows = [{"scope": scope, "created_s": now_s, **msgspec.structs.asdict(label)} for label in labels]
                await connection.execute(insert(semantic_labels), rows)
        return after

    async def set_verifier(self, scope: str, attempt: int, version: str, weights: bytes) -> ScopeRecord | None:
        """Gives a scope the verifier that was trained from its labels.

        Args:
            scope: Its name.
            attempt: `ScopeRecord.attempt` when the training began.
            version: Version of the verifier.
            weights: Its weights.

        Returns:
            The new state; None: it has one from another gateway, has begun anew, or is no more.
        """
        async with self._database.begin() as connection:
            before = await self._lock(connection, scope)
            if before is None or before.verifier or before.attempt != attempt:
                return None
            after = before.with_verifier(version)
            await self._write(connection, scope, after)
            await connection.execute(insert(semantic_verifiers).values(scope=scope, version=version, weights=weights))
        return after

    async def reset(self, scope: str, *, keep_labels: bool) -> ScopeRecord | None:
        """Lets a scope begin anew, without a verifier and without a certification.

        Args:
            scope: Its name.
            keep_labels: Whether the next verifier is trained from the labels that are there.

        Returns:
            The new state; None: there is no such scope.
        """
        async with self._database.begin() as connection:
            before = await self._lock(connection, scope)
            if before is None:
                return None
            after = before.begin_anew(before.encoder, keep_labels=keep_labels)
            await _delete_parts(connection, scope, keep_labels=keep_labels)
            await self._write(connection, scope, after)
        return after

    async def remove(self, scope: str) -> bool:
        """Deletes a scope with its labels and its verifier; returns whether there was one."""
        return await self._delete(semantic_scopes.c.scope == scope) > 0

    async def scopes(
        self, *, model: str | None = None, tenant: str | None = None, after: str = "", limit: int = 100
    ) -> list[StoredScope]:
        """Returns a page of scopes in the order of their names.

        Args:
            model: Only those of this model.
            tenant: Only those of this tenant and of the teams below it.
            after: Name of the last scope of the page before.
            limit: Most scopes.
        """
        columns = semantic_scopes.c
        query = select(*_LISTED).where(columns.scope > after, *_selects(model, tenant))
        query = query.order_by(columns.scope).limit(limit)
        async with self._database.begin_read() as connection:
            rows = (await connection.execute(query)).all()
        return [_parse_scope(row) for row in rows]

    async def run(self) -> None:
        """Deletes scopes that nobody asks any more, until the task is cancelled."""
        while True:
            try:
                await self.sweep()
            except StoreUnavailable as error:
                log.warning("Old scopes of the semantic cache cannot be deleted now: %s", error)
            await asyncio.sleep(_SWEEP_INTERVAL_S)

    async def sweep(self) -> int:
        """Deletes scopes that nobody has asked for `_KEPT_S`; returns their number."""
        return await self._delete(semantic_scopes.c.updated_s <= self._clock.wall_s() - _KEPT_S)

    async def _delete(self, which: ColumnElement[bool]) -> int:
        async with self._database.begin() as connection:
            return (await connection.execute(delete(semantic_scopes).where(which))).rowcount

    async def _lock(self, connection: AsyncConnection, scope: str) -> ScopeRecord | None:
        """Locks the row of a scope and returns its state."""
        query = select(semantic_scopes.c.record).where(semantic_scopes.c.scope == scope).with_for_update()
        data = (await connection.execute(query)).scalar_one_or_none()
        return None if data is None else _parse_record(data)

    async def _write(self, connection: AsyncConnection, scope: str, record: ScopeRecord) -> None:
        values = self._values(record)
        await connection.execute(update(semantic_scopes).where(semantic_scopes.c.scope == scope).values(values))

    def _values(self, record: ScopeRecord) -> dict[str, Any]:
        data = msgspec.msgpack.encode(record)
        return {"encoder": record.encoder, "updated_s": self._clock.wall_s(), "record": data}


def _selects(model: str | None, tenant: str | None) -> Iterator[ColumnElement[bool]]:
    """Yields the conditions that scopes are of a model, and of a tenant or of the teams below it."""
    columns = semantic_scopes.c
    if model is not None:
        yield columns.model == model
    if tenant is not None:
        yield or_(columns.tenant == tenant, columns.organisation == tenant)


async def _delete_parts(connection: AsyncConnection, scope: str, *, keep_labels: bool) -> None:
    await connection.execute(delete(semantic_verifiers).where(semantic_verifiers.c.scope == scope))
    if not keep_labels:
        await connection.execute(delete(semantic_labels).where(semantic_labels.c.scope == scope))


def _owner_of(scope: str) -> dict[str, str]:
    """Returns the columns that name a scope: model, and who shares it (see `maitred.cache.answer_cache.scope_of`)."""
    model, kind, *owners = msgspec.json.decode(scope, type=list[str])
    if kind == "key":
        owners = owners[:-1]
    tenant, organisation = (owners[0], owners[-1]) if owners else ("", "")
    return {"scope": scope, "model": model, "tenant": tenant, "organisation": organisation}


def _parse_record(data: bytes) -> ScopeRecord:
    return msgspec.msgpack.decode(data, type=ScopeRecord)


def _parse_scope(row: Row[Any]) -> StoredScope:
    return StoredScope(**{**row._mapping, "record": _parse_record(row.record)})
