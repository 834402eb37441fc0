"""Request context: the facts about one request until it ends, and the ids for its log lines.

The stages record tokens and times in the context, and the HTTP layer closes it exactly once with the `Outcome` of the
request; logs, metrics, headers and the bill are made from it.

`LOG_CONTEXT` names the request that a task works for. A task passes it to the tasks that it starts. Some of these tasks
run longer than the request; their later work does not belong to it.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from maitred.core.counters import CounterState
from maitred.core.errors import MaitredError
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.core.inference import InferenceRequest, TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.core.rollout import RolloutArm
from maitred.core.tenancy import Principal
from maitred.core.timeline import RequestTimeline


class RateLimitStatus(msgspec.Struct, frozen=True):
    """Remaining rate limits of a caller: the tightest limit of each kind; None: no such limit."""

    requests: CounterState | None = None
    tokens: CounterState | None = None


class ModelSelection(msgspec.Struct, frozen=True):
    """The model that was chosen for a request without a fixed model."""

    name: str
    """Model name from the request, with aliases resolved."""
    model: str
    """The first choice, as written in the model table; a fallback may have changed it later."""
    reason: str
    """Difficulty class ``small``, ``medium`` or ``large``, or the kind of work, such as ``code``."""
    score: float | None = None
    """Estimated difficulty from 0 to 1; None: unknown."""


class RejectedAnswer(msgspec.Struct, frozen=True):
    """A complete answer that failed a check (see `maitred.routing.escalation`). It is billed."""

    model: str
    reason: str
    """Name of the failed check."""
    usage: Usage
    replaced: bool = False
    """Whether the caller got the answer of a larger model instead."""


class Compaction(msgspec.Struct, frozen=True):
    """A summary of the conversation that was generated before the answer of a request. It is billed."""

    model: str
    usage: Usage


class Outcome(StrEnum):
    """How one request ended. Each request has exactly one outcome."""

    FINISHED = "finished"
    """The whole answer was sent."""
    REFUSED = "refused"
    """The request was refused before any work was done for it."""
    FAILED = "failed"
    """The request was admitted, but the server could not complete it."""
    CANCELLED = "cancelled"
    """The caller closed the connection."""


class CacheStatus(StrEnum):
    """Result of the look-up of a request in a cache of answers."""

    HIT = "hit"
    """The answer came from the cache."""
    COALESCED = "coalesced"
    """The answer was being computed for an earlier request, which shares it."""
    SEMANTIC = "semantic"
    """The answer of a similar question was served."""
    PARTIAL = "partial"
    """A part of the answer was not computed for this request: vectors of some of its inputs."""
    MISS = "miss"
    """The cache has no such answer, so it was computed."""
    BYPASS = "bypass"
    """The cache was not asked: the request, its caller or its model does not allow it."""


_NOT_COMPUTED = (CacheStatus.HIT, CacheStatus.COALESCED, CacheStatus.SEMANTIC)


class CacheResult(msgspec.Struct, frozen=True):
    """Result of the look-up of a request in the cache of answers, and in its index of similar questions."""

    status: CacheStatus
    key: str = ""
    """Name of the answer in the cache; empty: it has none."""
    age_s: float | None = None
    """Age of the answer that came from the cache."""
    semantic_state: str = ""
    """State of the scope whose similar questions were looked up, such as ``shadow``; empty: none were."""
    similarity: float | None = None
    """Cosine of the question to the most similar one that is known; None: none came near."""
    false_hit_bound: float | None = None
    """Upper bound of false hits per look-up in this scope; None: not known yet."""


class RequestContext(msgspec.Struct):
    """Record of one request; observers read it once, after the request has ended."""

    request_id: str
    started_s: float
    """Start time on the monotonic clock, like all times in this class."""
    route: str = "unmatched"
    principal: Principal | None = None
    """The authenticated caller; None before authentication and on public routes."""
    model: str = ""
    """Resolved model name, so the set of values is bounded; empty before it is resolved."""
    selection: ModelSelection | None = None
    """Why this model was chosen; None: the caller named the model."""
    arm: RolloutArm | None = None
    """Rollout arm that serves the request; None: the name has no rollout, or no arm serves it."""
    rate_limits: RateLimitStatus | None = None
    """Rate limit status of the caller after this reservation; None if nothing was counted."""
    refused_by: str = ""
    """Kind of the limit that refused the request, such as ``tokens_per_minute``."""
    failure: MaitredError | None = None
    """The error that the caller received; None: no error."""
    clamped_max_tokens: int | None = None
    """Lowered `max_tokens`, because a limit had no room for more."""
    priority: PriorityClass | None = None
    """Priority class that was granted; None until it is known."""
    predicted_position: QueuePosition | None = None
    """Predicted queue position when the request joined the queue."""
    position: Callable[[], QueuePosition | None] | None = None
    """Returns the current queue position; None, or a result of None: the request does not wait."""
    is_counted: bool = False
    """Whether a replica was asked, so that rates of requests have counted this one; a fallback is not counted again."""
    dispatched_s: float | None = None
    """Time of the dispatch from the queue."""
    waited_ms: dict[str, float] = {}
    """Waiting time in milliseconds by cause (see `maitred.core.request.WaitCause`)."""
    ignored_fields: Sequence[str] = ()
    """Fields of the request that the model which answers was not given, as paths."""
    is_passthrough: bool = False
    """Whether the server that answers was given the request as its client wrote it, in the API that both speak."""
    degraded: list[str] = []
    """Degradations because of the load, such as ``max_tokens=64`` or ``model=small``."""
    relaxed: list[str] = []
    """Keywords of JSON schemas that the answer is not held to, with their places."""
    prompt_token_ids: Sequence[Sequence[int]] = ()
    """Token ids of each prompt, where the caller asked for them and they are known here."""
    prompt_tokens: int = 0
    saved_prompt_tokens: int = 0
    """Prompt tokens that were not computed for this request while others were, a part of the prompt tokens."""
    paid_tokens: int = 0
    """Tokens that this request pays of an answer that was computed for another one."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Reasoning tokens, a part of the completion tokens."""
    cache_write_tokens: int = 0
    """Prompt tokens that the server wrote into its prefix cache, a part of the prompt tokens."""
    cache_write_1h_tokens: int = 0
    """Written prompt tokens that the server keeps for an hour."""
    usage_details: dict[str, Any] | None = None
    """Whatever else an external server counted; see `maitred.core.request.Usage`."""
    estimated: bool = False
    """Whether the token counts are estimates, because the server did not count them, or not credibly."""
    has_fallback: bool = False
    """Whether another model can be asked if the current one fails before any of its answer is sent."""
    first_token_s: float | None = None
    gaps_s: list[float] = []
    """Seconds between two successive deliveries of tokens of one choice."""
    finish_reasons: list[FinishReason] = []
    """Finish reasons, one for each choice that has ended."""
    fallbacks: list[str] = []
    """Fallback models that were used after a failure, such as ``general=big``."""
    rejected_answers: list[RejectedAnswer] = []
    """Complete answers that failed a check, in order; the last one may be the answer sent."""
    cache: CacheResult | None = None
    """Result of the look-up in the cache of answers; None: there was none."""
    stored_as: str = ""
    """Id of the response that the answer is stored as, in one transaction with its usage; empty: it is not stored."""
    compaction: Compaction | None = None
    """Summary of the conversation that this answer goes on from; None: the model has read the conversation itself."""
    recoveries: int = 0
    """How often the request moved to another replica because its own had failed."""
    continued: int = 0
    """How many of these recoveries continued a partial answer from its text."""
    hedged: str = ""
    """Replica that answered first, ``first`` or ``second``; empty: only one replica was used."""
    served_region: str | None = None
    """Region of the replica that the answer came from, the first one if it moved; None: it has no name."""
    outcome: Outcome | None = None
    stalled: bool = False
    """Whether the request was cancelled because its client had stopped reading."""
    status: int = 0
    ended_s: float = 0.0
    request: InferenceRequest | None = None
    """The parsed request; None until it is known."""
    on_work_end: Callable[[Callable[[object], None]], object] | None = None
    """Calls a function when the answer is computed, if that goes on for others after this request has ended. It is
    reported then, so that all tokens are counted. None: it does not go on."""
    timeline: RequestTimeline = msgspec.field(default_factory=RequestTimeline)
    """Timeline of the request's spans."""
    listener: "DeltaListener | None" = None
    """Additional listener to the deltas of the answer; None: no listener."""

    @property
    def error(self) -> str:
        """Code of the error that the caller received, such as ``queue_full``; empty: no error."""
        return "" if self.failure is None else self.failure.code

    @property
    def is_computed(self) -> bool:
        """Whether tokens of the answer, if any, were computed for this request: they are not from the cache."""
        return self.cache is None or self.cache.status not in _NOT_COMPUTED

    @property
    def saved_tokens(self) -> int:
        """Tokens of the prompts and the answer that were not computed for this request and are not paid by it."""
        if self.cache is None or self.outcome in (Outcome.REFUSED, Outcome.FAILED):
            return 0
        return self.saved_prompt_tokens if self.is_computed else max(0, self.usage.total_tokens - self.paid_tokens)

    @property
    def escalated(self) -> list[str]:
        """Returns the model and the check for each answer that failed a check."""
        return [f"{failed.model}={failed.reason}" for failed in self.rejected_answers]

    @property
    def usage(self) -> Usage:
        """The usage in tokens, as it is billed."""
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            self.estimated,
            reasoning_tokens=self.reasoning_tokens,
            cache_write_tokens=self.cache_write_tokens,
            cache_write_1h_tokens=self.cache_write_1h_tokens,
            details=self.usage_details,
        )

    def set_usage(self, usage: Usage) -> None:
        """Sets the usage, of an answer that was not computed for this request."""
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        self.cached_tokens, self.reasoning_tokens = usage.cached_tokens, usage.reasoning_tokens
        self.cache_write_tokens, self.cache_write_1h_tokens = usage.cache_write_tokens, usage.cache_write_1h_tokens
        self.usage_details, self.estimated = usage.details, usage.estimated

    def reset_for_fallback(self, fallback: str) -> None:
        """Clears the facts about the answer when the request moves to another model."""
        self.fallbacks.append(fallback)
        self._reset()

    def reset_for_next_answer(self) -> "RequestContext":
        """Resets the context for another answer, which replaces or follows this one. Returns a copy of its state."""
        known = replace(self, fallbacks=[*self.fallbacks], degraded=[*self.degraded])
        self._reset()
        self.is_counted = False  # the next answer is a request of its own
        self.first_token_s, self.gaps_s, self.waited_ms = None, [], {}
        return known

    def restore(self, known: "RequestContext") -> None:
        """Restores a saved copy, because the other model gave no answer."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(known, name))

    def _reset(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.reasoning_tokens = self.paid_tokens = 0
        self.cache_write_tokens = self.cache_write_1h_tokens = 0
        self.predicted_position = self.position = self.dispatched_s = self.clamped_max_tokens = None
        self.estimated, self.degraded, self.refused_by, self.finish_reasons = False, [], "", []
        self.usage_details, self.is_passthrough, self.cache = None, False, None
        self.prompt_token_ids = ()

    def close(self, outcome: Outcome, status: int, now_s: float) -> None:
        """Sets the outcome; a second call is a bug."""
        if self.outcome is not None:
            raise RuntimeError(f"Request {self.request_id} ended twice: {self.outcome}, then {outcome}.")
        self.outcome, self.status, self.ended_s = outcome, status, now_s


class DeltaListener(Protocol):
    """Additional listener to the deltas of an answer. A listener must not block and must not raise."""

    def on_delta(self, parts: Sequence[TextDelta]) -> None:
        """Takes the next deltas of the answer."""
        ...


class RequestObserver(Protocol):
    """Observer of requests that have ended. An observer must not block and must not raise."""

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Called once for each request, after all of its resources are free.

        One call may have several requests, in the order they ended.
        """
        ...


class LogContext:
    """Context of one request for log lines.

    Attributes:
        request_id: The request id that the client received.
        trace_id: Id of the trace; empty: the request is not traced.
        over: Whether the request has ended.
    """

    __slots__ = ("over", "request_id", "trace_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.trace_id = ""
        self.over = False


LOG_CONTEXT: ContextVar[LogContext | None] = ContextVar("request in hand", default=None)
"""The request that the current task works for; None: no request."""
