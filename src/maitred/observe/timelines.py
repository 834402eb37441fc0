"""The stories of the last requests, for whoever asks what happened to one."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec import Struct

from maitred.core.answer import InferenceRequest, Outcome, RejectedAnswer, RequestContext
from maitred.core.clock import Clock
from maitred.core.errors import ResourceNotFound
from maitred.core.flow import PriorityClass
from maitred.core.request import FinishReason, SamplingParams
from maitred.core.rollout import RolloutArm
from maitred.core.tenancy import Principal
from maitred.core.timeline import RequestTimeline, SpanName, TimelineSpan
from maitred.observe.observer_batch import ObserverBatch
from maitred.wire.admin.responses import SpanBody, TimelineBody, TimelineHead
from maitred.wire.admin.times import to_iso

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "n", "top_logprobs"),
)
"""Fields of `SamplingParams` that are told, where they are not as they would be by default."""
_sampling_of: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*_SAMPLING)
_DEFAULTS = _sampling_of(SamplingParams(max_tokens=0, seed=0))
_PLAIN = {
    "max_tokens": "max_tokens",
    "seed": "seed",
    "deadline_in_s": "deadline_s",
    "ttft_in_s": "ttft_objective_s",
    "itl_objective_s": "itl_objective_s",
    "priority": "priority",
}
"""Fields of `InferenceRequest` that are told as they are, and what they are called then."""
_parameters_of: Callable[[InferenceRequest], tuple[Any, ...]] = attrgetter(
    "sampling", "unset_fields", "needs", "whole", *_PLAIN
)


class RequestFacts(Struct, frozen=True):
    """What is kept of an ended request: of its `RequestContext`, by the same names, what its story is told from.

    Prompts, what listened to the answer and the gaps between tokens are not among it. Every request that ends is kept,
    and few are asked for, so what takes time (rounding, formatting, a body for each chapter) waits until one is.
    """

    request_id: str
    route: str
    principal: Principal | None
    model: str
    priority: PriorityClass | None
    outcome: Outcome | None
    status: int
    error: str
    refused_by: str
    started_s: float
    first_token_s: float | None
    ended_s: float
    waited_ms: Mapping[str, float]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reasons: Sequence[FinishReason]
    degraded: Sequence[str]
    fallbacks: Sequence[str]
    rejected_answers: Sequence[RejectedAnswer]
    recoveries: int
    arm: RolloutArm | None
    timeline: RequestTimeline

    @property
    def duration_ms(self) -> float:
        """From its arrival to its end."""
        return _ms(self.ended_s - self.started_s)

    @property
    def ttft_ms(self) -> float | None:
        """From its arrival to its first token; None: it got none."""
        return None if self.first_token_s is None else _ms(self.first_token_s - self.started_s)


_facts_of: Callable[[RequestContext], tuple[Any, ...]] = attrgetter(*RequestFacts.__struct_fields__)


class StoredTimeline(Struct, frozen=True):
    """One request."""

    facts: RequestFacts
    wall_s: float
    """When it ended."""
    asked: str
    """The model, as the client named it."""
    parameters: tuple[Any, ...]
    """What it asked for beside the answer, as `_told` takes it."""


class TimelineBuffer:
    """Keeps so many. Implements `maitred.core.answer.RequestObserver`.

    Kept are those that could be read as asking a model for something; not lists, scrapes and who is not known.

    Args:
        most: Requests. Each takes some kilobytes; 0 keeps none.
        clock: For the times that people read.
        digest: Tells it of requests; None: somebody does at once.
    """

    def __init__(self, most: int, clock: Clock, digest: ObserverBatch | None = None) -> None:
        self._most = most
        self._clock = clock
        self._digest = digest or ObserverBatch()
        self._digest.add_observers(self)
        self._kept: OrderedDict[str, StoredTimeline] = OrderedDict()
        """By the id, of which clients may choose the same again: the latest counts."""

    def reconfigure(self, most: int) -> None:
        """Keeps so many from now on."""
        self._most = most
        while len(self._kept) > most:
            self._kept.popitem(last=False)

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Keeps those that asked for something."""
        if not self._most:
            return
        kept, since_s = self._kept, self._clock.wall_s() - self._clock.monotonic_s()
        for context in contexts:
            if (request := context.request) is not None:
                kept.pop(context.request_id, None)
                facts = RequestFacts(*_facts_of(context))
                parameters = (len(request.stops), *_parameters_of(request))
                kept[context.request_id] = StoredTimeline(facts, since_s + context.ended_s, request.model, parameters)
        while len(kept) > self._most:
            kept.popitem(last=False)

    def latest(self) -> Sequence[TimelineHead]:
        """All of them, the latest first."""
        self._digest.fold()
        return [timeline_head(kept) for kept in reversed(self._kept.values())]

    def get(self, request_id: str) -> TimelineBody:
        """The latest of that id.

        Raises:
            ResourceNotFound: None is known.
        """
        self._digest.fold()
        kept = self._kept.get(request_id)
        if kept is None:
            raise ResourceNotFound(
                f"No request of that id is known here. A gateway knows the last {self._most:,} that it has served and "
                "that have ended (`explain.requests`). What it could not read, or had no valid key, is not among them."
            )
        return timeline_body(kept)


def timeline_head(kept: StoredTimeline) -> TimelineHead:
    """An ended request in a list."""
    facts = kept.facts
    return TimelineHead(
        id=facts.request_id,
        time=to_iso(kept.wall_s),
        route=facts.route,
        organisation=None if facts.principal is None else facts.principal.tenants[-1],
        model=facts.model or None,
        outcome=str(facts.outcome),
        status=facts.status,
        duration_ms=facts.duration_ms,
        ttft_ms=facts.ttft_ms,
        output_tokens=facts.completion_tokens,
    )


def timeline_body(kept: StoredTimeline) -> TimelineBody:
    """An ended request as the administration tells of it."""
    facts = kept.facts
    principal, spans = facts.principal, facts.timeline.spans
    return TimelineBody(
        id=facts.request_id,
        trace_id=facts.timeline.trace_id or None,
        time=to_iso(kept.wall_s),
        route=facts.route,
        organisation=None if principal is None else principal.tenants[-1],
        tenant=None if principal is None else principal.tenants[0],
        key=None if principal is None else principal.key,
        asked=kept.asked,
        model=facts.model or None,
        parameters=_told(*kept.parameters),
        priority=facts.priority,
        outcome=str(facts.outcome),
        status=facts.status,
        error=facts.error or None,
        refused_by=facts.refused_by or None,
        duration_ms=facts.duration_ms,
        ttft_ms=facts.ttft_ms,
        waited_ms={str(cause): round(waited_ms, 3) for cause, waited_ms in facts.waited_ms.items()},
        prompt_tokens=facts.prompt_tokens,
        cached_tokens=facts.cached_tokens,
        output_tokens=facts.completion_tokens,
        finish_reasons=[str(reason) for reason in facts.finish_reasons],
        cost_usd=_cost_usd(spans),
        degraded=[*facts.degraded],
        fallbacks=[*facts.fallbacks],
        escalated=[f"{failed.model}={failed.reason}" for failed in facts.rejected_answers],
        recoveries=facts.recoveries,
        rollout=None if facts.arm is None else str(facts.arm),
        chapters=[_span(span, facts.started_s) for span in spans],
    )


def request_parameters(request: InferenceRequest) -> dict[str, Any]:
    """What a client has asked for beside the answer, by the names of the API. No text of its own is among it."""
    return _told(len(request.stops), *_parameters_of(request))


def _told(
    stops: int,
    sampling: SamplingParams,
    left_open: frozenset[str],
    needs: Sequence[str],
    whole: bool,
    *plain: Any,  # noqa: ANN401 - of JSON
) -> dict[str, Any]:
    """What was asked for, of what is kept of it."""
    told: dict[str, Any] = {
        **dict(zip(_PLAIN.values(), plain, strict=True)),
        "stops": stops or None,
        "needs": [*needs] or None,
        "stream": None if whole else True,
    }
    told = {name: value for name, value in told.items() if value is not None}
    if (values := _sampling_of(sampling)) != _DEFAULTS:
        told |= {
            name: value
            for name, value, default in zip(_SAMPLING, values, _DEFAULTS, strict=True)
            if value != default and name not in left_open
        }
    return told


def _span(span: TimelineSpan, started_s: float) -> SpanBody:
    return SpanBody(
        name=str(span.name),
        at_ms=_ms(span.began_s - started_s),
        took_ms=None if span.ended_s is None else _ms(span.ended_s - span.began_s),
        error=span.error,
        facts=span.facts,
        inside=[_span(one, started_s) for one in span.inside],
    )


def _cost_usd(spans: Sequence[TimelineSpan]) -> float | None:
    costs = [span.facts["cost_usd"] for span in spans if span.name is SpanName.SETTLEMENT]
    return sum(costs) if costs else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
