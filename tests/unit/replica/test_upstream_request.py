"""What is sent to a server: in its words, with what it needs, and without what it does not know."""

import msgspec
import pytest

from maitred.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ReplicaBusy,
    ReplicaLost,
    ReplicaUnavailable,
    Unsupported,
)
from maitred.core.text_replica import TextRequest
from maitred.replica.health.breaker import BreakerState
from maitred.replica.http.pool import OpenConnections
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.dialects import DIALECTS
from maitred.replica.upstream.errors import ReportedError, make_response_error, parse_error, parse_retry_after
from maitred.replica.upstream.external_load import ScrapedLoad, parse_load
from maitred.replica.upstream.probe import parse_context_length
from maitred.replica.upstream.replica import UpstreamReplica
from maitred.replica.upstream.request_body import encode_body
from maitred.wire.openai.decode import decode_chat
from maitred.wire.openai.written import merge_deltas, merge_metadata, request_fields

MESSAGES = [{"role": "user", "content": "Hi"}]


def sent(dialect="generic", max_tokens=None, parameters=None, chat=True, **fields):
    body = {"model": "ours", "messages": MESSAGES, **fields}
    request = TextRequest("r", request_fields(decode_chat(msgspec.json.encode(body), strict=True)), 1, max_tokens, chat)
    return msgspec.json.decode(encode_body(request, DIALECTS[dialect], "theirs", parameters or {}))


def test_nothing_is_added_but_what_is_ours_to_say():
    assert sent() == {
        "model": "theirs",
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_message_comes_as_it_was_written():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c", "function": {"name": "f", "arguments": '{ "a" : 1 }'}, "type": "function"}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    assert sent(messages=messages)["messages"] == messages


def test_the_limit_has_the_name_that_the_server_knows():
    assert sent(max_tokens=5)["max_tokens"] == 5
    openai = sent("openai", max_tokens=5)
    assert (openai["max_completion_tokens"], "max_tokens" in openai) == (5, False)
    assert sent("openai", max_tokens=5, chat=False)["max_tokens"] == 5
    # Neither what the caller wrote nor how: what was granted.
    assert sent(max_tokens=5, max_completion_tokens=9) == sent(max_tokens=5)


def test_what_is_ours_is_not_passed_on():
    body = sent(priority=3, service_tier="flex", stream=True, stream_options={"include_usage": False})
    assert body == sent()


def test_parameters_fill_in_what_the_caller_left_out():
    parameters = {"temperature": 0.5, "chat_template_kwargs": {"enable_thinking": False}}
    body = sent(parameters=parameters, temperature=1)
    assert (body["temperature"], body["chat_template_kwargs"]) == (1, {"enable_thinking": False})


def test_what_would_go_unheard_is_refused_and_hints_are_not():
    with pytest.raises(InvalidRequest, match="top_k is not known to the server"):
        sent("openai", top_k=5)
    with pytest.raises(InvalidRequest, match="n is not known"):
        sent("ollama", n=2)
    assert "n" not in sent("ollama", n=1)
    assert "user" not in sent("ollama", user="u")
    assert sent("vllm", top_k=5)["top_k"] == 5
    assert sent("vllm", structured_outputs={"choice": ["a"]})["structured_outputs"] == {"choice": ["a"]}
    with pytest.raises(InvalidRequest, match="guided_choice is not known"):
        sent("vllm", guided_choice=["a"])
    with pytest.raises(InvalidRequest, match="echo is not known"):
        encode_body(TextRequest("r", {"prompt": "a", "echo": True}, 1, chat=False), DIALECTS["llamacpp"], "theirs", {})


def test_usage_comes_with_every_chunk_where_it_can():
    assert sent("vllm")["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}, ReportedError("m", "c", "p")),
        ({"error": {"message": "m", "type": "t", "code": 400}}, ReportedError("m", "t", None, 400)),
        ({"error": "m", "error_type": "validation"}, ReportedError("m", "validation")),
        ({"object": "error", "message": "m", "type": "t", "code": 404}, ReportedError("m", "t", None, 404)),
        ({"detail": "m"}, ReportedError("m")),
        ({"detail": [{"msg": "m"}]}, ReportedError('[{"msg":"m"}]')),
        ({"choices": []}, None),
        ({"error": None, "choices": []}, None),
        ([], None),
        ("text", None),
    ],
)
def test_errors_in_every_shape(fields, error):
    assert parse_error(fields) == error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (422, InvalidRequest),
        (401, ReplicaUnavailable),
        (403, ReplicaUnavailable),
        (404, ReplicaUnavailable),
        (302, ReplicaUnavailable),
        (429, ReplicaBusy),
        (503, ReplicaBusy),
        (500, ReplicaLost),
    ],
)
def test_whose_fault_a_status_is(status, kind):
    failure = make_response_error("there", status, ReportedError("Key sk-123 has no money."), None)
    assert type(failure) is kind
    assert ("sk-123" in failure.message) == (kind is InvalidRequest)


def test_a_prompt_that_is_too_long_is_called_so():
    for message in (
        "This model's maximum context length is 8 tokens.",
        "the request exceeds the available context size",
        "max_tokens=5000 cannot be greater than max_model_len=1024.",
    ):
        assert type(make_response_error("there", 400, ReportedError(message), None)) is ContextLengthExceeded


def test_when_to_come_back():
    assert make_response_error("there", 429, None, 7.5).retry_after_s == 7.5
    assert parse_retry_after("1500", "9") == 1.5
    assert parse_retry_after(None, "9") == 9
    assert parse_retry_after("nan", "Wed, 21 Oct 2026 07:28:00 GMT") is None
    assert parse_retry_after("-5", None) is None


def test_the_window_in_a_list_of_models():
    entries = [{"id": "a", "max_model_len": 8}, {"id": "b", "context_window": 16}, {"id": "c"}]
    assert [parse_context_length({"data": entries}, name) for name in "abcd"] == [8, 16, None, None]
    assert parse_context_length(entries, "a") == 8
    assert parse_context_length({"data": [{"id": "a", "max_model_len": "8"}, None]}, "a") is None
    assert parse_context_length("nothing", "a") is None
    assert parse_context_length({"data": [{"id": "a", "meta": {"n_ctx": 1024, "n_ctx_train": 2048}}]}, "a") == 1024
    assert parse_context_length({"data": [{"id": "a", "meta": None}]}, "a") is None


def test_tool_calls_are_put_together_from_their_pieces():
    deltas = [
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}], "reasoning": "so"},
        {"reasoning": " be it"},
    ]
    assert merge_deltas(deltas) == {
        "reasoning": "so be it",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_members_of_deltas_are_joined_by_what_they_are():
    image = {"type": "image_url", "image_url": {"url": "u"}, "index": 0}
    deltas = [
        {
            "reasoning_details": [{"type": "reasoning.text", "text": "so", "index": 0, "signature": ""}],
            "phase": "final",
        },
        {"reasoning_details": [{"type": "reasoning.text", "text": "so", "index": 0}], "phase": "final"},
        {"reasoning_details": [{"type": "reasoning.text", "index": 0, "signature": "S"}], "phase": "final"},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "AA==", "index": 0}], "score": 1},
        # Two images that have the same number are two images.
        {"images": [image], "annotations": [{"url": "a"}], "refusal": "ha", "score": 2},
        {"images": [{**image, "image_url": {"url": "v"}}], "refusal": "ha", "odd": {"a": [1]}},
        # The whole list so far
        {"annotations": [{"url": "a"}, {"url": "b"}], "odd": {"a": [2], "b": None}},
        {"audio": {"id": "x", "data": "AA==", "transcript": "ha"}},
        {"audio": {"id": "x", "data": "AQ==", "transcript": "ha", "expires_at": 3}},
    ]
    assert merge_deltas(deltas) == {
        "reasoning_details": [
            {"type": "reasoning.text", "text": "soso", "index": 0, "signature": "S"},
            {"type": "reasoning.encrypted", "data": "AA==", "index": 0},
        ],
        "phase": "final",
        "score": 2,
        "images": [image, {**image, "image_url": {"url": "v"}}],
        "annotations": [{"url": "a"}, {"url": "b"}],
        "refusal": "haha",
        "odd": {"a": [1, 2], "b": None},
        "audio": {"id": "x", "data": "AAE=", "transcript": "haha", "expires_at": 3},
    }


def test_metadata_of_chunks_becomes_that_of_the_whole():
    chunks = [
        {"fingerprint": "a", "filters": {"hate": {"filtered": False}}, "token_ids": [1], "citations": ["a"]},
        {"fingerprint": "b", "filters": {"hate": {"severity": "safe"}}, "token_ids": [2, 3], "citations": ["a", "b"]},
        {"logprobs": {"refusal": [{"token": "a"}]}},
        {"logprobs": {"refusal": [{"token": "b"}]}},
    ]
    assert merge_metadata(chunks) == {
        "fingerprint": "b",
        "filters": {"hate": {"filtered": False, "severity": "safe"}},
        "token_ids": [1, 2, 3],
        "citations": ["a", "b"],
        "logprobs": {"refusal": [{"token": "a"}, {"token": "b"}]},
    }


def test_load_is_read_from_a_page_of_metrics():
    page = """
# HELP vllm:num_requests_running Number of requests currently running on GPU.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0 1700000000000
vllm:num_requests_running_total{engine="0"} 99
vllm:num_requests_waiting{model_name="a } b"} 7
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:gpu_cache_usage_perc NaN
"""
    gauges = DIALECTS["vllm"].load_gauges
    assert parse_load(page, gauges) == ScrapedLoad(5.0, 7.0, 0.5)
    assert parse_load("vllm:num_requests_running\nvllm:num_requests_waiting oops", gauges) == ScrapedLoad()


async def test_what_cannot_be_written_for_a_server_leaves_nothing_open_there():
    async with OpenConnections() as connections:
        upstream = UpstreamReplica(UpstreamConfig(url="http://127.0.0.1:9/v1"), "ours", connections)
        upstream.status.mark_up()
        with pytest.raises(Unsupported):
            async with upstream.generate(TextRequest("r", {"messages": MESSAGES, "sound": True}, 1)):
                pass
        assert upstream.open_streams == 0
        assert upstream.status.breaker_state is BreakerState.CLOSED, "it is not the server's fault"
