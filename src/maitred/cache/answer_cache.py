"""Cache of answers: which requests may use it, what it finds, and what it keeps."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from maitred.cache.answer import CachedAnswer, decode_answer, encode_answer
from maitred.cache.answer_key import AnswerKey
from maitred.cache.backend import AnswerBackend, MemoryBackend
from maitred.cache.config import CacheConfig, CacheScope, CoalesceMode
from maitred.core.clock import Clock
from maitred.core.tenancy import Principal

if TYPE_CHECKING:
    from maitred.cache.redis_backend import RedisBackend


class CachePolicy(NamedTuple):
    """Settings of the cache for the requests of one tenant to one model by one route."""

    is_on: bool
    is_semantic: bool
    """Whether questions may be answered that only ask the same in other words."""
    sampled: bool
    coalesce: CoalesceMode
    scope: CacheScope
    ttl_s: float


class AnswerCache:
    """Cache of complete answers.

    Args:
        config: Which answers are kept, and for whom.
        backend: Where they are kept.
        clock: Clock for their age, which is told in wall time, because gateways share them.
    """

    def __init__(self, config: CacheConfig, backend: AnswerBackend, clock: Clock) -> None:
        self._clock = clock
        self._backend = backend
        self.reconfigure(config)

    def reconfigure(self, config: CacheConfig) -> None:
        """Applies new settings to later requests."""
        self.config = config
        self._policy_for = lru_cache(maxsize=4096)(self._resolve_policy)

    def policy_for(self, model: str, tenants: tuple[str, ...], route: str) -> CachePolicy:
        """Returns the settings for a model, a caller's tenants (its own first) and the path of an API."""
        return self._policy_for(model, tenants, route)

    async def find(self, key: AnswerKey, max_age_s: float | None = None) -> tuple[CachedAnswer, float] | None:
        """Returns an answer and its age in seconds; None: it is not kept, or older than `max_age_s`.

        An answer of a server that has since said that it runs something else is not found.
        """
        stored = await self._backend.get(key)
        if stored is None or (answer := decode_answer(stored.data, key.seal)) is None:
            return None
        if answer.fingerprint != stored.fingerprint:
            return None
        age_s = max(0.0, self._clock.wall_s() - answer.stored_s)
        if max_age_s is not None and age_s > max_age_s:
            return None
        return answer, age_s

    def wall_s(self) -> float:
        """Returns the wall time, which stands in answers."""
        return self._clock.wall_s()

    def monotonic_s(self) -> float:
        """Returns the monotonic time, by which the cache knows what was computed before a removal."""
        return self._clock.monotonic_s()

    def store(
        self, key: AnswerKey, answer: CachedAnswer, ttl_s: float, since_s: float = math.inf
    ) -> asyncio.Task[None] | None:
        """Keeps an answer, without letting its client wait.

        Args:
            key: Its key.
            answer: The answer.
            ttl_s: Longest time in seconds for which it is kept.
            since_s: Monotonic time since when it was computed.

        Returns:
            The task at whose end the answer can be found; None: it can be found now, is too large, or such answers were
            removed while it was computed.
        """
        data = encode_answer(answer, key.seal)
        if len(data) > self.config.max_answer_bytes:
            return None
        return self._backend.put(key, data, ttl_s, answer.fingerprint, since_s)

    def _resolve_policy(self, model: str, tenants: tuple[str, ...], route: str) -> CachePolicy:
        config = self.config
        mode, sampled, coalesce = config.mode, config.sampled, config.coalesce
        scope, ttl_s = config.scope, config.ttl_s
        for rule in config.rules:
            if rule.models and model not in rule.models:
                continue
            if rule.tenants and not set(rule.tenants).intersection(tenants):
                continue
            if rule.routes and route not in rule.routes:
                continue
            mode = mode if rule.mode is None else rule.mode
            sampled = sampled if rule.sampled is None else rule.sampled
            coalesce = coalesce if rule.coalesce is None else rule.coalesce
            scope = scope if rule.scope is None else rule.scope
            ttl_s = ttl_s if rule.ttl_s is None else rule.ttl_s
        return CachePolicy(
            mode != "off", mode == "semantic", sampled=sampled, coalesce=coalesce, scope=scope, ttl_s=ttl_s
        )


def scope_of(scope: CacheScope, principal: Principal) -> Sequence[str]:
    """Returns the name of who shares the answers to a caller's requests."""
    match scope:
        case "key":
            return "key", *principal.tenants, principal.key
        case "tenant":
            return "tenant", *principal.tenants
        case "organisation":
            return "organisation", principal.tenants[-1]
        case "public":
            return ("public",)


@asynccontextmanager
async def open_backend(config: CacheConfig, clock: Clock) -> "AsyncIterator[MemoryBackend | RedisBackend]":
    """Opens the store of answers that the settings name.

    Raises:
        ConfigInvalid: `cache.url` is not the URL of a Redis, or its client is not installed.
    """
    if config.url is None:
        yield MemoryBackend(config.max_bytes, clock)
        return
    from maitred.cache.redis_backend import RedisBackend

    async with RedisBackend(config, clock) as backend:
        yield backend
