"""Timeline of one request: its spans in order, with times.

Each stage records a span when it handles the request: what was done, from when to when, and the facts that it was
decided by. Nobody reads the timeline before the request has ended. Then it is shown in two ways, as the spans of a
trace and as what `maitred explain` prints, so the two never disagree.

A timeline holds names, numbers and times; prompts and answers are not among them.
"""

from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any

import msgspec

from maitred.core.errors import MaitredError
from maitred.core.trace_context import TraceContext

MAX_SPANS = 512
"""A request in thousands of parts, such as one for many embeddings, is told by the first of them."""


class SpanName(StrEnum):
    """Names of the spans of a timeline."""

    RESOLVE = "resolve"
    """Which model the name stands for, and why."""
    PLAN = "plan"
    """The prompt was read and counted, and it was predicted when its turn would come."""
    ADMISSION = "admission"
    """What it may use was taken from its caller's limits."""
    QUEUE = "queue"
    """It waited for a replica."""
    ROUTING = "routing"
    """A replica was chosen."""
    ATTEMPT = "attempt"
    """A replica had it: an engine of ours, or somebody else's server."""
    ENGINE = "engine"
    """The same for one choice, as the engine has seen it. Inside an attempt, and the next three inside it."""
    ENGINE_QUEUE = "engine.queue"
    """It waited for a place in the batch."""
    PREFILL = "prefill"
    """Its prompt was computed, up to its first token."""
    DECODE = "decode"
    """The tokens after the first."""
    ENCODE = "encode"
    """In place of these two, of texts that get vectors: these were computed."""
    SETTLEMENT = "settlement"
    """What it had used was written down and charged."""


class TimelineSpan(msgspec.Struct):
    """One stretch of a request's way."""

    name: SpanName
    began_s: float
    """Monotonic, as all times here."""
    facts: dict[str, Any] = {}
    """Names with their units -> numbers, texts, and lists of these; ``candidates`` is a list of such facts."""
    ended_s: float | None = None
    """None: it had not ended when the request did."""
    error: str = ""
    """The code of what it failed with; empty: it did not."""
    inside: list["TimelineSpan"] = []
    span_id: str = ""
    """Under which others were told of it; empty: they were not."""

    def end(self, now_s: float, error: str = "", **facts: object) -> None:
        """Ends the span. A second time changes nothing."""
        if self.ended_s is None:
            self.ended_s, self.error = now_s, error or self.error
            if facts:
                self.facts |= facts


class RequestTimeline(msgspec.Struct):
    """Timeline of one request: its spans, in the order in which they began or were recorded."""

    spans: list[TimelineSpan] = []
    trace: TraceContext | None = None
    """Where the request itself stands in its trace; None: nobody traces."""
    parent_span_id: str = ""
    """The span of whoever sent it; empty: the trace begins here."""

    @property
    def trace_id(self) -> str:
        """Id of the request's trace; empty: it is not traced."""
        return "" if self.trace is None else self.trace.trace_id

    def begin(self, name: SpanName, now_s: float, **facts: object) -> TimelineSpan:
        """Begins a span; whoever begins one ends it."""
        span = TimelineSpan(name, now_s, facts)
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        return span

    def record(self, name: SpanName, began_s: float, ended_s: float, facts: dict[str, Any]) -> None:
        """Records a span that has ended without an error."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(TimelineSpan(name, began_s, facts, ended_s))

    def fail(self, name: SpanName, began_s: float, ended_s: float, facts: dict[str, Any], why: BaseException) -> None:
        """Records a span that has ended with an error."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(TimelineSpan(name, began_s, facts, ended_s, error_code(why)))

    def mark(self, name: SpanName, now_s: float, **facts: object) -> None:
        """Records an event: a span of no length."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(TimelineSpan(name, now_s, facts, now_s))

    def span(self, name: SpanName, now: Callable[[], float], **facts: object) -> "_SpanScope":
        """Returns a context whose block is the span; an exception that leaves the block is the span's error."""
        span = TimelineSpan(name, now(), facts)
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        return _SpanScope(span, now)

    def running(self, name: SpanName) -> TimelineSpan | None:
        """The latest of that name that has not ended."""
        return next((span for span in reversed(self.spans) if span.name is name and span.ended_s is None), None)

    def context_at(self, span: TimelineSpan, new_span_id: Callable[[], str]) -> TraceContext | None:
        """Returns the trace context within a span, which gets an id of its own; None: nobody traces."""
        if self.trace is None:
            return None
        span.span_id = new_span_id()
        return self.trace.below(span.span_id).accounting()


class _SpanScope(msgspec.Struct):
    """The context that `RequestTimeline.span` returns."""

    span: TimelineSpan
    now: Callable[[], float]

    def __enter__(self) -> TimelineSpan:
        return self.span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        span = self.span
        if error is not None:
            span.end(self.now(), error_code(error))
        elif span.ended_s is None:
            span.ended_s = self.now()


def error_code(error: BaseException) -> str:
    """Returns the code that a span gives an exception."""
    if isinstance(error, MaitredError):
        return error.code
    # What is no `Exception` ends a task from outside.
    return type(error).__name__ if isinstance(error, Exception) else "cancelled"
