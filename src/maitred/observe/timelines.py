"""Timelines of the last requests, for `maitred explain`."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from msgspec import Struct

from maitred.core.clock import Clock
from maitred.core.context import CacheResult, Outcome, RejectedAnswer, RequestContext
from maitred.core.errors import ResourceNotFound
from maitred.core.flow import PriorityClass
from maitred.core.inference import InferenceRequest
from maitred.core.request import FinishReason, SamplingParams
from maitred.core.rollout import RolloutArm
from maitred.core.tenancy import Principal
from maitred.core.timeline import RequestTimeline, SpanName, TimelineSpan
from maitred.observe.observer_batch import ObserverBatch
from maitred.wire.admin.responses import SpanBody, TimelineBody, TimelineHead
from maitred.wire.admin.times import to_iso

_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "n", "top_logprobs"),
)
"""Fields of `SamplingParams` that are shown where they differ from their defaults."""
_get_sampling: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*_SAMPLING_FIELDS)
_DEFAULT_SAMPLING = _get_sampling(SamplingParams(max_tokens=0, seed=0))
_PLAIN_FIELDS = {
    "max_tokens": "max_tokens",
    "seed": "seed",
    "deadline_in_s": "deadline_s",
    "ttft_in_s": "ttft_objective_s",
    "itl_objective_s": "itl_objective_s",
    "priority": "priority",
}
"""Fields of `InferenceRequest` that are shown as they are -> their names in the API."""
_get_parameters: Callable[[InferenceRequest], tuple[Any, ...]] = attrgetter(
    "sampling", "unset_fields", "needs", "whole", *_PLAIN_FIELDS
)


class RequestFacts(Struct, frozen=True):
    """Facts of an ended request that its timeline is made from.

    The fields are those of `RequestContext`, by the same names. Prompts, the listener of the response and the gaps
    between tokens are not kept. Every request is kept but few are read, so slow work (rounding, formatting, a body for
    each span) waits until one is read.
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
    cache: CacheResult | None
    arm: RolloutArm | None
    timeline: RequestTimeline

    @property
    def duration_ms(self) -> float:
        """Time from the request's arrival to its end."""
        return _ms(self.ended_s - self.started_s)

    @property
    def ttft_ms(self) -> float | None:
        """Time from the request's arrival to its first token; None: there was none."""
        return None if self.first_token_s is None else _ms(self.first_token_s - self.started_s)


_get_facts: Callable[[RequestContext], tuple[Any, ...]] = attrgetter(*RequestFacts.__struct_fields__)


class StoredTimeline(Struct, frozen=True):
    """Stored timeline of one ended request."""

    facts: RequestFacts
    wall_s: float
    """Wall time at which the request ended."""
    requested_model: str
    """Model, as the client named it."""
    parameters: tuple[Any, ...]
    """Parameters of the request, in the order of `_describe_parameters`."""


class TimelineBuffer:
    """Buffer of the timelines of the last requests. Implements `maitred.core.context.RequestObserver`.

    The buffer keeps requests that could be parsed as requests to a model; lists, scrapes and unknown callers are left
    out.

    Args:
        capacity: Largest number of requests. Each takes some kilobytes; 0 keeps none.
        clock: Clock for the wall times that are shown.
        batch: Batch that delivers ended requests; None: they are delivered directly.
    """

    def __init__(self, capacity: int, clock: Clock, batch: ObserverBatch | None = None) -> None:
        self._capacity = capacity
        self._clock = clock
        self._batch = batch or ObserverBatch()
        self._batch.add_observers(self)
        self._timelines: OrderedDict[str, StoredTimeline] = OrderedDict()
        """Timelines by request id; if a client repeats an id, the latest request is kept."""

    def reconfigure(self, capacity: int) -> None:
        """Changes how many requests are kept."""
        self._capacity = capacity
        while len(self._timelines) > capacity:
            self._timelines.popitem(last=False)

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Stores the ended requests that asked a model for something."""
        if not self._capacity:
            return
        timelines, wall_offset_s = self._timelines, self._clock.wall_s() - self._clock.monotonic_s()
        for context in contexts:
            if (request := context.request) is not None:
                timelines.pop(context.request_id, None)
                facts = RequestFacts(*_get_facts(context))
                parameters = (len(request.stops), *_get_parameters(request))
                timelines[context.request_id] = StoredTimeline(
                    facts, wall_offset_s + context.ended_s, request.model, parameters
                )
        while len(timelines) > self._capacity:
            timelines.popitem(last=False)

    def latest(self, count: int | None = None) -> Sequence[TimelineHead]:
        """Returns the heads of all timelines, or of the last ones, the latest first."""
        self._batch.flush_pending()
        return [timeline_head(stored) for stored in islice(reversed(self._timelines.values()), count)]

    def get(self, request_id: str) -> TimelineBody:
        """Returns the latest timeline with that request id.

        Raises:
            ResourceNotFound: No request of that id is known.
        """
        self._batch.flush_pending()
        stored = self._timelines.get(request_id)
        if stored is None:
            raise ResourceNotFound(
                f"No request of that id is known here. A gateway knows the last {self._capacity:,} that it has "
                "served and "
                "that have ended (`explain.requests`). What it could not read, or had no valid key, is not among them."
            )
        return timeline_body(stored)


def timeline_head(stored: StoredTimeline) -> TimelineHead:
    """Makes the entry of an ended request in a list."""
    facts = stored.facts
    return TimelineHead(
        id=facts.request_id,
        time=to_iso(stored.wall_s),
        route=facts.route,
        organisation=None if facts.principal is None else facts.principal.tenants[-1],
        model=facts.model or None,
        outcome=str(facts.outcome),
        status=facts.status,
        duration_ms=facts.duration_ms,
        ttft_ms=facts.ttft_ms,
        output_tokens=facts.completion_tokens,
    )


def timeline_body(stored: StoredTimeline) -> TimelineBody:
    """Makes the timeline of an ended request as the admin API has it."""
    facts = stored.facts
    principal, spans = facts.principal, facts.timeline.spans
    return TimelineBody(
        id=facts.request_id,
        trace_id=facts.timeline.trace_id or None,
        time=to_iso(stored.wall_s),
        route=facts.route,
        organisation=None if principal is None else principal.tenants[-1],
        tenant=None if principal is None else principal.tenants[0],
        key=None if principal is None else principal.key,
        asked=stored.requested_model,
        model=facts.model or None,
        parameters=_describe_parameters(*stored.parameters),
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
        escalated=[f"{rejected.model}={rejected.reason}" for rejected in facts.rejected_answers],
        recoveries=facts.recoveries,
        cache=None if facts.cache is None else str(facts.cache.status),
        rollout=None if facts.arm is None else str(facts.arm),
        chapters=[_span_body(span, facts.started_s) for span in spans],
    )


def request_parameters(request: InferenceRequest) -> dict[str, Any]:
    """Returns the parameters of a request by the names of the API, without any text of the client."""
    return _describe_parameters(len(request.stops), *_get_parameters(request))


def _describe_parameters(
    stops: int,
    sampling: SamplingParams,
    unset_fields: frozenset[str],
    needs: Sequence[str],
    whole: bool,
    *plain_values: Any,  # noqa: ANN401 - of JSON
) -> dict[str, Any]:
    """Converts stored parameters to the names of the API."""
    parameters: dict[str, Any] = {
        **dict(zip(_PLAIN_FIELDS.values(), plain_values, strict=True)),
        "stops": stops or None,
        "needs": [*needs] or None,
        "stream": None if whole else True,
    }
    parameters = {name: value for name, value in parameters.items() if value is not None}
    if (values := _get_sampling(sampling)) != _DEFAULT_SAMPLING:
        parameters |= {
            name: value
            for name, value, default in zip(_SAMPLING_FIELDS, values, _DEFAULT_SAMPLING, strict=True)
            if value != default and name not in unset_fields
        }
    return parameters


def _span_body(span: TimelineSpan, started_s: float) -> SpanBody:
    return SpanBody(
        name=str(span.name),
        at_ms=_ms(span.began_s - started_s),
        took_ms=None if span.ended_s is None else _ms(span.ended_s - span.began_s),
        error=span.error,
        facts=span.facts,
        inside=[_span_body(child, started_s) for child in span.inside],
    )


def _cost_usd(spans: Sequence[TimelineSpan]) -> float | None:
    costs = [span.facts["cost_usd"] for span in spans if span.name is SpanName.SETTLEMENT]
    return sum(costs) if costs else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
