"""Spans of a trace, made from the timeline of a request without any library.

Names and attributes follow OpenTelemetry's semantic conventions for generative AI where these have one (``gen_ai.*``,
``http.*``, ``server.*``, ``error.type``), and are ``maitred.*`` otherwise. The usage of a request is an attribute of
its first span alone; if the request passes several maitred gateways, of the first gateway's. Tools that add up tokens
and costs over a trace would count usage twice that is on two spans.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from maitred.core.context import Outcome, RequestContext
from maitred.core.ids import new_span_id
from maitred.core.inference import InferenceRequest
from maitred.core.timeline import RequestTimeline, SpanName, TimelineSpan

Attribute = str | bool | int | float | list[str] | list[float]

_EMBEDDINGS = "embeddings"
_OPERATIONS: Mapping[str, str] = {"/v1/completions": "text_completion", "/v1/embeddings": _EMBEDDINGS}
"""Route -> its operation name in the conventions; other routes are ``chat``."""
_PROVIDERS: Mapping[str, str] = {"azure": "azure.ai.openai"}
"""Name of a dialect in maitred -> its name in the conventions, where they differ."""
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
_NON_ERRORS = frozenset({"cancelled", "moved"})
"""Errors of a span that are not failures."""


class SpanEvent(Struct, frozen=True):
    """Event at one moment of a span."""

    name: str
    at_ns: int
    attributes: dict[str, Attribute]


class Span(Struct, frozen=True):
    """Span of a trace; times are wall times, in nanoseconds since the epoch."""

    name: str
    span_id: str
    parent_id: str
    """Id of the parent span; empty: this is the root of the trace."""
    kind: str
    """Kind of the span: ``server``, ``client`` or ``internal``."""
    began_ns: int
    ended_ns: int
    attributes: dict[str, Attribute]
    events: list[SpanEvent]
    error: str = ""
    """Code of a failure; empty: no failure."""
    engine: str = ""
    """Engine that recorded the span; empty: this gateway."""


def make_spans(context: RequestContext, wall_offset_s: float) -> Iterator[Span]:
    """Makes all spans of an ended request, parents first.

    Args:
        context: Context of the request; it has a trace.
        wall_offset_s: Wall time less monotonic time.
    """
    timeline = context.timeline
    assert timeline.trace is not None
    writer = _SpanWriter(wall_offset_s, context.ended_s)
    root_id = timeline.trace.span_id
    yield Span(
        name=f"{operation_name(context)} {context.model or _requested_model(context)}".strip(),
        span_id=root_id,
        parent_id=timeline.parent_span_id,
        kind="server",
        began_ns=writer.wall_ns(context.started_s),
        ended_ns=writer.wall_ns(context.ended_s),
        attributes=_request_attributes(context),
        events=[]
        if context.first_token_s is None
        else [SpanEvent("first_token", writer.wall_ns(context.first_token_s), {})],
        error=context.error or str(context.outcome) if context.outcome is Outcome.FAILED else "",
    )
    for span in timeline.spans:
        yield from writer.spans(span, root_id)


def operation_name(context: RequestContext) -> str:
    """Returns the operation of a request by the conventions."""
    return _OPERATIONS.get(context.route, "chat")


class _SpanWriter:
    """Converter of the timeline spans of one request.

    Args:
        wall_offset_s: Wall time less monotonic time.
        ended_s: When the request ended, which also ends its open spans.
    """

    def __init__(self, wall_offset_s: float, ended_s: float) -> None:
        self._offset_s = wall_offset_s
        self._ended_s = ended_s

    def wall_ns(self, at_s: float) -> int:
        """Converts a monotonic time to a wall time in nanoseconds."""
        return round((at_s + self._offset_s) * 1e9)

    def spans(self, span: TimelineSpan, parent_id: str, engine: str = "") -> Iterator[Span]:
        """Converts a timeline span and those inside it, which an engine may have recorded."""
        span_id = span.span_id or new_span_id()
        began_ns = self.wall_ns(span.began_s)
        attributes = dict(_flatten(span.facts, "maitred."))
        kind = "internal"
        if span.name is SpanName.ATTEMPT:
            kind = "client"
            if "host" in span.facts:
                attributes |= {"server.address": span.facts["host"], "server.port": span.facts["port"]}
        elif span.name is SpanName.ENGINE:
            kind, engine = "server", span.facts["replica"]
        failed = span.error and span.error not in _NON_ERRORS
        if span.error:
            attributes["error.type"] = span.error
        yield Span(
            name=str(span.name),
            span_id=span_id,
            parent_id=parent_id,
            kind=kind,
            began_ns=began_ns,
            ended_ns=self.wall_ns(self._ended_s if span.ended_s is None else span.ended_s),
            attributes=attributes,
            events=[
                SpanEvent("candidate", began_ns, dict(_flatten(candidate, "maitred.")))
                for candidate in span.facts.get("candidates", ())
            ],
            error=span.error if failed else "",
            engine=engine,
        )
        for inner in span.inside:
            yield from self.spans(inner, span_id, engine)


def _flatten(facts: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Attribute]]:
    """Flattens facts to attributes: nested facts get longer names, unknown ones are left out."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            if value and not isinstance(value[0], Mapping):
                yield prefix + name, [str(item) for item in value]
        elif value is not None:
            yield prefix + name, value


def _requested_model(context: RequestContext) -> str:
    return "" if context.request is None else context.request.model


def _request_attributes(context: RequestContext) -> dict[str, Attribute]:
    """Makes the attributes of the root span."""
    attributes: dict[str, Attribute | None] = {
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
        "maitred.cache": None if context.cache is None else str(context.cache.status),
        "maitred.hedged": context.hedged or None,
        "maitred.served_region": context.served_region,
        "maitred.rollout": None if context.arm is None else str(context.arm),
    }
    if context.principal is not None:
        attributes["maitred.organisation"] = context.principal.tenants[-1]
        attributes["maitred.tenant"] = context.principal.tenants[0]
        attributes["maitred.key"] = context.principal.key
    for cause, waited_ms in context.waited_ms.items():
        attributes[f"maitred.waited_s.{cause}"] = waited_ms / 1000
    if context.request is not None:
        attributes["gen_ai.request.model"] = context.request.model
        if operation_name(context) != _EMBEDDINGS:
            attributes |= _parameter_attributes(context.request)
    if context.first_token_s is not None:
        attributes |= _usage_attributes(context)
        if operation_name(context) != _EMBEDDINGS:
            attributes |= _answer_attributes(context, context.first_token_s)
    return {name: value for name, value in attributes.items() if value is not None}


def _answer_attributes(context: RequestContext, first_token_s: float) -> dict[str, Attribute | None]:
    """Makes the attributes of a generated response."""
    return {
        "gen_ai.response.time_to_first_chunk": first_token_s - context.started_s,
        "gen_ai.response.finish_reasons": [str(reason) for reason in context.finish_reasons],
        "maitred.estimated": context.estimated or None,
    }


def _usage_attributes(context: RequestContext) -> dict[str, Attribute | None]:
    """Makes the attributes of usage.

    They have names of maitred's own where an earlier maitred gateway reports the same usage.
    """
    trace = context.timeline.trace
    prefix = "maitred.usage" if trace is not None and trace.accounted else "gen_ai.usage"
    attributes: dict[str, Attribute | None] = {f"{prefix}.input_tokens": context.prompt_tokens}
    if operation_name(context) == _EMBEDDINGS:
        return attributes
    return attributes | {
        f"{prefix}.output_tokens": context.completion_tokens,
        f"{prefix}.cache_read.input_tokens": context.cached_tokens,
        f"{prefix}.cache_creation.input_tokens": context.cache_write_tokens or None,
        f"{prefix}.reasoning.output_tokens": context.reasoning_tokens or None,
    }


def _parameter_attributes(request: InferenceRequest) -> dict[str, Attribute | None]:
    """Makes the attributes of the client's sampling parameters."""
    sampling = request.sampling
    attributes: dict[str, Attribute | None] = {
        f"gen_ai.request.{name}": getattr(sampling, name)
        for name in _SAMPLING_FIELDS
        if name not in request.unset_fields
    }
    return attributes | {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "gen_ai.request.stream": not request.whole,
    }


def _provider_name(timeline: RequestTimeline) -> str:
    """Returns the provider that answered, or was tried last."""
    attempts = [span for span in timeline.spans if span.name is SpanName.ATTEMPT]
    provider = str(attempts[-1].facts.get("provider", "maitred")) if attempts else "maitred"
    return _PROVIDERS.get(provider, provider)
