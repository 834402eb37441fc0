"""Context of a request: what is known of it until it ends, and the ids that log lines get from it.

The stages write down what they see (tokens, times), and the edge closes the context exactly once with the request's one
`Outcome`; logs, metrics, headers and the bill are made from it.

`LOG_CONTEXT` says for which request a task works. A task hands it on to those that it starts. Some of these outlive the
request; what they do then is no longer for it.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Protocol

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
    """How much of its rate limits a caller has left: of each sort the tightest, None where there is none."""

    requests: CounterState | None = None
    tokens: CounterState | None = None


class ModelSelection(msgspec.Struct, frozen=True):
    """Which model was chosen for a request whose caller had left that open."""

    name: str
    """What the caller asked for, without aliases."""
    model: str
    """The first choice, as it stands in the table of names; it may have gone on from there."""
    reason: str
    """``small``, ``medium`` or ``large`` for how hard it looked, else the kind of work, such as ``code``."""
    score: float | None = None
    """How hard it looked, from 0 to 1; None: it could not be told."""


class RejectedAnswer(msgspec.Struct, frozen=True):
    """A whole answer that failed a check (see `maitred.routing.escalation`). It is billed."""

    model: str
    reason: str
    """The check."""
    usage: Usage
    replaced: bool = False
    """Whether its caller got that of a larger model instead."""


class Outcome(StrEnum):
    """How a request ended. Each ends in exactly one of these ways."""

    FINISHED = "finished"
    """The whole answer was sent."""
    REFUSED = "refused"
    """It was turned away before any work was done for it."""
    FAILED = "failed"
    """It was taken, and then we could not complete it."""
    CANCELLED = "cancelled"
    """The caller left."""


class RequestContext(msgspec.Struct):
    """Record of one request; observers read it once, when the request has ended."""

    request_id: str
    started_s: float
    """Monotonic, as all times here."""
    route: str = "unmatched"
    principal: Principal | None = None
    """Who calls; None before that is known, and on routes that everybody may use."""
    model: str = ""
    """As resolved, so its values are bounded; empty until then."""
    selection: ModelSelection | None = None
    """Why that model, where the caller had left it open; None: it named one."""
    arm: RolloutArm | None = None
    """Which side of a rollout serves it; None: there is none behind its name, or neither does."""
    rate_limits: RateLimitStatus | None = None
    """Where the caller stands with its limits after this request was reserved; None if nothing was counted."""
    refused_by: str = ""
    """The kind of limit that refused it, such as ``tokens_per_minute``."""
    failure: MaitredError | None = None
    """The error that it was answered with; None: none."""
    clamped_max_tokens: int | None = None
    """What `max_tokens` was lowered to, because a limit had no room for more."""
    priority: PriorityClass | None = None
    """As granted; None until that is known."""
    predicted_position: QueuePosition | None = None
    """What was predicted when it joined the queue."""
    position: Callable[[], QueuePosition | None] | None = None
    """Where it stands now; None, or returning None: it does not wait."""
    dispatched_s: float | None = None
    """When it left the queue."""
    waited_ms: dict[str, float] = {}
    """Milliseconds that it waited, by cause (see `maitred.core.request.WaitCause`)."""
    degraded: list[str] = []
    """What was taken from it because of the load, such as ``max_tokens=64`` or ``model=small``."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Part of the completion tokens."""
    estimated: bool = False
    """Whether tokens are estimates, because whoever served it did not count them."""
    first_token_s: float | None = None
    gaps_s: list[float] = []
    """Between one delivery of tokens of a choice and the next."""
    finish_reasons: list[FinishReason] = []
    """Why choices ended, one for each that has."""
    fallbacks: list[str] = []
    """The models that it went on to after others had failed it, such as ``general=big``."""
    rejected_answers: list[RejectedAnswer] = []
    """Whole answers that failed a check, in their order; the last one may be the one that was given."""
    recoveries: int = 0
    """How often it went on at another replica because its own had failed."""
    continued: int = 0
    """Of these, how often in the middle of an answer whose text another server was given to go on with."""
    hedged: str = ""
    """Which of two replicas, ``first`` or ``second``, began to answer first; empty: it was sent to one."""
    outcome: Outcome | None = None
    stalled: bool = False
    """Whether it was cancelled because its client had stopped reading."""
    status: int = 0
    ended_s: float = 0.0
    request: InferenceRequest | None = None
    """What was asked; None until that is known."""
    timeline: RequestTimeline = msgspec.field(default_factory=RequestTimeline)
    """What happened on its way."""
    listener: "DeltaListener | None" = None
    """Hears the answer beside its caller; None: nobody does."""

    @property
    def error(self) -> str:
        """The code of the error that it was answered with, such as ``queue_full``; empty: none."""
        return "" if self.failure is None else self.failure.code

    @property
    def escalated(self) -> list[str]:
        """Answers that failed a check: the model, and the check."""
        return [f"{failed.model}={failed.reason}" for failed in self.rejected_answers]

    @property
    def usage(self) -> Usage:
        """The tokens, as they are billed."""
        return Usage(
            self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.estimated, self.reasoning_tokens
        )

    def reset_for_fallback(self, fallback: str) -> None:
        """Clears what is known of the request when it moves to another model."""
        self.fallbacks.append(fallback)
        self._reset()

    def escalate(self) -> "RequestContext":
        """The whole answer that is there has failed a check: another model is asked. Returns what was known so far."""
        known = replace(self, fallbacks=[*self.fallbacks], degraded=[*self.degraded])
        self._reset()
        self.first_token_s, self.gaps_s, self.waited_ms = None, [], {}
        return known

    def restore(self, known: "RequestContext") -> None:
        """Restores a saved copy: the other model that was asked has given nothing."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(known, name))

    def _reset(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.reasoning_tokens = 0
        self.predicted_position = self.position = self.dispatched_s = self.clamped_max_tokens = None
        self.estimated, self.degraded, self.refused_by, self.finish_reasons = False, [], "", []

    def close(self, outcome: Outcome, status: int, now_s: float) -> None:
        """Fixes the outcome; a second one would be a fault of ours."""
        if self.outcome is not None:
            raise RuntimeError(f"Request {self.request_id} ended twice: {self.outcome}, then {outcome}.")
        self.outcome, self.status, self.ended_s = outcome, status, now_s


class DeltaListener(Protocol):
    """Someone who hears an answer beside its caller. Must not block and must not raise."""

    def on_delta(self, parts: Sequence[TextDelta]) -> None:
        """Takes the next deltas of the answer."""
        ...


class RequestObserver(Protocol):
    """Someone who wants to know of ended requests. Must not block and must not raise."""

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Told of each request once, after everything it held is free, of some at a time in the order they ended."""
        ...


class LogContext:
    """Context of one request for log lines.

    Attributes:
        request_id: What its client was told.
        trace_id: Empty: it is not traced.
        over: Whether it has ended.
    """

    __slots__ = ("over", "request_id", "trace_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.trace_id = ""
        self.over = False


LOG_CONTEXT: ContextVar[LogContext | None] = ContextVar("request in hand", default=None)
"""The request that is worked for; None: none is."""
