"""Look-up of the inputs of an embeddings request in the cache of vectors: each input by itself.

A vector depends on nothing but the tokens of its input and the model, so every input can be looked up whose model is
known by its files. Inputs that are equal are computed once.
"""

from collections.abc import Callable, Iterable, Sequence

from maitred.app.request.answer_lookup import check_controls
from maitred.cache.answer_cache import scope_of
from maitred.cache.answer_key import AnswerKey, engine_producer
from maitred.cache.embedding_cache import EmbeddingCache, text_digests
from maitred.core.context import CacheResult, CacheStatus, RequestContext
from maitred.core.errors import ReplicaUnavailable
from maitred.core.inference import DEFAULT_CACHE_CONTROL, CacheControl, InferenceRequest
from maitred.core.replica import ModelCard
from maitred.core.service import Vector
from maitred.core.tenancy import Principal
from maitred.routing.catalog import ServedModel


class EmbeddingLookup:
    """Look-up of the inputs of one request.

    Args:
        cache: The cache.
        keys: Key of each input.
        control: What the caller says about answers from a cache.
        ttl_s: Longest time in seconds for which vectors are kept.
        is_current: Returns whether the model is still what the keys were made for.
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        keys: Sequence[AnswerKey],
        control: CacheControl,
        ttl_s: float,
        is_current: Callable[[], bool],
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._control = control
        self._ttl_s = ttl_s if control.ttl_s is None else min(ttl_s, control.ttl_s)
        self._is_current = is_current
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
        age_s = None
        if not self._control.no_cache:
            found = await self._cache.find([self._keys[index] for index in distinct], self._control.max_age_s)
            for index, entry in zip(distinct, found, strict=True):
                if entry is not None:
                    vectors[index] = entry[0]
                    age_s = entry[1] if age_s is None else max(age_s, entry[1])
        missing = [index for index in distinct if not vectors[index]]
        name = self._keys[0].name if len(self._keys) == 1 else ""
        if not missing:
            context.cache = CacheResult(CacheStatus.HIT, name, age_s)
        elif len(missing) == len(self._keys):
            context.cache = CacheResult(CacheStatus.MISS, name)
        else:
            context.saved_prompt_tokens = sum(lengths) - sum(lengths[index] for index in missing)
            context.cache = CacheResult(CacheStatus.PARTIAL)
        return missing

    def store(self, vectors: Iterable[tuple[int, Vector]]) -> None:
        """Keeps vectors that were computed, by input."""
        if not self._control.no_store and self._is_current():
            self._cache.store([(self._keys[index], vector) for index, vector in vectors], self._ttl_s)

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

    return EmbeddingLookup(cache, keys, control, ttl_s=policy.ttl_s, is_current=is_current)
