"""A collector of traces: takes what exporters send by OTLP over HTTP, and reads it with the official messages."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Seen(msgspec.Struct):
    """One span that has come."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    began_ns: int
    ended_ns: int
    state: str
    failed: bool
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]


class Collector:
    """What has come.

    Attributes:
        url: Where it is sent.
        spans: In the order of their arrival.
        headers: Of each export, by names in lower case.
        raw: The bytes of each export.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Seen] = []
        self.headers: list[dict[str, str]] = []
        self.raw: list[bytes] = []
        self.status = 200

    def of(self, trace_id: str) -> list[Seen]:
        """The spans of a trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Until it holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, [span.name for span in self.spans]
            time.sleep(0.02)

    def take(self, body: bytes) -> None:
        """An export."""
        self.raw.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    seen = Seen(
                        span.name,
                        about["service.name"],
                        about["service.instance.id"],
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.trace_state,
                        span.status.code == 2,
                        _attributes(span.attributes),
                        [(event.name, _attributes(event.attributes)) for event in span.events],
                    )
                    self.spans.append(seen)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """One on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            collector.take(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
