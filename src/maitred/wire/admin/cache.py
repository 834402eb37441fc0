"""Query and responses of the admin API for the cache of answers."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.core.context import CacheStatus


class SelectAnswers(Struct, frozen=True, kw_only=True):
    """Query that selects answers in the cache, by all that is given."""

    tenant: Annotated[str | None, Meta(description="Those that requests of this tenant have stored.")] = None
    model: Annotated[str | None, Meta(description="Those of this model, by the name that requests resolve to.")] = None
    key: Annotated[
        str | None, Meta(description="The one of this key, as `x-maitred-cache-key` names it in a response.")
    ] = None
    epoch: Annotated[
        str | None, Meta(description="Those of this `cache.epoch`; empty: of the time before one was set.")
    ] = None
    all: Annotated[bool, Meta(description="All answers; needed where nothing else is given.")] = False


class CacheStoreBody(Struct, frozen=True, kw_only=True):
    """State of the store of cached answers."""

    backend: Annotated[Literal["memory", "redis"], Meta(description="`redis`: gateways share it.")]
    answers: Annotated[int | None, Meta(description="That are kept; null: only a listing would tell.")]
    bytes: Annotated[int | None, Meta(description="That they take; null: only a listing would tell.")]
    max_bytes: Annotated[int | None, Meta(description="That they may take; null: Redis has a bound of its own.")]
    stores: Annotated[int, Meta(description="Answers that this gateway has stored since it started.")]
    evictions: Annotated[int, Meta(description="Of these, answers that made room for others.")]


class CacheUseBody(Struct, frozen=True, kw_only=True):
    """Look-ups of requests in the cache of answers since the gateway started."""

    lookups: Annotated[dict[CacheStatus, int], Meta(description="Requests, by what the cache did for them.")]
    saved_tokens: Annotated[int, Meta(description="Of answers that were not computed for their requests.")]


class CachedAnswersBody(Struct, frozen=True, kw_only=True):
    """Kept answers of one tenant to requests for one model, in one epoch."""

    tenant: str
    model: str
    epoch: str
    answers: int
    bytes: int


class CacheBody(Struct, frozen=True, kw_only=True):
    """State of the cache of answers, and what it keeps."""

    object: Literal["cache"] = "cache"
    store: CacheStoreBody
    use: CacheUseBody
    data: Annotated[list[CachedAnswersBody], Meta(description="By tenant, model and epoch, in their order.")]


class RemovedAnswers(Struct, frozen=True, kw_only=True):
    """Confirmation that answers were removed from the cache."""

    object: Literal["removed_answers"] = "removed_answers"
    removed: Annotated[int, Meta(description="How many.")]
