"""Scopes of the semantic cache in the database, which all gateways of an installation share.

What look-ups have found is applied to a scope in one transaction that holds the lock of its row, so gateways count
together and none overwrites what another one has counted. Beside the row there are the questions of compared answers,
which a verifier learns from, and the verifier's weights. The questions are texts of users: a scope has at most as many
as its training asks for, and they go with it. A scope that nobody has asked for some time is deleted.

Vectors of different encoders say different things. So all of this is kept by encoder: gateways that have different ones
do not touch each other's, and that of an encoder that no gateway has any more is deleted as nobody asks it.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import ColumnElement, FromClause, and_, delete, insert, or_, select, tuple_, update
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

ScopeChange = Callable[[ScopeRecord], tuple[ScopeRecord, Sequence[LabelledPair]]]
"""Function from the old state of a scope to its new state, and the labels that the new state counts in addition."""

_KEPT_S = 90 * 86_400.0
"""Time in seconds after its last change at which a scope is deleted, with its texts."""
_SWEEP_INTERVAL_S = 3_600.0
_ATTEMPT_BITS = 48
"""Bits of the first attempt of a scope, which is drawn: one that was removed and begins again must repeat none."""
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

    async def load(self, scope: str, encoder: str) -> ScopeRecord | None:
        """Returns the state of a scope for an encoder; None: there is none."""
        query = select(semantic_scopes.c.record).where(_is(semantic_scopes, scope, encoder))
        async with self._database.begin_read() as connection:
            data = (await connection.execute(query)).scalar_one_or_none()
        return None if data is None else _parse_record(data)

    async def last_changes(self, scopes: Sequence[str], encoder: str) -> dict[str, float]:
        """Returns for each of the scopes that there are the wall time of its last change."""
        columns = semantic_scopes.c
        query = select(columns.scope, columns.updated_s).where(columns.encoder == encoder, columns.scope.in_(scopes))
        async with self._database.begin_read() as connection:
            rows = (await connection.execute(query)).all()
        return {row.scope: row.updated_s for row in rows}

    async def weights(self, scope: str, encoder: str, verifier: str) -> bytes | None:
        """Returns the weights of a version of the verifier; None: the scope has another one, or none."""
        columns = semantic_verifiers.c
        query = select(columns.weights).where(_is(semantic_verifiers, scope, encoder), columns.version == verifier)
        async with self._database.begin_read() as connection:
            weights: bytes | None = (await connection.execute(query)).scalar_one_or_none()
        return weights

    async def labels(self, scope: str, encoder: str, limit: int) -> list[LabelledPair]:
        """Returns the newest labels of a scope, the newest first."""
        columns = semantic_labels.c
        query = select(columns.asked, columns.cached, columns.same, columns.surroundings, columns.regions)
        query = query.where(_is(semantic_labels, scope, encoder)).order_by(columns.id.desc()).limit(limit)
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

    async def change(self, scope: str, encoder: str, change: ScopeChange) -> ScopeRecord:
        """Applies `change` to the state of a scope, stores the labels that count, and returns the new state.

        A scope that there is not begins now.

        Args:
            scope: Its name, as of `StoredScope`.
            encoder: Version of the encoder that has judged for it.
            change: The change. If it raises, the scope stays unchanged.

        Raises:
            StoreUnavailable: Nothing was stored; only if the connection broke during the commit, it may have been. So
                outcomes that are applied again may count twice.
        """
        async with self._database.begin() as connection:
            while (before := await self._lock(connection, scope, encoder)) is None:
                # Another gateway may make it at the same time.
                new = ScopeRecord(encoder=encoder, attempt=secrets.randbits(_ATTEMPT_BITS))
                values = {**_owner_of(scope), "encoder": encoder, **self._values(new)}
                await connection.execute(self._insert(semantic_scopes).values(values).on_conflict_do_nothing())
            after, labels = change(before)
            await self._write(connection, scope, after)
            if labels:
                parts = {"scope": scope, "encoder": encoder, "created_s": self._clock.wall_s()}
                rows = [{**parts, **msgspec.structs.asdict(label)} for label in labels]
                await connection.execute(insert(semantic_labels), rows)
        return after

    async def claim_training(self, scope: str, encoder: str, attempt: int, lease_s: float) -> bool:
        """Claims the training of a scope's verifier for a gateway; returns whether no other one has it.

        Args:
            scope: Its name.
            encoder: Version of the encoder.
            attempt: `ScopeRecord.attempt` of the labels.
            lease_s: Time in seconds after which another gateway may begin: this one may be lost.
        """
        now_s = self._clock.wall_s()
        async with self._database.begin() as connection:
            before = await self._lock(connection, scope, encoder)
            if before is None or before.verifier or before.attempt != attempt:
                return False
            if before.trained_until_s > now_s or before.untaught == before.labels:
                return False
            await self._write(connection, scope, replace(before, trained_until_s=now_s + lease_s))
        return True

    async def give_up_training(self, scope: str, encoder: str, attempt: int) -> None:
        """Notes that no verifier can be learnt from the labels of a scope, so that nobody tries it again with them.

        Args:
            scope: Its name.
            encoder: Version of the encoder.
            attempt: `ScopeRecord.attempt` of the labels.
        """
        async with self._database.begin() as connection:
            before = await self._lock(connection, scope, encoder)
            if before is not None and before.attempt == attempt:
                await self._write(connection, scope, replace(before, untaught=before.labels))

    async def set_verifier(
        self, scope: str, encoder: str, attempt: int, version: str, weights: bytes
    ) -> ScopeRecord | None:
        """Gives a scope the verifier that was trained from its labels.

        Args:
            scope: Its name.
            encoder: Version of the encoder.
            attempt: `ScopeRecord.attempt` when the training began.
            version: Version of the verifier.
            weights: Its weights.

        Returns:
            The new state; None: it has one from another gateway, has begun anew, or is no more.
        """
        async with self._database.begin() as connection:
            before = await self._lock(connection, scope, encoder)
            if before is None or before.verifier or before.attempt != attempt:
                return None
            after = before.with_verifier(version)
            await self._write(connection, scope, after)
            row = {"scope": scope, "encoder": encoder, "version": version, "weights": weights}
            await connection.execute(insert(semantic_verifiers).values(row))
        return after

    async def reset(self, scope: str, encoder: str, *, keep_labels: bool) -> ScopeRecord | None:
        """Lets a scope begin anew, without a verifier and without a certification.

        Args:
            scope: Its name.
            encoder: Version of the encoder.
            keep_labels: Whether the next verifier is trained from the labels that are there.

        Returns:
            The new state; None: there is no such scope.
        """
        async with self._database.begin() as connection:
            before = await self._lock(connection, scope, encoder)
            if before is None:
                return None
            after = before.begin_anew(keep_labels=keep_labels)
            for table in (semantic_verifiers,) if keep_labels else (semantic_verifiers, semantic_labels):
                await connection.execute(delete(table).where(_is(table, scope, encoder)))
            await self._write(connection, scope, after)
        return after

    async def remove(self, scope: str, encoder: str) -> bool:
        """Deletes a scope with its labels and its verifier; returns whether there was one."""
        return await self._delete(_is(semantic_scopes, scope, encoder)) > 0

    async def scopes(
        self,
        *,
        model: str | None = None,
        tenant: str | None = None,
        after: tuple[str, str] = ("", ""),
        limit: int = 100,
    ) -> list[StoredScope]:
        """Returns a page of scopes in the order of their names and encoders.

        Args:
            model: Only those of this model.
            tenant: Only those of this tenant and of the teams below it.
            after: Name and encoder of the last scope of the page before.
            limit: Most scopes.
        """
        columns = semantic_scopes.c
        place = tuple_(columns.scope, columns.encoder)
        query = select(*_LISTED).where(place > after, *_selects(model, tenant))
        query = query.order_by(columns.scope, columns.encoder).limit(limit)
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

    async def _lock(self, connection: AsyncConnection, scope: str, encoder: str) -> ScopeRecord | None:
        """Locks the row of a scope and returns its state."""
        query = select(semantic_scopes.c.record).where(_is(semantic_scopes, scope, encoder)).with_for_update()
        data = (await connection.execute(query)).scalar_one_or_none()
        return None if data is None else _parse_record(data)

    async def _write(self, connection: AsyncConnection, scope: str, record: ScopeRecord) -> None:
        where = _is(semantic_scopes, scope, record.encoder)
        await connection.execute(update(semantic_scopes).where(where).values(self._values(record)))

    def _values(self, record: ScopeRecord) -> dict[str, Any]:
        return {"updated_s": self._clock.wall_s(), "record": msgspec.msgpack.encode(record)}


def _is(table: FromClause, scope: str, encoder: str) -> ColumnElement[bool]:
    return and_(table.c.scope == scope, table.c.encoder == encoder)


def _selects(model: str | None, tenant: str | None) -> Iterator[ColumnElement[bool]]:
    """Yields the conditions that scopes are of a model, and of a tenant or of the teams below it."""
    columns = semantic_scopes.c
    if model is not None:
        yield columns.model == model
    if tenant is not None:
        yield or_(columns.tenant == tenant, columns.organisation == tenant)


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
