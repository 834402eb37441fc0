"""The story of a request as the spans of a trace, free of any library.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI where these have one (``gen_ai.*``,
``http.*``, ``server.*``, ``error.type``), and are ``maitred.*`` otherwise. What a request used is told by its first
span alone, and where it comes through several gateways of ours by that of the first: tools that add up tokens and costs
over a trace would count twice what two spans tell.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from maitred.core.answer import InferenceRequest, Outcome, RequestContext
from maitred.core.ids import new_span_id
from maitred.core.timeline import RequestTimeline, SpanName, TimelineSpan

Attribute = str | bool | int | float | list[str] | list[float]

_EMBEDDINGS = "embeddings"
_OPERATIONS: Mapping[str, str] = {"/v1/completions": "text_completion", "/v1/embeddings": _EMBEDDINGS}
"""Route -> what the conventions call it; others are ``chat``."""
_PROVIDERS: Mapping[str, str] = {"azure": "azure.ai.openai"}
"""Our name of a dialect -> that of the conventions, where they differ."""
_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
_NO_FAULTS = frozenset({"cancelled", "moved"})
"""Ends of a chapter that are nobody's failure."""


class SpanEvent(Struct, frozen=True):
    """Something that was seen at one moment of a span."""

    name: str
    at_ns: int
    attributes: dict[str, Attribute]


class Span(Struct, frozen=True):
    """One span; times are wall times, in nanoseconds since the epoch."""

    name: str
    span_id: str
    parent_id: str
    """Empty: the trace begins with it."""
    kind: str
    """``server``, ``client`` or ``internal``."""
    began_ns: int
    ended_ns: int
    attributes: dict[str, Attribute]
    events: list[SpanEvent]
    error: str = ""
    """The code of a failure; empty: none."""
    engine: str = ""
    """The engine that has seen it; empty: this gateway."""


def make_spans(context: RequestContext, wall_offset_s: float) -> Iterator[Span]:
    """All spans of an ended request, parents first.

    Args:
        context: Has a trace.
        wall_offset_s: Wall time less monotonic time.
    """
    timeline = context.timeline
    assert timeline.trace is not None
    writer = _Writer(wall_offset_s, context.ended_s)
    root_id = timeline.trace.span_id
    yield Span(
        f"{operation_name(context)} {context.model or _requested_model(context)}".strip(),
        root_id,
        timeline.parent_span_id,
        "server",
        writer.ns(context.started_s),
        writer.ns(context.ended_s),
        _request_attributes(context),
        [] if context.first_token_s is None else [SpanEvent("first_token", writer.ns(context.first_token_s), {})],
        context.error or str(context.outcome) if context.outcome is Outcome.FAILED else "",
    )
    for span in timeline.spans:
        yield from writer.spans(span, root_id)


def operation_name(context: RequestContext) -> str:
    """What the conventions call what was asked."""
    return _OPERATIONS.get(context.route, "chat")


class _Writer:
    """Writes chapters of one request.

    Args:
        wall_offset_s: Wall time less monotonic time.
        ended_s: When the request ended, and with it what had not.
    """

    def __init__(self, wall_offset_s: float, ended_s: float) -> None:
        self._offset_s = wall_offset_s
        self._ended_s = ended_s

    def ns(self, at_s: float) -> int:
        """A wall time."""
        return round((at_s + self._offset_s) * 1e9)

    def spans(self, span: TimelineSpan, parent_id: str, engine: str = "") -> Iterator[Span]:
        """A chapter and what is inside it, which may be what an engine has seen."""
        span_id = span.span_id or new_span_id()
        began_ns = self.ns(span.began_s)
        attributes = dict(_flat(span.facts, "maitred."))
        kind = "internal"
        if span.name is SpanName.ATTEMPT:
            kind = "client"
            if "host" in span.facts:
                attributes |= {"server.address": span.facts["host"], "server.port": span.facts["port"]}
        elif span.name is SpanName.ENGINE:
            kind, engine = "server", span.facts["replica"]
        failed = span.error and span.error not in _NO_FAULTS
        if span.error:
            attributes["error.type"] = span.error
        yield Span(
            str(span.name),
            span_id,
            parent_id,
            kind,
            began_ns,
            self.ns(self._ended_s if span.ended_s is None else span.ended_s),
            attributes,
            [
                SpanEvent("candidate", began_ns, dict(_flat(candidate, "maitred.")))
                for candidate in span.facts.get("candidates", ())
            ],
            span.error if failed else "",
            engine,
        )
        for inner in span.inside:
            yield from self.spans(inner, span_id, engine)


def _flat(facts: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Attribute]]:
    """Facts as attributes: what is nested gets a longer name, what is unknown none."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            if value and not isinstance(value[0], Mapping):
                yield prefix + name, [str(one) for one in value]
        elif value is not None:
            yield prefix + name, value


def _requested_model(context: RequestContext) -> str:
    return "" if context.request is None else context.request.model


def _request_attributes(context: RequestContext) -> dict[str, Attribute]:
    """What is told of the request as a whole."""
    told: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation_name(context),
        "gen_ai.provider.name": _provider_name(context.timeline),
        "gen_ai.response.model": context.model or None,
        "http.request.method": "POST",
        "http.route": context.route,
        "http.response.status_code": context.status,
        "error.type": context.error or None,
        "maitred.request_id": context.request_id,
        "maitred.outcome": str(context.outcome),
        "maitred.priority": context.priority,
        "maitred.refused_by": context.refused_by or None,
        "maitred.degraded": [*context.degraded] or None,
        "maitred.fallbacks": [*context.fallbacks] or None,
        "maitred.escalated": context.escalated or None,
        "maitred.recoveries": context.recoveries or None,
        "maitred.hedged": context.hedged or None,
        "maitred.rollout": None if context.arm is None else str(context.arm),
    }
    if context.principal is not None:
        told["maitred.organisation"] = context.principal.tenants[-1]
        told["maitred.tenant"] = context.principal.tenants[0]
        told["maitred.key"] = context.principal.key
    for cause, waited_ms in context.waited_ms.items():
        told[f"maitred.waited_s.{cause}"] = waited_ms / 1000
    if context.request is not None:
        told["gen_ai.request.model"] = context.request.model
        if operation_name(context) != _EMBEDDINGS:
            told |= _parameter_attributes(context.request)
    if context.first_token_s is not None:
        told |= _usage_attributes(context)
        if operation_name(context) != _EMBEDDINGS:
            told |= _answer_attributes(context, context.first_token_s)
    return {name: value for name, value in told.items() if value is not None}


def _answer_attributes(context: RequestContext, first_token_s: float) -> dict[str, Attribute | None]:
    """What is told of tokens that were generated."""
    return {
        "gen_ai.response.time_to_first_chunk": first_token_s - context.started_s,
        "gen_ai.response.finish_reasons": [str(reason) for reason in context.finish_reasons],
        "maitred.estimated": context.estimated or None,
    }


def _usage_attributes(context: RequestContext) -> dict[str, Attribute | None]:
    """What it used; under a name of ours where a gateway of ours that it came through tells the same."""
    trace = context.timeline.trace
    prefix = "maitred.usage" if trace is not None and trace.accounted else "gen_ai.usage"
    told: dict[str, Attribute | None] = {f"{prefix}.input_tokens": context.prompt_tokens}
    if operation_name(context) == _EMBEDDINGS:
        return told
    return told | {
        f"{prefix}.output_tokens": context.completion_tokens,
        f"{prefix}.cache_read.input_tokens": context.cached_tokens,
        f"{prefix}.reasoning.output_tokens": context.reasoning_tokens or None,
    }


def _parameter_attributes(request: InferenceRequest) -> dict[str, Attribute | None]:
    """What a client has asked of the generation."""
    sampling = request.sampling
    told: dict[str, Attribute | None] = {
        f"gen_ai.request.{name}": getattr(sampling, name) for name in _SAMPLING if name not in request.unset_fields
    }
    return told | {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "gen_ai.request.stream": not request.whole,
    }


def _provider_name(timeline: RequestTimeline) -> str:
    """Whoever answered, or was tried last."""
    attempts = [span for span in timeline.spans if span.name is SpanName.ATTEMPT]
    provider = str(attempts[-1].facts.get("provider", "maitred")) if attempts else "maitred"
    return _PROVIDERS.get(provider, provider)
