"""One request's trace, span by span: from the client over a gateway to another one behind it, and into its engine.

    client --> front (no engine; the model is an upstream) --> back --> engine

Front and back are `maitred serve`, the engine is a process of its own, and the collector reads OTLP's own messages.
"""

import itertools

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message

from maitred.testing.server_process import serving
from tests.support.servers.otlp_collector import collecting

SECRET = "the treasure is under the old oak"
INTERNAL, SERVER, CLIENT = Message.SPAN_KIND_INTERNAL, Message.SPAN_KIND_SERVER, Message.SPAN_KIND_CLIENT
SPAN = "00f067aa0ba902b7"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def collector():
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def back(collector):
    settings = {
        "engine.threads": 1,
        "engine.kv_memory_bytes": 64 << 20,
        "traces.endpoint": collector.url,
        "traces.service_name": "back",
    }
    with serving(settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def front(collector, back, tmp_path_factory):
    file = tmp_path_factory.mktemp("front") / "maitred.yaml"
    file.write_text(f"""
models:
  far:
    upstreams: [{{url: "{back.url}/v1", name: far-away, dialect: vllm, model: maitred-tiny}}]
traces:
  endpoint: {collector.url}
  headers: {{Authorization: {{env: COLLECTORS_KEY}}}}
  ratio: 0
  service_name: front
  content: true
""")
    with serving("--config", str(file), environment={"COLLECTORS_KEY": "Bearer of-the-collector"}) as running:
        yield running


def chat(server, model, *, traceparent=None, tracestate=None, **fields):
    """Asks, as a part of a trace if one is named."""
    headers = {"traceparent": traceparent, "tracestate": tracestate}
    body = {"model": model, "messages": [{"role": "user", "content": f"{SECRET}. " * 3}], "max_tokens": 5, **fields}
    return httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"ignore_eos": True, **body},
        headers={name: value for name, value in headers.items() if value is not None},
        timeout=300,
    )


def new_trace():
    return f"{next(_numbers):032x}"


def named(spans, service):
    """The spans of a service by name, of which each is there once."""
    mine = [span for span in spans if span.service == service]
    assert len({span.name for span in mine}) == len(mine)
    return {span.name: span for span in mine}


def test_a_request_through_a_gateway_and_its_engine(back, collector):
    trace = new_trace()
    reply = chat(back, "maitred-tiny", traceparent=f"00-{trace}-{SPAN}-01", tracestate="vendor=7", temperature=0)
    usage = reply.raise_for_status().json()["usage"]
    collector.wait(lambda: any(span.service == "back-engine" for span in collector.of(trace)))
    gateway, engine = (named(collector.of(trace), service) for service in ("back", "back-engine"))

    root = gateway.pop("chat maitred-tiny")
    assert (root.parent_id, root.kind, root.failed, root.state) == (SPAN, SERVER, False, "vendor=7")
    attributes = root.attributes
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.provider.name"]) == ("chat", "maitred")
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.response.model"]) == ("maitred-tiny", "maitred-tiny")
    assert (attributes["gen_ai.request.max_tokens"], attributes["gen_ai.request.temperature"]) == (5, 0.0)
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert (attributes["http.route"], attributes["http.response.status_code"]) == ("/v1/chat/completions", 200)
    assert attributes["maitred.request_id"] == reply.headers["x-request-id"]
    took_s = (root.ended_ns - root.began_ns) / 1e9
    assert 0 < attributes["gen_ai.response.time_to_first_chunk"] < took_s

    assert {*gateway} == {"resolve", "plan", "admission", "queue", "routing", "attempt", "settlement"}
    assert all(span.parent_id == root.span_id for span in gateway.values())
    assert all(root.began_ns <= span.began_ns <= span.ended_ns <= root.ended_ns for span in gateway.values())
    assert gateway["plan"].attributes["maitred.prompt_tokens"] == usage["prompt_tokens"]
    assert gateway["admission"].attributes["maitred.max_tokens"] == 5
    assert gateway["queue"].attributes["maitred.class"] == "standard"
    assert gateway["routing"].attributes["maitred.replica"] == "local"
    assert (gateway["attempt"].kind, gateway["attempt"].attributes["maitred.replica"]) == (CLIENT, "local")
    assert gateway["settlement"].attributes["maitred.output_tokens"] == 5

    assert {*engine} == {"engine", "engine.queue", "prefill", "decode"}
    top = engine.pop("engine")
    assert (top.parent_id, top.kind) == (gateway["attempt"].span_id, SERVER)
    assert gateway["attempt"].began_ns <= top.began_ns <= top.ended_ns <= gateway["attempt"].ended_ns
    assert all((span.parent_id, span.kind) == (top.span_id, INTERNAL) for span in engine.values())
    waited, prefill, decode = (engine[name] for name in ("engine.queue", "prefill", "decode"))
    assert top.began_ns == waited.began_ns <= waited.ended_ns == prefill.began_ns < prefill.ended_ns
    assert prefill.ended_ns == decode.began_ns < decode.ended_ns == top.ended_ns
    assert prefill.attributes["maitred.prompt_tokens"] == usage["prompt_tokens"]
    assert (prefill.attributes["maitred.steps"], prefill.attributes["maitred.batch"]) == (1, 1)
    assert decode.attributes["maitred.steps"] >= 1
    assert top.attributes["maitred.preemptions"] == 0
    assert top.instance.endswith("/local")


def test_an_upstream_goes_on_with_our_trace(front, back, collector):
    trace = new_trace()
    chat(front, "far", traceparent=f"00-{trace}-{SPAN}-01", tracestate="vendor=7", stream=True).raise_for_status()
    collector.wait(lambda: {span.service for span in collector.of(trace)} == {"front", "back", "back-engine"})
    ours, theirs = (named(collector.of(trace), service) for service in ("front", "back"))
    root, attempt, behind = ours["chat far"], ours["attempt"], theirs["chat maitred-tiny"]
    assert (root.parent_id, attempt.parent_id, behind.parent_id) == (SPAN, root.span_id, attempt.span_id)
    assert (attempt.kind, behind.kind) == (CLIENT, SERVER)
    assert attempt.began_ns <= behind.began_ns <= behind.ended_ns
    # The server ends its span once it has written the end, which may have been read by then.
    assert behind.began_ns <= attempt.ended_ns
    assert behind.state == "maitred=usage,vendor=7"
    accounts = [span.name for span in collector.of(trace) if any("gen_ai.usage" in name for name in span.attributes)]
    assert accounts == ["chat far"], "who adds up a trace counts each token once"
    for name in ("input_tokens", "output_tokens", "cache_read.input_tokens"):
        assert behind.attributes[f"maitred.usage.{name}"] == root.attributes[f"gen_ai.usage.{name}"]
    host, port = back.url.removeprefix("http://").split(":")
    assert attempt.attributes["server.address"] == host
    assert attempt.attributes["server.port"] == int(port)
    assert attempt.attributes["maitred.model"] == "maitred-tiny"
    assert root.attributes["gen_ai.provider.name"] == "vllm"
    assert root.attributes["gen_ai.request.stream"] is True
    assert "engine" not in ours, "what another server's engine does is traced by that server"


def test_what_is_not_sampled_is_not_sampled_behind_us_either(front, collector):
    assert chat(front, "far").status_code == 200
    unsampled, trace = new_trace(), new_trace()
    assert chat(front, "far", traceparent=f"00-{unsampled}-{SPAN}-00").status_code == 200
    assert chat(front, "far", traceparent=f"00-{trace}-{SPAN}-01").status_code == 200
    collector.wait(lambda: {span.service for span in collector.of(trace)} == {"front", "back", "back-engine"})
    asked = {int(span.trace_id, 16) for span in collector.spans}
    assert asked <= set(range(1, int(trace, 16) + 1)), "no trace was begun here"
    assert int(unsampled, 16) not in asked


def test_prompts_and_answers_are_there_where_they_are_switched_on_only(front, collector):
    trace = new_trace()
    text = chat(front, "far", traceparent=f"00-{trace}-{SPAN}-01").json()["choices"][0]["message"]["content"]
    collector.wait(lambda: {span.service for span in collector.of(trace)} == {"front", "back", "back-engine"})
    saying = [span for span in collector.of(trace) if SECRET in str(span.attributes)]
    assert [(span.service, span.name) for span in saying] == [("front", "chat far")]
    assert SECRET in saying[0].attributes["gen_ai.input.messages"]
    assert text.strip()[:10] in saying[0].attributes["gen_ai.output.messages"]


def test_a_refusal_is_a_span_with_its_reason(back, collector):
    trace = new_trace()
    assert chat(back, "unheard-of", traceparent=f"00-{trace}-{SPAN}-01").status_code == 404
    collector.wait(lambda: len(collector.of(trace)) == 2)
    root, resolve = collector.of(trace)
    assert (root.failed, root.attributes["error.type"]) == (False, "model_not_found")
    assert (resolve.failed, resolve.attributes["error.type"]) == (True, "model_not_found")


def test_the_collector_sees_the_credential_and_nobody_else_does(front, collector):
    assert any(headers.get("authorization") == "Bearer of-the-collector" for headers in collector.headers)
    assert b"of-the-collector" not in b"".join(collector.raw)
    assert "of-the-collector" not in front.log.read_text()
