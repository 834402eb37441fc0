"""Look-up of the inputs of an embeddings request in the cache of vectors: each input by itself.

A vector depends on nothing but the tokens of its input and the model, so every input can be looked up whose model is
known by its files. Inputs that are equal are computed once: those of one request, and those that are being computed for
another one, for which a request waits. While it waits it computes nothing itself, so no two requests wait for each
other.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from maitred.app.request.answer_lookup import check_controls
from maitred.app.request.planner import flow_of
from maitred.cache.answer_cache import scope_of
from maitred.cache.answer_key import AnswerKey, engine_producer
from maitred.cache.embedding_cache import EmbeddingCache, PendingEmbedding, text_digests
from maitred.core.context import CacheResult, CacheStatus, RequestContext
from maitred.core.errors import ReplicaUnavailable
from maitred.core.inference import DEFAULT_CACHE_CONTROL, CacheControl, InferenceRequest
from maitred.core.replica import ModelCard
from maitred.core.service import Vector
from maitred.core.tenancy import Principal
from maitred.routing.catalog import ServedModel

_MOST_WAITS = 8
"""How often a request waits for others before it computes what it still lacks."""


class EmbeddingLookup:
    """Look-up of the inputs of one request.

    Args:
        cache: The cache.
        keys: Key of each input.
        control: What the caller says about answers from a cache.
        ttl_s: Longest time in seconds for which vectors are kept.
        is_current: Returns whether the model is still what the keys were made for.
        rank: Rank of the priority class of the request.
        waits: Whether it waits for vectors that are being computed for others.
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        keys: Sequence[AnswerKey],
        control: CacheControl,
        ttl_s: float,
        is_current: Callable[[], bool],
        *,
        rank: int = 0,
        waits: bool = True,
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._since_s = cache.answers.monotonic_s()
        self._control = control
        self._ttl_s = ttl_s if control.ttl_s is None else min(ttl_s, control.ttl_s)
        self._is_current = is_current
        self._rank = rank
        self._waits = waits and not control.no_cache
        self._computations: dict[int, PendingEmbedding] = {}
        """Computations of this request, by input."""
        places: dict[bytes, int] = {}
        self._firsts = [places.setdefault(key.digest, index) for index, key in enumerate(keys)]
        """For each input, the first one that is equal."""

    async def find(self, vectors: list[Vector], lengths: Sequence[int], context: RequestContext) -> Sequence[int]:
        """Looks the inputs up, and notes in the context how many were found.

        Args:
            vectors: Gets the vectors that are found, by input.
            lengths: Number of tokens of each input.
            context: Record of the request.

        Returns:
            The inputs that must be computed, by index: the first of those that are equal.
        """
        distinct = [index for index, first in enumerate(self._firsts) if index == first]
        age_s, missing = None, distinct
        for waits in range(_MOST_WAITS + 1):
            if not self._control.no_cache:
                found = await self._cache.find([self._keys[index] for index in missing], self._control.max_age_s)
                for index, entry in zip(missing, found, strict=True):
                    if entry is not None:
                        vectors[index] = entry[0]
                        age_s = entry[1] if age_s is None else max(age_s, entry[1])
                missing = [index for index in missing if not vectors[index]]
            if waits == _MOST_WAITS or not (others := self._computed_for_others(missing)):
                break
            await asyncio.wait(others)
        name = self._keys[0].name if len(self._keys) == 1 else ""
        if not missing:
            context.cache = CacheResult(CacheStatus.HIT, name, age_s)
        elif len(missing) == len(self._keys):
            context.cache = CacheResult(CacheStatus.MISS, name)
        else:
            context.saved_prompt_tokens = sum(lengths) - sum(lengths[index] for index in missing)
            context.cache = CacheResult(CacheStatus.PARTIAL)
        return missing

    def _computed_for_others(self, inputs: Sequence[int]) -> list[asyncio.Future[None]]:
        """Returns the ends of computations for requests that this one does not stand before."""
        if not self._waits:
            return []
        found = [self._cache.computing.get(self._keys[index].digest) for index in inputs]
        return [one.is_over for one in found if one is not None and one.rank <= self._rank]

    def begin(self, inputs: Sequence[int]) -> None:
        """Notes that this request computes the vectors of inputs, for which others may wait until `close`."""
        if self._control.no_store:
            return
        for index in inputs:
            computation = PendingEmbedding(self._rank, asyncio.get_running_loop().create_future())
            if self._cache.computing.setdefault(self._keys[index].digest, computation) is computation:
                self._computations[index] = computation

    def close(self) -> None:
        """Ends what was begun and has no vector that is kept."""
        for index in [*self._computations]:
            self._end(self._keys[index].digest, self._computations.pop(index))

    def _end(self, digest: bytes, computation: PendingEmbedding, stored: object = None) -> None:
        del self._cache.computing[digest]
        computation.is_over.set_result(None)

    def store(self, vectors: Sequence[tuple[int, Vector]]) -> None:
        """Keeps vectors that were computed, by input; who waits for them finds them then."""
        if self._control.no_store or not self._is_current():
            return
        stored = self._cache.store(
            [(self._keys[index], vector) for index, vector in vectors], self._ttl_s, self._since_s
        )
        for index, _ in vectors:
            if (computation := self._computations.pop(index, None)) is None:
                continue
            digest = self._keys[index].digest
            if stored is None:
                self._end(digest, computation)
            else:
                stored.add_done_callback(partial(self._end, digest, computation))

    def repeat(self, vectors: list[Vector]) -> None:
        """Gives inputs the vectors of the first ones that are equal."""
        for index, first in enumerate(self._firsts):
            vectors[index] = vectors[first]


def make_embedding_lookup(
    cache: EmbeddingCache,
    model: ServedModel,
    card: ModelCard,
    texts: Sequence[Sequence[int]],
    request: InferenceRequest,
    principal: Principal,
    context: RequestContext,
) -> EmbeddingLookup | None:
    """Returns the look-up of the inputs of a request; None: the request does not use the cache.

    Args:
        cache: The cache.
        model: The model.
        card: Its card.
        texts: Token ids of each input.
        request: The request.
        principal: The caller.
        context: Record of the request.

    Raises:
        Forbidden: The caller may not use a cache control of the request.
    """
    control, answers = request.cache, cache.answers
    if control != DEFAULT_CACHE_CONTROL:
        check_controls(control, answers, principal)
    policy = answers.policy_for(model.name, principal.tenants, context.route)
    if not policy.is_on or not card.digest.content:
        if control != DEFAULT_CACHE_CONTROL:
            context.cache = CacheResult(CacheStatus.BYPASS)
        return None
    producer = engine_producer(card, "")
    scope = scope_of(policy.scope, principal)
    epoch = answers.config.epoch
    digests = text_digests(texts, [model.name, producer, epoch, control.namespace, *scope])
    tenant, organisation = principal.tenants[0], principal.tenants[-1]
    keys = [AnswerKey(digest, tenant, organisation, model.name, epoch=epoch) for digest in digests]

    def is_current() -> bool:
        try:
            return engine_producer(model.card(), "") == producer
        except ReplicaUnavailable:
            return False

    return EmbeddingLookup(
        cache,
        keys,
        control,
        ttl_s=policy.ttl_s,
        is_current=is_current,
        rank=flow_of(principal, request).priority.rank,
        waits=policy.coalesce != "off" and request.deadline_in_s is None,
    )
