"""Export of spans to a collector by OpenTelemetry's SDK. Imported only when traces are switched on.

The SDK's tracers make spans while something happens; spans of maitred are made afterwards. So each span is passed on as
an ended span, as processors receive it from tracers. Batches, retries and the protocol are the SDK's.
"""

import logging
import os
import socket
import threading
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from maitred import __version__
from maitred.core.trace_context import TraceContext
from maitred.observe.config import TracesConfig
from maitred.observe.spans import Span

_QUEUE_SPANS = 16_384
"""Most spans in the queue, about a dozen for each request; beyond that the oldest are dropped, and it is logged."""
_BATCH_SPANS = 512
_SCHEDULE_DELAY_MS = 1000.0
_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 3.0
"""Longest wait for the remaining spans when the gateway stops."""
_SCOPE = InstrumentationScope("maitred", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NO_STATUS = Status(StatusCode.UNSET)
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}

log = logging.getLogger(__name__)


class Exporter:
    """Exporter of spans. Implements `maitred.observe.traces.SpanSink`. Called from one thread.

    Args:
        config: Settings, with an endpoint.
    """

    def __init__(self, config: TracesConfig) -> None:
        self._service = config.service_name
        self._exporter = OTLPSpanExporter(
            endpoint=config.endpoint,
            headers={name: value.reveal() for name, value in config.headers.items()},
            timeout=_TIMEOUT_S,
            compression=Compression.Gzip,
        )
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_QUEUE_SPANS,
            schedule_delay_millis=_SCHEDULE_DELAY_MS,
            max_export_batch_size=_BATCH_SPANS,
        )
        self._resources: dict[str, Resource] = {}
        """Resource by engine; the key of the gateway itself is empty."""

    def export(self, context: TraceContext, spans: Iterable[Span]) -> None:
        """Queues the spans of one request for export. Implements `SpanSink.export`."""
        trace_id, state = int(context.trace_id, 16), TraceState.from_header([context.state] if context.state else [])

        def span_context(span_id: str) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), False, _SAMPLED, state)

        for span in spans:
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    span_context(span.span_id),
                    span_context(span.parent_id) if span.parent_id else None,
                    self._resource(span.engine),
                    span.attributes,
                    [Event(event.name, event.attributes, event.at_ns) for event in span.events],
                    kind=_KINDS[span.kind],
                    status=Status(StatusCode.ERROR, span.error) if span.error else _NO_STATUS,
                    start_time=span.began_ns,
                    end_time=span.ended_ns,
                    instrumentation_scope=_SCOPE,
                )
            )

    def close(self) -> None:
        """Sends the remaining spans within a short time: a collector that is away must not delay the exit."""
        closing = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if closing.is_alive():
            log.warning("The collector of traces does not answer; the last spans are lost.")
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _resource(self, engine: str) -> Resource:
        """Returns the resource of this gateway or of an engine, each of which is a service of its own."""
        resource = self._resources.get(engine)
        if resource is None:
            instance = f"{socket.gethostname()}:{os.getpid()}"
            attributes = {
                "service.name": f"{self._service}-engine" if engine else self._service,
                "service.version": __version__,
                "service.instance.id": f"{instance}/{engine}" if engine else instance,
            }
            resource = Resource.create({**attributes, **({"maitred.replica": engine} if engine else {})})
            self._resources[engine] = resource
        return resource
