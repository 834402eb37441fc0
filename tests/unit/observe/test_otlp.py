"""Spans as a collector gets them."""

import pytest

from maitred.core.trace_context import TraceContext
from maitred.observe.config import TracesConfig
from maitred.observe.otlp import Exporter
from maitred.observe.spans import Span, SpanEvent
from tests.support.servers.otlp_collector import collecting

TRACE, ROOT, CHILD, ABOVE = "1" * 32, "2" * 16, "3" * 16, "4" * 16
SPANS = [
    Span("chat m", ROOT, ABOVE, "server", 5_000, 9_000, {"a": 1, "b": ["x", "y"], "c": 0.5, "d": True}, [], "bug"),
    Span("engine", CHILD, ROOT, "client", 6_000, 8_000, {}, [SpanEvent("candidate", 6_500, {"e": "f"})], "", "local-1"),
]


@pytest.fixture
def seen():
    with collecting() as collector:
        exporter = Exporter(TracesConfig(endpoint=collector.url, service_name="front"))
        exporter.export(TraceContext(TRACE, ROOT, sampled=False, state="vendor=7"), SPANS)
        exporter.close()
        return {span.name: span for span in collector.spans}


def test_they_are_as_they_were_given(seen):
    root, engine = seen["chat m"], seen["engine"]
    assert (root.trace_id, root.span_id, root.parent_id, root.state) == (TRACE, ROOT, ABOVE, "vendor=7")
    assert (root.began_ns, root.ended_ns, root.kind, root.failed) == (5_000, 9_000, 2, True)
    assert root.attributes == {"a": 1, "b": ["x", "y"], "c": 0.5, "d": True}
    assert (engine.parent_id, engine.kind, engine.failed, engine.events) == (
        ROOT,
        3,
        False,
        [("candidate", {"e": "f"})],
    )


def test_an_engine_is_a_service_of_its_own(seen):
    assert (seen["chat m"].service, seen["engine"].service) == ("front", "front-engine")
    assert seen["engine"].instance == f"{seen['chat m'].instance}/local-1"
