"""Look-up of a request in the cache of answers: whether it may use the cache, under which key, and what it keeps.

A request uses the cache if its answer depends on nothing but the request and what computes it: the answer is not drawn
at random, the weights are known, and no server looks anything up for it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maitred.app.request.planner import flow_of
from maitred.app.request.shadow_traffic import ComputeCopy
from maitred.app.request.tokenized import TokenizedRequest
from maitred.app.request.upstream_request import PreparedRequest, UpstreamRequest
from maitred.app.semantic.question import UserQuestion, make_question
from maitred.cache.answer import AnswerRecorder, CachedAnswer, fingerprint_in
from maitred.cache.answer_cache import AnswerCache, CachePolicy, scope_of
from maitred.cache.answer_key import AnswerKey, answer_digest, engine_producer, engine_request, upstream_request
from maitred.core.context import CacheResult, CacheStatus, RequestContext
from maitred.core.errors import Forbidden, ReplicaUnavailable
from maitred.core.flow import PriorityClass
from maitred.core.inference import DEFAULT_CACHE_CONTROL, CacheControl, TextDelta
from maitred.core.tenancy import Principal
from maitred.routing.pools.route_table import RouteTarget
from maitred.wire.openai.fields import MEDIA_PARTS

_LOOKED_UP = frozenset(
    {
        *("web_search_options", "web_search", "search_parameters", "search_settings", "search_options"),
        *("enable_search", "plugins", "compound_custom", "mcp_servers", "container", "previous_response_id"),
    }
)
"""Fields by which a server looks something up for an answer, which can be another one tomorrow."""
_CALLER_TOOLS = frozenset({None, "function", "custom"})
"""Types of tools that the caller runs; those of other types are run by the server."""


class AnswerLookup:
    """Look-up of one request at one model in the cache of answers.

    Args:
        cache: The cache.
        key: Key of the answer.
        target: The model.
        prepared: The request for it.
        principal: The caller.
        ttl_s: Longest time in seconds for which the answer is kept.
        is_kept: Whether the cache keeps answers to such requests.
        is_shared: Whether callers who ask at the same time share an answer.
        most_tokens: Most output tokens of a choice.
        question: Its question, whose answer may be that of a similar one; None: its answer can only be its own.

    Attributes:
        is_shared: Whether callers who ask at the same time share the answer to this request.
        is_whole: Whether the caller gets the answer when it is complete.
        in_one_piece: Whether the answer may come in one piece, at its end.
        key: See above.
        principal: See above.
        choices: Number of choices of the answer.
        most_tokens: See above.
        digest: Digest of the request and of who shares its answer while it is made. Who may get the answer of a similar
            question shares with nobody who may not, or who wants no answer of that age.
        question: See above.
        on_stored: Called with the deltas of the answer, when it has been computed and is kept; None: nobody listens.
        compute_copy: Computes the answer beside the requests of clients; None: nobody will.
    """

    def __init__(
        self,
        cache: AnswerCache,
        key: AnswerKey,
        target: RouteTarget,
        prepared: PreparedRequest,
        *,
        principal: Principal,
        ttl_s: float,
        is_kept: bool,
        is_shared: bool,
        most_tokens: int,
        question: UserQuestion | None = None,
    ) -> None:
        request = prepared.request
        control = request.cache
        self._cache = cache
        self.key = key
        self.principal = principal
        self._target = target
        self._prepared = prepared
        self._control = control
        self._since_s = cache.monotonic_s()
        self._ttl_s = ttl_s if control.ttl_s is None else min(ttl_s, control.ttl_s)
        self._is_kept = is_kept
        self.is_shared = is_shared and not control.no_cache
        self.is_whole = request.whole
        self.in_one_piece = request.whole and isinstance(prepared, UpstreamRequest)
        self.choices = prepared.choice_count
        self.most_tokens = most_tokens
        self.question = question
        self.digest = key.digest
        if question is not None:
            self.digest = answer_digest([key.digest, "similar", repr(control.max_age_s)])
        self.on_stored: Callable[[Sequence[TextDelta]], None] | None = None
        self.compute_copy: ComputeCopy | None = None

    async def find(self, context: RequestContext) -> CachedAnswer | None:
        """Returns the answer from the cache, and notes in the context that it has come from there; None: none has."""
        if not self._is_kept or self._control.no_cache:
            return None
        found = await self._cache.find(self.key, self._control.max_age_s)
        if found is None:
            return None
        answer, age_s = found
        if not self.is_of_server(answer):
            return None
        context.cache = CacheResult(CacheStatus.HIT, self.key.name, age_s)
        return answer

    def is_of_server(self, answer: CachedAnswer) -> bool:
        """Returns whether an answer is of what its server runs now, as far as it has said.

        Another answer, which was not kept, may have said that it runs something else.
        """
        return not answer.fingerprint or self._server_fingerprint() in ("", answer.fingerprint)

    def _server_fingerprint(self) -> str:
        """Returns what the server has said last that it runs; empty: nothing."""
        prepared = self._prepared
        return prepared.model.fingerprint(self._target.model) if isinstance(prepared, UpstreamRequest) else ""

    def _is_current(self) -> bool:
        """Returns whether what computes answers is still what the key was made for."""
        prepared = self._prepared
        try:
            return isinstance(prepared, UpstreamRequest) or prepared.model.card().digest == prepared.card.digest
        except ReplicaUnavailable:
            return False

    @property
    def priority(self) -> PriorityClass:
        """Priority class of the request."""
        return flow_of(self.principal, self._prepared.request).priority

    @property
    def bill(self) -> bytes:
        """Digest by which all callers of the answer share its bill; empty: each pays by itself."""
        return self.digest if self.is_shared and self._cache.config.coalesced_bill == "split" else b""

    def note(self, status: CacheStatus, context: RequestContext) -> None:
        """Notes in the context of a request where its answer comes from."""
        context.cache = CacheResult(status, self.key.name)

    def restore(self, source: CachedAnswer | RequestContext, context: RequestContext) -> None:
        """Writes into the context of a request what the answer is in tokens, and what its server was not given.

        Args:
            source: The answer from the cache, or the context of the equal request that computes it.
            context: Context of this request.
        """
        context.set_usage(source.usage)
        context.finish_reasons = source.finish_reasons
        if self.key.server:
            context.ignored_fields, context.is_passthrough = source.ignored_fields, source.is_passthrough

    def record(self) -> "AnswerRecording":
        """Returns a new recording of the answer that is computed now."""
        is_kept = self._is_kept and not self._control.no_store
        return AnswerRecording(self._cache.config.max_answer_bytes, self._store if is_kept else None)

    def _store(self, deltas: list[TextDelta], context: RequestContext) -> asyncio.Task[None] | None:
        if not self._is_current():
            return None
        answer = CachedAnswer(
            deltas,
            context.usage,
            context.finish_reasons,
            stored_s=self._cache.wall_s(),
            ignored_fields=[*context.ignored_fields],
            is_passthrough=context.is_passthrough,
            fingerprint=fingerprint_in(deltas) if self.key.server else "",
        )
        stored = self._cache.store(self.key, answer, self._ttl_s, self._since_s)
        if self.on_stored is not None:
            self.on_stored(deltas)
        return stored


class AnswerRecording(AnswerRecorder):
    """Recording of an answer, which goes into the cache when it is complete.

    Args:
        most_bytes: Length of text at which the recording is given up.
        store: Keeps the deltas, with what is known of the request; None: they are not kept.
    """

    def __init__(
        self,
        most_bytes: int,
        store: Callable[[list[TextDelta], RequestContext], asyncio.Task[None] | None] | None,
    ) -> None:
        super().__init__(most_bytes)
        self._store = store

    def finish(self, context: RequestContext) -> asyncio.Task[None] | None:
        """Keeps the answer, unless it is another one than a new request would get.

        An answer is not kept if the load has made it shorter or has moved it to another model, if limits have made it
        shorter, if a second server has written its end, or if it is that of a similar question.

        Returns:
            The task at whose end the answer can be found; None: it is not kept.
        """
        is_changed = context.recoveries or context.degraded or context.clamped_max_tokens is not None
        is_changed = is_changed or (context.cache is not None and context.cache.status is CacheStatus.SEMANTIC)
        if self._store is None or is_changed:
            return None
        deltas = self.deltas()
        return None if self.given_up else self._store(deltas, context)


def make_lookup(
    cache: AnswerCache,
    target: RouteTarget,
    prepared: PreparedRequest,
    principal: Principal,
    context: RequestContext,
    most_tokens: int,
) -> AnswerLookup | None:
    """Returns the look-up of a request in the cache; None: the request does not use the cache.

    Args:
        cache: The cache.
        target: The model.
        prepared: The request for it.
        principal: The caller.
        context: Record of the request.
        most_tokens: Most output tokens of a choice, before limits clamp it.

    Raises:
        Forbidden: The caller may not use a cache control of the request.
    """
    request = prepared.request
    control = request.cache
    if control != DEFAULT_CACHE_CONTROL:
        check_controls(control, cache, principal)
    policy = cache.policy_for(target.name, principal.tenants, context.route)
    lookup = None
    if policy.is_on and request.prefix is None:
        lookup = _make_lookup(cache, policy, target, prepared, principal, most_tokens)
    if lookup is None and control != DEFAULT_CACHE_CONTROL:
        context.cache = CacheResult(CacheStatus.BYPASS)
    return lookup


def _make_lookup(
    cache: AnswerCache,
    policy: CachePolicy,
    target: RouteTarget,
    prepared: PreparedRequest,
    principal: Principal,
    most_tokens: int,
) -> AnswerLookup | None:
    request, server, native = prepared.request, b"", None
    is_drawn = _is_drawn(prepared)
    is_kept, is_shared = policy.sampled or not is_drawn, _is_shared(prepared, policy, is_drawn=is_drawn)
    if not (is_kept or is_shared):
        return None
    try:
        if isinstance(prepared, TokenizedRequest):
            digest = prepared.card.digest
            if not (digest.content and digest.tokenizer):
                return None  # nobody knows what weights run
            producer = engine_producer(prepared.card, prepared.model.answer_identity)
            lengths = [min(available, most_tokens) for available in prepared.available_tokens]
            asked = engine_request(request, prepared.prompts, lengths, prepared.rules)
        else:
            fields = prepared.fields
            replicas, native = prepared.model.replicas, request.native
            if native is not None and native.api not in {replica.native_api for replica in replicas}:
                native = None
            if _is_looked_up(fields) or (
                native is not None and (native.api == "responses" or _is_looked_up(native.fields))
            ):
                return None
            producer = server = answer_digest(
                [target.model or "", *sorted(replica.answer_identity for replica in replicas)]
            )
            asked = upstream_request(request, fields, native)
    except (ValueError, OverflowError, TypeError):
        return None  # a number or a character that has no place in the digest
    scope = scope_of(policy.scope, principal)
    shared: list[bytes | str] = [target.pool, producer, cache.config.epoch, request.cache.namespace, *scope]
    regions = principal.regions_for(request.regions)
    if regions is not None:
        shared += ["regions", *sorted(regions)]  # no answer that was computed where this request may not be
    digest_bytes = answer_digest([*shared, asked])
    question = None
    if policy.is_semantic and is_kept and native is None and not (request.cache.no_cache or request.cache.no_store):
        question = make_question(prepared, [*shared, *_times(prepared)], [target.name, *scope])
    key = AnswerKey(
        digest_bytes,
        tenant=principal.tenants[0],
        organisation=principal.tenants[-1],
        model=target.name,
        server=server.hex(),
        epoch=cache.config.epoch,
    )
    return AnswerLookup(
        *(cache, key, target, prepared),
        principal=principal,
        ttl_s=policy.ttl_s,
        is_kept=is_kept,
        is_shared=is_shared,
        most_tokens=most_tokens,
        question=question,
    )


def _times(prepared: PreparedRequest) -> list[str]:
    """Returns what the prompt says of the time, which stands in no message."""
    template = prepared.model.tokenizer.chat_template if isinstance(prepared, TokenizedRequest) else None
    return [] if template is None else template.times()


def _is_drawn(prepared: PreparedRequest) -> bool:
    """Returns whether the answer is drawn at random, so that the next one to the same request is another one."""
    if isinstance(prepared, TokenizedRequest):
        return prepared.request.sampling.temperature != 0 and prepared.request.seed is None
    return prepared.fields.get("temperature") != 0 and prepared.fields.get("seed") is None


def _is_shared(prepared: PreparedRequest, policy: CachePolicy, *, is_drawn: bool) -> bool:
    """Returns whether callers who ask at the same time share an answer.

    A deadline belongs to its caller alone, and so does what another model continues after a failure.
    """
    if policy.coalesce == "off" or (policy.coalesce != "sampled" and (is_drawn or prepared.choice_count > 1)):
        return False
    if isinstance(prepared, UpstreamRequest) and prepared.model.continues_at_fallback:
        return False
    return prepared.request.deadline_in_s is None


def _is_looked_up(fields: Mapping[str, Any]) -> bool:
    """Returns whether the answer depends on what a server finds elsewhere: by search, by its tools, at a URL."""
    if not _LOOKED_UP.isdisjoint(fields):
        return True
    tools = fields.get("tools")
    if isinstance(tools, list) and any(
        not isinstance(tool, dict) or tool.get("type") not in _CALLER_TOOLS for tool in tools
    ):
        return True
    messages = fields.get("messages")
    return isinstance(messages, list) and any(map(_has_remote_part, messages))


def _has_remote_part(message: object) -> bool:
    """Returns whether a message has a picture or a file that is at a URL, or only named by an id."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return False
    return any(_is_remote(part) for part in content)


def _is_remote(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    if kind in MEDIA_PARTS:
        held = part.get(kind)
        values = held.values() if isinstance(held, dict) else [held]
        return any(isinstance(value, str) and "://" in value[:16] for value in values) or (
            isinstance(held, dict) and "file_id" in held
        )
    source = part.get("source")  # in Anthropic's API
    return isinstance(source, dict) and source.get("type") in ("url", "file")


def check_controls(control: CacheControl, cache: AnswerCache, principal: Principal) -> None:
    """Raises Forbidden if the caller may not use a control of its request."""
    asked = {
        "no-cache": control.no_cache,
        "no-store": control.no_store,
        "only-if-cached": control.only_if_cached,
        "ttl": control.ttl_s is not None,
        "s-maxage": control.max_age_s is not None,
        "namespace": bool(control.namespace),
    }
    allowed = cache.config.controls if principal.cache_controls is None else principal.cache_controls
    for name, is_asked in asked.items():
        if is_asked and name not in allowed:
            raise Forbidden(
                f"This key may not use the cache control {name}. Remove it from `cache` and from the header "
                "Cache-Control, or have it allowed for the key."
            )
