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


def spans_of(tally: RequestContext, wall_offset_s: float) -> Iterator[Span]:
    """All spans of an ended request, parents first.

    Args:
        tally: Has a trace.
        wall_offset_s: Wall time less monotonic time.
    """
    story = tally.story
    assert story.trace is not None
    writer = _Writer(wall_offset_s, tally.ended_s)
    root_id = story.trace.span_id
    yield Span(
        f"{operation_of(tally)} {tally.model or _asked(tally)}".strip(),
        root_id,
        story.parent_span_id,
        "server",
        writer.ns(tally.started_s),
        writer.ns(tally.ended_s),
        _request_attributes(tally),
        [] if tally.first_token_s is None else [SpanEvent("first_token", writer.ns(tally.first_token_s), {})],
        tally.error or str(tally.outcome) if tally.outcome is Outcome.FAILED else "",
    )
    for chapter in story.chapters:
        yield from writer.spans(chapter, root_id)


def operation_of(tally: RequestContext) -> str:
    """What the conventions call what was asked."""
    return _OPERATIONS.get(tally.route, "chat")


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

    def spans(self, chapter: TimelineSpan, parent_id: str, engine: str = "") -> Iterator[Span]:
        """A chapter and what is inside it, which may be what an engine has seen."""
        span_id = chapter.span_id or new_span_id()
        began_ns = self.ns(chapter.began_s)
        attributes = dict(_flat(chapter.facts, "maitred."))
        kind = "internal"
        if chapter.name is SpanName.ATTEMPT:
            kind = "client"
            if "host" in chapter.facts:
                attributes |= {"server.address": chapter.facts["host"], "server.port": chapter.facts["port"]}
        elif chapter.name is SpanName.ENGINE:
            kind, engine = "server", chapter.facts["replica"]
        failed = chapter.error and chapter.error not in _NO_FAULTS
        if chapter.error:
            attributes["error.type"] = chapter.error
        yield Span(
            str(chapter.name),
            span_id,
            parent_id,
            kind,
            began_ns,
            self.ns(self._ended_s if chapter.ended_s is None else chapter.ended_s),
            attributes,
            [
                SpanEvent("candidate", began_ns, dict(_flat(candidate, "maitred.")))
                for candidate in chapter.facts.get("candidates", ())
            ],
            chapter.error if failed else "",
            engine,
        )
        for inner in chapter.inside:
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


def _asked(tally: RequestContext) -> str:
    return "" if tally.ask is None else tally.ask.model


def _request_attributes(tally: RequestContext) -> dict[str, Attribute]:
    """What is told of the request as a whole."""
    told: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation_of(tally),
        "gen_ai.provider.name": _provider_of(tally.story),
        "gen_ai.response.model": tally.model or None,
        "http.request.method": "POST",
        "http.route": tally.route,
        "http.response.status_code": tally.status,
        "error.type": tally.error or None,
        "maitred.request_id": tally.request_id,
        "maitred.outcome": str(tally.outcome),
        "maitred.priority": tally.priority,
        "maitred.refused_by": tally.refused_by or None,
        "maitred.degraded": [*tally.degraded] or None,
        "maitred.fallbacks": [*tally.fallbacks] or None,
        "maitred.escalated": tally.escalated or None,
        "maitred.recoveries": tally.recoveries or None,
        "maitred.hedged": tally.hedged or None,
        "maitred.rollout": None if tally.arm is None else str(tally.arm),
    }
    if tally.principal is not None:
        told["maitred.organisation"] = tally.principal.tenants[-1]
        told["maitred.tenant"] = tally.principal.tenants[0]
        told["maitred.key"] = tally.principal.key
    for cause, waited_ms in tally.waited_ms.items():
        told[f"maitred.waited_s.{cause}"] = waited_ms / 1000
    if tally.ask is not None:
        told["gen_ai.request.model"] = tally.ask.model
        if operation_of(tally) != _EMBEDDINGS:
            told |= _asked_attributes(tally.ask)
    if tally.first_token_s is not None:
        told |= _usage_attributes(tally)
        if operation_of(tally) != _EMBEDDINGS:
            told |= _answer_attributes(tally, tally.first_token_s)
    return {name: value for name, value in told.items() if value is not None}


def _answer_attributes(tally: RequestContext, first_token_s: float) -> dict[str, Attribute | None]:
    """What is told of tokens that were generated."""
    return {
        "gen_ai.response.time_to_first_chunk": first_token_s - tally.started_s,
        "gen_ai.response.finish_reasons": [str(reason) for reason in tally.finishes],
        "maitred.estimated": tally.estimated or None,
    }


def _usage_attributes(tally: RequestContext) -> dict[str, Attribute | None]:
    """What it used; under a name of ours where a gateway of ours that it came through tells the same."""
    trace = tally.story.trace
    prefix = "maitred.usage" if trace is not None and trace.accounted else "gen_ai.usage"
    told: dict[str, Attribute | None] = {f"{prefix}.input_tokens": tally.prompt_tokens}
    if operation_of(tally) == _EMBEDDINGS:
        return told
    return told | {
        f"{prefix}.output_tokens": tally.completion_tokens,
        f"{prefix}.cache_read.input_tokens": tally.cached_tokens,
        f"{prefix}.reasoning.output_tokens": tally.reasoning_tokens or None,
    }


def _asked_attributes(ask: InferenceRequest) -> dict[str, Attribute | None]:
    """What a client has asked of the generation."""
    sampling = ask.sampling
    told: dict[str, Attribute | None] = {
        f"gen_ai.request.{name}": getattr(sampling, name) for name in _SAMPLING if name not in ask.left_open
    }
    return told | {
        "gen_ai.request.max_tokens": ask.max_tokens,
        "gen_ai.request.seed": ask.seed,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "gen_ai.request.stream": not ask.whole,
    }


def _provider_of(story: RequestTimeline) -> str:
    """Whoever answered, or was tried last."""
    attempts = [chapter for chapter in story.chapters if chapter.name is SpanName.ATTEMPT]
    provider = str(attempts[-1].facts.get("provider", "maitred")) if attempts else "maitred"
    return _PROVIDERS.get(provider, provider)
