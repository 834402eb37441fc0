"""The cache of answers for operators: its state, what it keeps, its scopes of similar questions, and removals."""

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

import msgspec

from maitred.cache.backend import AnswerSelection, MemoryBackend
from maitred.cache.config import CacheScope, SemanticConfig
from maitred.cache.semantic.scope import SemanticScope
from maitred.observe.recent import RecentTraffic
from maitred.store.semantic import SemanticStore, StoredScope
from maitred.wire.admin.cache import CacheBody, CachedAnswersBody, SelectAnswers
from maitred.wire.admin.semantic import (
    LabelledPairBody,
    LabelledPairList,
    LabelledPairsQuery,
    ResetSemanticScopes,
    SelectSemanticScopes,
    SemanticScopeBody,
    SemanticScopeList,
    SemanticScopesQuery,
)
from maitred.wire.admin.times import to_iso

if TYPE_CHECKING:
    from maitred.cache.redis_backend import RedisBackend

_log = logging.getLogger(__name__)
_CHUNK = 500


class CacheAdmin:
    """Shows and clears the cache of answers. Implements `maitred.api.admin.service.CacheService`.

    Args:
        backend: Where the answers are kept.
        recent: Counts the look-ups.
        scopes: Store of the scopes of similar questions.
        settings: Returns the settings of the semantic cache, as they are now.
        on_change: Takes the name of a scope that an operator has let begin anew, or has removed; None: nobody
            wants to know.
    """

    def __init__(
        self,
        backend: "MemoryBackend | RedisBackend",
        recent: RecentTraffic,
        scopes: SemanticStore,
        settings: Callable[[], SemanticConfig],
        on_change: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._backend = backend
        self._recent = recent
        self._scopes = scopes
        self._settings = settings
        self._on_change = on_change

    async def describe(self) -> CacheBody:
        """Returns the state of the cache and what it keeps.

        Raises:
            StoreUnavailable: The Redis that keeps the answers is away.
        """
        kept = await self._backend.describe()
        return CacheBody(
            store=self._backend.state(),
            use=self._recent.cache_use,
            data=[
                CachedAnswersBody(
                    tenant=group.tenant,
                    model=group.model,
                    epoch=group.epoch,
                    answers=group.answers,
                    bytes=group.size,
                )
                for group in kept
            ],
        )

    async def remove(self, selection: SelectAnswers) -> int:
        """Removes the selected answers and returns their number.

        Raises:
            StoreUnavailable: The Redis that keeps the answers is away.
        """
        removed = await self._backend.remove(
            AnswerSelection(
                tenant=selection.tenant or None,
                model=selection.model or None,
                name=selection.key or None,
                epoch=selection.epoch,
            )
        )
        _log.info("An operator has removed %d answers from the cache.", removed)
        return removed

    async def scopes(self, query: SemanticScopesQuery) -> SemanticScopeList:
        """Returns a page of scopes of similar questions."""
        found = await self._scopes.scopes(
            model=query.model, tenant=query.tenant, after=_place_of(query.after), limit=query.limit + 1
        )
        settings = self._settings()
        data = [_scope_body(stored, settings) for stored in found[: query.limit]]
        has_more = len(found) > query.limit
        return SemanticScopeList(
            data=data, has_more=has_more, next=f"{data[-1].scope} {data[-1].encoder}" if has_more else None
        )

    async def labels(self, query: LabelledPairsQuery) -> LabelledPairList:
        """Returns a page of compared questions; `after` is empty or a number."""
        found = await self._scopes.list_labels(
            model=query.model,
            tenant=query.tenant,
            scope=query.scope,
            same=query.same,
            before=int(query.after) if query.after else None,
            limit=query.limit + 1,
        )
        data = [
            LabelledPairBody(
                scope=label.scope,
                asked=label.asked,
                cached=label.cached,
                same=label.same,
                created_at=to_iso(label.created_s),
            )
            for label in found[: query.limit]
        ]
        has_more = len(found) > query.limit
        return LabelledPairList(data=data, has_more=has_more, next=str(found[query.limit - 1].id) if has_more else None)

    async def reset_scopes(self, selection: ResetSemanticScopes) -> int:
        """Lets the selected scopes begin anew and returns their number."""

        async def reset(scope: str, encoder: str) -> bool:
            return await self._scopes.reset(scope, encoder, keep_labels=selection.keep_labels) is not None

        changed = await self._change(selection, reset)
        _log.info("An operator has let %d scopes of the semantic cache begin anew.", changed)
        return changed

    async def remove_scopes(self, selection: SelectSemanticScopes) -> int:
        """Deletes the selected scopes with all that they have learnt, and returns their number."""
        changed = await self._change(selection, self._scopes.remove)
        _log.info("An operator has removed %d scopes of the semantic cache.", changed)
        return changed

    async def _change(
        self,
        selection: SelectSemanticScopes | ResetSemanticScopes,
        change: Callable[[str, str], Awaitable[bool]],
    ) -> int:
        """Changes the scopes that have all of what is given, by name and encoder; returns how many have changed."""
        model, tenant, after, changed = selection.model or None, selection.tenant or None, ("", ""), 0
        while found := await self._scopes.scopes(model=model, tenant=tenant, after=after, limit=_CHUNK):
            for stored in found:
                after = stored.scope, stored.record.encoder
                if selection.scope not in (None, "", stored.scope):
                    continue
                if selection.encoder in (None, "", stored.record.encoder) and await change(*after):
                    changed += 1
                    if self._on_change is not None:
                        await self._on_change(stored.scope)
        return changed


def _place_of(cursor: str) -> tuple[str, str]:
    """Returns the name and the encoder of a scope from the cursor of a page, in which a space stands between them."""
    scope, _, encoder = cursor.rpartition(" ")
    return scope, encoder


def _scope_body(stored: StoredScope, settings: SemanticConfig) -> SemanticScopeBody:
    """Returns a scope as operators see it, by the settings of now."""
    _, shared_by, *owners = msgspec.json.decode(stored.scope, type=list[str])
    record, counts = stored.record, stored.record.counts
    scope = SemanticScope(record, settings)
    progress, needed = scope.progress
    return SemanticScopeBody(
        scope=stored.scope,
        model=stored.model,
        shared_by=cast(CacheScope, shared_by),
        key=owners[-1] if shared_by == "key" else None,
        tenant=stored.tenant if shared_by in ("key", "tenant") else None,
        organisation=stored.organisation or None,
        state=scope.state,
        phase=scope.phase,
        progress=progress,
        progress_needed=needed,
        threshold=scope.threshold,
        false_hit_bound=None if scope.record.certification is None else scope.bound,
        budget=settings.budget,
        labels=record.labels,
        same=counts.same,
        different=counts.different,
        lookups=counts.lookups,
        audits=counts.audits,
        served=counts.served,
        saved_tokens=counts.saved_tokens,
        false_hits=counts.false_hits,
        encoder=record.encoder,
        verifier=record.verifier,
        updated_at=to_iso(stored.updated_s),
    )
