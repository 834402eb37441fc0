"""Which requests are traced, and what becomes of their spans.

Whether a request is traced is decided when it comes, so that servers behind us can be told; its spans are made when it
has ended, all at once, from the record that every request leaves (`maitred.core.timeline`). A request that is not
traced has drawn two random numbers. One that fails is told after all: its record is there.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from maitred.core.answer import Outcome, RequestContext
from maitred.core.clock import Clock
from maitred.core.ids import new_span_id, new_trace_id
from maitred.core.trace_context import TraceContext, context_in, falls_within
from maitred.observe.config import TracesConfig
from maitred.observe.content import TextRecorder, content_attributes
from maitred.observe.spans import Span, make_spans


class SpanSink(Protocol):
    """Takes spans. Must not block and must not raise."""

    def take(self, context: TraceContext, spans: Iterable[Span]) -> None:
        """All of one request, parents first."""
        ...


class TraceObserver:
    """Implements `maitred.core.answer.RequestObserver`, and is asked when a request begins.

    Args:
        config: The settings.
        sink: Takes the spans.
        clock: For wall times.
    """

    def __init__(self, config: TracesConfig, sink: SpanSink, clock: Clock) -> None:
        self._config = config
        self._sink = sink
        self._clock = clock

    def begin(self, context: RequestContext, header: Callable[[bytes], str | None]) -> None:
        """A request has come, and gets its place in a trace.

        Args:
            context: Of the request.
            header: Its headers, by their names.
        """
        timeline = context.timeline
        parent = context_in(header(b"traceparent"), header(b"tracestate")) if self._config.follow else None
        if parent is None:
            trace_id = new_trace_id()
            timeline.trace = TraceContext(trace_id, new_span_id(), falls_within(trace_id, self._config.ratio))
        else:
            timeline.parent_span_id, timeline.trace = parent.span_id, parent.below(new_span_id())
        if self._config.content and timeline.trace.sampled:
            context.listener = TextRecorder()

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Sends the spans of those that are traced."""
        for context in contexts:
            self._send(context)

    def _send(self, context: RequestContext) -> None:
        timeline = context.timeline
        if timeline.trace is None or not (timeline.trace.sampled or self._failed(context)):
            return
        root, *others = make_spans(context, self._clock.wall_s() - self._clock.monotonic_s())
        if isinstance(context.listener, TextRecorder):
            root.attributes.update(content_attributes(context.request, context.listener))
        self._sink.take(timeline.trace, [root, *others])

    def _failed(self, context: RequestContext) -> bool:
        """Whether it failed, and nobody but us has decided that it is not to be traced."""
        return self._config.failures and context.outcome is Outcome.FAILED and not context.timeline.parent_span_id
