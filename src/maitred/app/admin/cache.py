"""The cache of answers for operators: its state, what it keeps, and removals."""

import logging
from typing import TYPE_CHECKING

from maitred.cache.backend import AnswerSelection, MemoryBackend
from maitred.observe.recent import RecentTraffic
from maitred.wire.admin.cache import CacheBody, CachedAnswersBody, SelectAnswers

if TYPE_CHECKING:
    from maitred.cache.redis_backend import RedisBackend

_log = logging.getLogger(__name__)


class CacheAdmin:
    """Shows and clears the cache of answers. Implements `maitred.api.admin.service.CacheService`.

    Args:
        backend: Where the answers are kept.
        recent: Counts the look-ups.
    """

    def __init__(self, backend: "MemoryBackend | RedisBackend", recent: RecentTraffic) -> None:
        self._backend = backend
        self._recent = recent

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
