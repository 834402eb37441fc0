"""Timeline of one request: its spans in order, with times.

Each stage records a span when it handles the request: the action, its start and end, and the facts behind its decision.
The timeline is read only after the request has ended. Both the spans of the trace and the output of `maitred explain`
come from it, so the two always agree.

A timeline holds only names, numbers and times, and never prompts or answers.
"""

from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any

import msgspec

from maitred.core.errors import MaitredError
from maitred.core.trace_context import TraceContext

MAX_SPANS = 512
"""Maximum number of spans; a request with thousands of parts keeps only the first spans."""


class SpanName(StrEnum):
    """Names of the spans of a timeline."""

    RESOLVE = "resolve"
    """The model name was resolved, with the reason."""
    PLAN = "plan"
    """The prompt was read and counted, and the time of its dispatch was predicted."""
    ADMISSION = "admission"
    """The reservation was taken from the caller's limits."""
    QUEUE = "queue"
    """The request waited in the queue for a replica."""
    ROUTING = "routing"
    """A replica was chosen for the request."""
    ATTEMPT = "attempt"
    """A replica worked on the request: our engine or an external server."""
    ENGINE = "engine"
    """One choice in the engine, as the engine reports it. The span is inside an attempt and contains the next three."""
    ENGINE_QUEUE = "engine.queue"
    """The choice waited for a slot in the batch."""
    PREFILL = "prefill"
    """The prompt was computed, up to the first token."""
    DECODE = "decode"
    """The tokens after the first one were computed."""
    ENCODE = "encode"
    """The embeddings were computed; this span replaces prefill and decode."""
    SETTLEMENT = "settlement"
    """The usage was written to the ledger and charged."""


class TimelineSpan(msgspec.Struct):
    """One span of a request's timeline."""

    name: SpanName
    began_s: float
    """Start time on the monotonic clock, like all times in this class."""
    facts: dict[str, Any] = {}
    """Names with units -> numbers, texts or lists of them; ``candidates`` is a list of such facts."""
    ended_s: float | None = None
    """End time; None: the span was open when the request ended."""
    error: str = ""
    """Error code of the span; empty: no error."""
    inside: list["TimelineSpan"] = []
    span_id: str = ""
    """Span id that was sent to other processes; empty: none was sent."""

    def end(self, now_s: float, error: str = "", **facts: object) -> None:
        """Ends the span with an optional error. A second call changes nothing."""
        if self.ended_s is None:
            self.ended_s, self.error = now_s, error or self.error
            if facts:
                self.facts |= facts


class RequestTimeline(msgspec.Struct):
    """Timeline of one request: its spans, in the order in which they began or were recorded."""

    spans: list[TimelineSpan] = []
    trace: TraceContext | None = None
    """Trace context of the request; None: the request is not traced."""
    parent_span_id: str = ""
    """Span id of the sender; empty: the trace begins here."""

    @property
    def trace_id(self) -> str:
        """Id of the request's trace; empty: the request is not traced."""
        return "" if self.trace is None else self.trace.trace_id

    def begin(self, name: SpanName, now_s: float, **facts: object) -> TimelineSpan:
        """Begins a span; the caller must end it."""
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
            self.spans.append(TimelineSpan(name, began_s, facts, ended_s, error=error_code(why)))

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
        """Returns the latest open span with that name."""
        for span in reversed(self.spans):
            if span.name is name and span.ended_s is None:
                return span
        return None

    def context_at(self, span: TimelineSpan, new_span_id: Callable[[], str]) -> TraceContext | None:
        """Returns the trace context within a span, which gets its own span id; None: no trace."""
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
    # A `BaseException` that is not an `Exception` cancels the task from outside.
    return type(error).__name__ if isinstance(error, Exception) else "cancelled"
