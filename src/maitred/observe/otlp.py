"""Spans on their way to a collector, by OpenTelemetry's SDK. Imported only where traces are switched on.

The SDK's tracers make spans of their own while something happens. Ours have happened, so each is made with its times
and ids as they were: a source of ids is an extension point of the SDK. Batches, retries and the protocol are the SDK's.
"""

import logging
import os
import socket
import threading
from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from maitred import __version__
from maitred.core.trace_context import TraceContext
from maitred.observe.config import TracesConfig
from maitred.observe.spans import Span

_QUEUE_SPANS = 16_384
"""A dozen to a request; more than that many are dropped, the oldest first, and it is logged."""
_BATCH_SPANS = 512
_EVERY_MS = 1000.0
_TIMEOUT_S = 10.0
CLOSE_S = 3.0
"""For what is left when the gateway stops."""
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}

log = logging.getLogger(__name__)


class _Ids(IdGenerator):
    """Gives the ids that it was told to."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class Exporter:
    """Implements `maitred.observe.traces.SpanSink`. One thread calls it.

    Args:
        config: With an endpoint.
    """

    def __init__(self, config: TracesConfig) -> None:
        self._service = config.service_name
        self._ids = _Ids()
        self._exporter = OTLPSpanExporter(
            endpoint=config.endpoint,
            headers={name: value.reveal() for name, value in config.headers.items()},
            timeout=_TIMEOUT_S,
            compression=Compression.Gzip,
        )
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_QUEUE_SPANS,
            schedule_delay_millis=_EVERY_MS,
            max_export_batch_size=_BATCH_SPANS,
        )
        self._tracers: dict[str, Tracer] = {}
        """By engine; that of the gateway itself has no name."""

    def take(self, context: TraceContext, spans: Iterable[Span]) -> None:
        """See `SpanSink`."""
        trace_id, state = int(context.trace_id, 16), TraceState.from_header([context.state] if context.state else [])
        self._ids.trace_id = trace_id
        for span in spans:
            self._ids.span_id = int(span.span_id, 16)
            parent = Context()
            if span.parent_id:
                above = SpanContext(trace_id, int(span.parent_id, 16), True, TraceFlags(TraceFlags.SAMPLED), state)
                parent = set_span_in_context(NonRecordingSpan(above))
            made = self._tracer(span.engine).start_span(
                span.name,
                context=parent,
                kind=_KINDS[span.kind],
                attributes=span.attributes,
                start_time=span.began_ns,
                record_exception=False,
            )
            for event in span.events:
                made.add_event(event.name, event.attributes, event.at_ns)
            if span.error:
                made.set_status(Status(StatusCode.ERROR, span.error))
            made.end(span.ended_ns)

    def close(self) -> None:
        """Sends what is left, for a short while: a collector that is away must not hold up who stops."""
        closing = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            log.warning("The collector of traces does not answer; the last spans are lost.")
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _tracer(self, engine: str) -> Tracer:
        """Of this gateway, or of an engine behind it, each of which is a service of its own."""
        tracer = self._tracers.get(engine)
        if tracer is None:
            instance = f"{socket.gethostname()}:{os.getpid()}"
            attributes = {
                "service.name": f"{self._service}-engine" if engine else self._service,
                "service.version": __version__,
                "service.instance.id": f"{instance}/{engine}" if engine else instance,
            }
            provider = TracerProvider(
                sampler=ALWAYS_ON,
                resource=Resource.create({**attributes, **({"maitred.replica": engine} if engine else {})}),
                id_generator=self._ids,
                shutdown_on_exit=False,
            )
            provider.add_span_processor(self._processor)
            tracer = self._tracers[engine] = provider.get_tracer("maitred", __version__)
        return tracer
