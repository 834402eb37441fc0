"""Where answers are kept: in the memory of this process, or in a Redis that gateways share."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from maitred.cache.adaptive import AdaptiveCache
from maitred.cache.answer_key import AnswerKey
from maitred.core.clock import Clock
from maitred.core.shared_cache import SharedCache
from maitred.wire.admin.cache import CacheStoreBody


class AnswerSelection(msgspec.Struct, frozen=True, kw_only=True):
    """Selection of answers in a cache, by all of what is given; nothing selects all answers."""

    tenant: str | None = None
    model: str | None = None
    name: str | None = None
    """Public name of an answer; see `AnswerKey.name`."""
    epoch: str | None = None


class CachedAnswers(msgspec.Struct, frozen=True):
    """Answers of one tenant to requests for one model, in one epoch."""

    tenant: str
    model: str
    epoch: str
    answers: int
    size: int
    """Bytes of all of them."""


class StoredAnswer(msgspec.Struct, frozen=True):
    """Encoded answer from a store."""

    data: bytes
    fingerprint: str
    """What the server of its key has said last that it runs; empty: nothing."""


class AnswerBackend(Protocol):
    """Store of encoded answers with a bound on its size. Whatever fails in it is a miss, and never an error."""

    async def get(self, key: AnswerKey) -> "StoredAnswer | None":
        """Returns an encoded answer; None: there is none, or the store is away."""
        ...

    def put(
        self, key: AnswerKey, answer: bytes, ttl_s: float, fingerprint: str, since_s: float = math.inf
    ) -> asyncio.Task[None] | None:
        """Keeps an encoded answer, in place of one with the same key.

        Args:
            key: Its key.
            answer: The answer.
            ttl_s: Longest time in seconds for which it is kept.
            fingerprint: What the server of the key has said that it runs; empty: nothing.
            since_s: Monotonic time since when it was computed: it is not kept if such answers were removed since then.

        Returns:
            The task at whose end the answer can be found; None: it can be found now, or is not kept.
        """
        ...


class RemovedAnswersLog:
    """Removals of answers, so that answers which were being computed meanwhile are not kept behind them."""

    def __init__(self) -> None:
        self._removals: deque[tuple[float, AnswerSelection]] = deque()
        self._forgotten_s = -math.inf
        """Time of the last removal that is not known any more."""

    def add(self, selection: AnswerSelection, now_s: float) -> None:
        """Adds the removal of all answers that a selection has."""
        self._removals.append((now_s, selection))
        if len(self._removals) > _MOST_REMOVALS:
            self._forgotten_s, _ = self._removals.popleft()

    def has_removed(self, key: AnswerKey, since_s: float) -> bool:
        """Returns whether answers like that of a key were removed at a time or later; if in doubt, they were."""
        if since_s <= self._forgotten_s:
            return True
        return any(at_s >= since_s and _is_chosen(key, selection) for at_s, selection in self._removals)


class MemoryBackend:
    """Answers in the memory of this process. Implements `AnswerBackend` and `EmbeddingBackend`.

    Args:
        max_bytes: Bound on the bytes of all answers.
        clock: Clock that measures their age.
    """

    def __init__(self, max_bytes: int, clock: Clock) -> None:
        self._clock = clock
        self._answers: AdaptiveCache[bytes, tuple[AnswerKey, bytes]] = AdaptiveCache(max_bytes)
        self._fingerprints: SharedCache[str, str] = SharedCache(_MOST_SERVERS)
        self._removals = RemovedAnswersLog()
        self._stores = self._evictions = 0

    def reconfigure(self, max_bytes: int) -> None:
        """Sets another bound, which holds from the next answer on."""
        self._answers.most = max_bytes

    def state(self) -> CacheStoreBody:
        """Returns the state of this store for metrics and operators."""
        return CacheStoreBody(
            backend="memory",
            answers=len(self._answers),
            bytes=self._answers.size,
            max_bytes=self._answers.most,
            stores=self._stores,
            evictions=self._evictions,
        )

    async def get(self, key: AnswerKey) -> StoredAnswer | None:
        """Returns an encoded answer; implements `AnswerBackend.get`."""
        entry = self._answers.get(key.digest, self._clock.monotonic_s())
        return None if entry is None else StoredAnswer(entry[1], self._fingerprints.get(key.server) or "")

    def put(self, key: AnswerKey, answer: bytes, ttl_s: float, fingerprint: str, since_s: float = math.inf) -> None:
        """Keeps an encoded answer; implements `AnswerBackend.put`."""
        if fingerprint:
            self._fingerprints.pop(key.server)
            self._fingerprints.put(key.server, fingerprint, key.organisation)
        if self._removals.has_removed(key, since_s):
            return
        now_s = self._clock.monotonic_s()
        size = len(answer) + ENTRY_BYTES
        dropped = self._answers.put(
            key.digest, (key, answer), key.organisation, size, expires_s=now_s + ttl_s, now_s=now_s
        )
        self._stores += 1
        self._evictions += len(dropped)

    async def get_many(self, keys: Sequence[AnswerKey]) -> list[bytes | None]:
        """Returns what is kept under each key; implements `EmbeddingBackend.get_many`."""
        found = [await self.get(key) for key in keys]
        return [None if stored is None else stored.data for stored in found]

    def put_many(self, entries: Sequence[tuple[AnswerKey, bytes]], ttl_s: float, since_s: float = math.inf) -> None:
        """Keeps all entries; implements `EmbeddingBackend.put_many`."""
        for key, data in entries:
            self.put(key, data, ttl_s, "", since_s)

    async def remove(self, selection: AnswerSelection) -> int:
        """Removes answers and returns their number."""
        self._removals.add(selection, self._clock.monotonic_s())
        removed = 0
        async for kept in self._batches():
            for key, _ in kept:
                if _is_chosen(key, selection) and self._answers.pop(key.digest) is not None:
                    removed += 1
        return removed

    async def describe(self) -> list[CachedAnswers]:
        """Returns what is kept, by tenant, model and epoch."""
        groups: dict[tuple[str, str, str], list[int]] = {}
        async for kept in self._batches():
            for key, answer in kept:
                groups.setdefault((key.tenant, key.model, key.epoch), []).append(len(answer))
        return [CachedAnswers(*names, len(sizes), sum(sizes)) for names, sizes in sorted(groups.items())]

    async def _batches(self) -> AsyncIterator[list[tuple[AnswerKey, bytes]]]:
        """Yields what is kept now, in parts between which other tasks run: all of it would delay tokens."""
        kept = list(self._answers.values())
        for start in range(0, len(kept), _PER_TURN):
            yield kept[start : start + _PER_TURN]
            await asyncio.sleep(0)


_PER_TURN = 1000
"""Answers that a listing or a removal looks at before other tasks run."""
_MOST_REMOVALS = 256
_MOST_SERVERS = 4096
"""Most servers whose fingerprints are known; clients can choose names behind a name with a ``*``."""
ENTRY_BYTES = 512
"""What an answer takes beside its own bytes: its key and the places that it has in tables."""


def _is_chosen(key: AnswerKey, selection: AnswerSelection) -> bool:
    return (
        selection.tenant in (None, key.tenant)
        and selection.model in (None, key.model)
        and selection.epoch in (None, key.epoch)
        and selection.name in (None, key.name)
    )
