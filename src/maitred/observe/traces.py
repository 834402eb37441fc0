"""Tracing: which requests are traced, and the export of their spans.

The decision to trace a request is made at its arrival, so that upstream servers can be told; its spans are made all at
once at its end, from the timeline that every request has (`maitred.core.timeline`). A request without a trace costs two
random numbers. One that fails can still be traced, because its timeline is there.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.context import Outcome, RequestContext
from maitred.core.ids import new_span_id, new_trace_id
from maitred.core.trace_context import TraceContext, context_in, falls_within
from maitred.observe.config import TracesConfig
from maitred.observe.content import TextRecorder, content_attributes
from maitred.observe.spans import Span, make_spans


class SpanSink(Protocol):
    """Receiver of spans. Must not block and must not raise.

    A Protocol, because OpenTelemetry is an optional package.
    """

    def export(self, context: TraceContext, spans: Iterable[Span]) -> None:
        """Takes all spans of one request, parents first."""
        ...


class TraceObserver:
    """Observer that traces requests. Implements `maitred.core.context.RequestObserver`.

    Args:
        config: The settings.
        sink: Receiver of the spans.
        clock: Clock for wall times.
    """

    def __init__(self, config: TracesConfig, sink: SpanSink, clock: Clock) -> None:
        self._config = config
        self._sink = sink
        self._clock = clock

    def start_trace(self, context: RequestContext, get_header: Callable[[bytes], str | None]) -> None:
        """Gives a new request its place in a trace.

        Args:
            context: Context of the request.
            get_header: Returns a request header by its name.
        """
        timeline = context.timeline
        parent = context_in(get_header(b"traceparent"), get_header(b"tracestate")) if self._config.follow else None
        if parent is None:
            trace_id = new_trace_id()
            timeline.trace = TraceContext(trace_id, new_span_id(), falls_within(trace_id, self._config.ratio))
        else:
            timeline.parent_span_id, timeline.trace = parent.span_id, parent.below(new_span_id())
        if self._config.content and timeline.trace.sampled:
            context.listener = TextRecorder()

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Sends the spans of the ended requests that are traced."""
        for context in contexts:
            self._export(context)

    def _export(self, context: RequestContext) -> None:
        timeline = context.timeline
        if timeline.trace is None or not (timeline.trace.sampled or self._exports_failure(context)):
            return
        root, *others = make_spans(context, self._clock.wall_s() - self._clock.monotonic_s())
        if isinstance(context.listener, TextRecorder):
            root.attributes.update(content_attributes(context.request, context.listener))
        self._sink.export(timeline.trace, [root, *others])

    def _exports_failure(self, context: RequestContext) -> bool:
        """Whether the request failed and its client has not decided about its trace."""
        return self._config.failures and context.outcome is Outcome.FAILED and not context.timeline.parent_span_id
