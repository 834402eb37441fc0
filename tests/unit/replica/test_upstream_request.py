"""What is sent to a server: in its words, with what it needs, and without what it does not know."""

import msgspec
import pytest

from maitred.core.errors import (
    AccountRefused,
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
from maitred.replica.upstream.config import UpstreamConfig, upstream_faults
from maitred.replica.upstream.dialects import DIALECTS
from maitred.replica.upstream.errors import (
    ReportedError,
    make_response_error,
    parse_error,
    parse_error_body,
    parse_retry_after,
)
from maitred.replica.upstream.external_load import ScrapedLoad, parse_load
from maitred.replica.upstream.probe import parse_context_length
from maitred.replica.upstream.replica import UpstreamReplica
from maitred.replica.upstream.request_body import encode_body
from maitred.replica.upstream.secret_mask import SecretMask
from maitred.wire.openai.decode import decode_chat
from maitred.wire.openai.fields import MESSAGES_THINKING
from maitred.wire.openai.written import merge_deltas, merge_metadata, request_fields

MESSAGES = [{"role": "user", "content": "Hi"}]


def sent(dialect="generic", max_tokens=None, parameters=None, chat=True, thinking_of_messages=None, **fields):
    body = {"model": "ours", "messages": MESSAGES, **fields}
    read = request_fields(decode_chat(msgspec.json.encode(body), strict=True))
    if thinking_of_messages is not None:
        read = {**read, MESSAGES_THINKING: thinking_of_messages}
    request = TextRequest("r", read, 1, max_tokens, chat)
    return msgspec.json.decode(encode_body(request, DIALECTS[dialect], "theirs", parameters or {})[0])


def test_nothing_is_added_but_what_is_ours_to_say():
    assert sent() == {
        "model": "theirs",
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


BEGUN = [*MESSAGES, {"role": "assistant", "content": "The answer"}]


@pytest.mark.parametrize(
    ("dialect", "told"),
    [
        ("vllm", {"continue_final_message": True, "add_generation_prompt": False}),
        ("llamacpp", {"continue_final_message": True, "add_generation_prompt": False}),
        ("sglang", {"continue_final_message": True}),
    ],
)
@pytest.mark.parametrize("asked", [{}, {"add_generation_prompt": False}])
def test_a_message_is_continued_in_the_words_of_the_server(dialect, told, asked):
    body = sent(dialect, messages=BEGUN, continue_final_message=True, **asked)
    assert body["messages"] == BEGUN
    assert {name: value for name, value in body.items() if name in {*told, "add_generation_prompt"}} == told


@pytest.mark.parametrize("dialect", ["generic", "openai", "tgi", "groq"])
def test_a_server_that_continues_no_message_is_not_asked(dialect):
    with pytest.raises(Unsupported, match="continue_final_message is not known to the server") as refusal:
        sent(dialect, messages=BEGUN, continue_final_message=True, add_generation_prompt=False)
    assert refusal.value.param == "continue_final_message"


def test_a_message_comes_as_it_was_written():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c", "function": {"name": "f", "arguments": '{ "a" : 1 }'}, "type": "function"}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    assert sent(messages=messages)["messages"] == messages


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("42", "Error: 42"),
        ("error 42", "error 42"),
        ("", "Error: the tool call failed."),
        ([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}],
         [{"type": "text", "text": "Error: 4"}, {"type": "text", "text": "2"}]),
    ],
)  # fmt: skip
def test_a_failed_tool_call_says_so_in_its_text(content, told):
    result = {"role": "tool", "tool_call_id": "c", "content": content}
    assert sent(messages=[*MESSAGES, {**result, "is_error": True}])["messages"] == [
        *MESSAGES,
        {**result, "content": told},
    ]
    assert sent(messages=[*MESSAGES, {**result, "is_error": False}])["messages"] == [*MESSAGES, result]


THOUGHTS = {
    "reasoning_content": "Hm.",
    "reasoning": "Hm.",
    "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
}


@pytest.mark.parametrize(
    ("dialect", "read"),
    [
        ("generic", {"reasoning_content", "reasoning"}),
        ("vllm", {"reasoning_content", "reasoning"}),
        ("groq", {"reasoning"}),
        ("openai", set()),
        ("azure", set()),
        ("litellm", set(THOUGHTS)),
    ],
)
def test_a_server_gets_the_thoughts_that_it_reads(dialect, read):
    answer = {"role": "assistant", "content": "Yes."}
    in_chunks = [{**block, "index": 0, "position": 0} for block in THOUGHTS["thinking_blocks"]]
    messages = [*MESSAGES, {**answer, **THOUGHTS, "thinking_blocks": in_chunks}, *MESSAGES]
    body = sent(dialect, messages=messages, thinking_of_messages={"type": "adaptive"})
    assert body["messages"][1] == {**answer, **{name: THOUGHTS[name] for name in read}}
    assert ("thinking" in body) == (dialect == "litellm")
    assert MESSAGES_THINKING not in body


def test_an_id_is_no_longer_than_the_server_takes():
    def ids(dialect, call_id):
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        result = {"role": "tool", "content": "1", "tool_call_id": call_id}
        _, called, told = sent(dialect, messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}, result])[
            "messages"
        ]
        return called["tool_calls"][0]["id"], told["tool_call_id"]

    long_id = "chatcmpl-tool-" + "0123456789abcdef" * 2  # vLLM's
    assert ids("generic", long_id) == (long_id, long_id)
    called, told = ids("openai", long_id)
    assert called == told
    assert len(called) == 40
    assert ids("openai", long_id + "x")[0] != called
    assert ids("openai", "call_1") == ("call_1", "call_1")


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
        ({"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}, ReportedError("m", "c", "p", kind="t")),
        ({"error": {"message": "m", "type": "t", "code": 400}}, ReportedError("m", "t", None, 400)),
        ({"error": {"message": "m", "type": "t", "code": "400"}}, ReportedError("m", "t", None, 400)),
        ({"error": "m", "error_type": "validation"}, ReportedError("m", "validation")),
        ({"object": "error", "message": "m", "type": "t", "code": 404}, ReportedError("m", "t", None, 404)),
        ({"type": "error", "error": {"type": "t", "message": "m"}}, ReportedError("m", "t")),
        ({"detail": "m"}, ReportedError("m")),
        ({"detail": [{"msg": "m"}]}, ReportedError('[{"msg":"m"}]')),
        ([{"error": {"code": 400, "message": "m", "status": "S"}}], ReportedError("m", "S", None, 400)),
        ({"errors": [{"message": "m", "code": "c"}]}, ReportedError("m", "c")),
        (
            {"error": {"code": 400, "message": "m", "status": "S", "details": [{"reason": "API_KEY_INVALID"}]}},
            ReportedError("m", "API_KEY_INVALID", None, 400, "S"),
        ),
        (
            {"error": {"code": 429, "message": "m", "status": "S", "details": [{"retryDelay": "34.5s"}]}},
            ReportedError("m", "S", None, 429, retry_after_s=34.5),
        ),
        ({"choices": []}, None),
        ({"error": None, "choices": []}, None),
        ([], None),
        ("text", None),
    ],
)
def test_errors_in_every_shape(fields, error):
    assert parse_error(fields) == error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'[{"error": {"message": "no"}}]', "no"),
        (b'{"message": "no"}', "no"),
        (b'{"title": "no", "status": 400}', "no"),
        (b'{"fault": {"why": "no"}}', '{"fault":{"why":"no"}}'),
        (b'["no", "never"]', '["no","never"]'),
        (b'"no"', "no"),
        (b"42", "42"),
        (b"no", "no"),
        (b"<html><head><title>x</title></head><body><h1>no</h1>\n<p>n&eacute;ver</p></body></html>", "no n\u00e9ver"),
        (b"n\xff", "n\ufffd"),
        (b"[" * 100_000, "[" * 500),
        (b'{"error": {"message": "a\\u001b[31m\\r\\nb"}}', "a [31m b"),
        (b"{}", "The server that runs this model refuses the request with the status 418."),
        (b"", "The server that runs this model refuses the request with the status 418."),
    ],
)
def test_whatever_the_body_is_its_words_are_told(body, message):
    failure = make_response_error("there", 418, parse_error_body(body), None, b"{}")
    assert (type(failure), failure.message) == (InvalidRequest, message)


def kind_of(status):
    if status in (401, 402, 403, 407):
        return AccountRefused
    if status == 404 or status < 400:
        return ReplicaUnavailable
    return ReplicaBusy if status in (408, 409, 425, 429, 503, 529) else InvalidRequest if status < 500 else ReplicaLost


@pytest.mark.parametrize("status", [302, *range(400, 432), 451, 499, 500, 502, 503, 504, 529, 599])
def test_whose_fault_a_status_is(status):
    for error in (ReportedError("Key sk-123 is odd."), ReportedError(), None):
        failure = make_response_error("there", status, error, None, b"{}")
        assert type(failure) is kind_of(status)
        assert ("sk-123" in failure.message) == (
            kind_of(status) is InvalidRequest and error == ReportedError("Key sk-123 is odd.")
        )


ACCOUNT_WORDS = [
    "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade.",
    "You exceeded your current quota, please check your plan and billing details.",
    "Billing hard limit has been reached",
    "You have reached your specified API usage limits. You will regain access on 2026-12-01 at 00:00 UTC.",
    "This organization has been disabled.",
    "API key not valid. Please pass a valid API key.",
    "Incorrect API key provided: sk-proj-0123456789.",
    "Invalid API Key",
    "invalid x-api-key",
    "Insufficient Balance",
    "Not enough credits",
    "Access denied, please make sure your account is in good standing.",
    "Your account org-abcdefgh is not active, please check your billing details on our website.",
    "The api_key provided is invalid",
]


@pytest.mark.parametrize("status", [400, 403, 405, 422, 429])
@pytest.mark.parametrize("words", ACCOUNT_WORDS)
def test_an_account_is_the_operators(status, words, caplog):
    failure = make_response_error("there", status, ReportedError(words, "invalid_request_error"), None, b"{}")
    assert type(failure) is AccountRefused
    assert words[:12] not in failure.message
    assert "sk-proj" not in caplog.text
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize(
    "code", ["insufficient_quota", "invalid_api_key", "billing_error", "InvalidApiKey", "Arrearage", "API_KEY_INVALID"]
)
def test_so_says_its_code(code):
    for error in (ReportedError("Sorry.", code), ReportedError("Sorry.", "x", kind=code)):
        assert type(make_response_error("there", 400, error)) is AccountRefused
        assert type(make_response_error("there", 429, error, 5.0)) is AccountRefused


def test_words_that_the_caller_has_sent_are_the_callers():
    error = ReportedError("messages[0].role: 'credit balance' is none of user, assistant")
    body = b'{"messages": [{"role": "Credit balance"}]}'
    assert type(make_response_error("there", 400, error, None, body)) is InvalidRequest
    assert type(make_response_error("there", 400, error, None, b"{}")) is AccountRefused


def test_a_rate_that_names_its_time_is_no_account():
    error = ReportedError("You exceeded your current quota. Please retry in 34s.", "RESOURCE_EXHAUSTED")
    assert type(make_response_error("there", 429, error, 34.0, b"{}")) is ReplicaBusy


def test_what_looks_like_a_credential_is_not_told():
    error = ReportedError("No model for sk-0123456789abcdef, org-a1b2c3d4e5 or Bearer eyJhbGciOi")
    message = make_response_error("there", 400, error, None, b"{}").message
    assert message == "No model for [masked], [masked] or [masked]"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ReportedError("m", "invalid_request_error"), InvalidRequest),
        (ReportedError("m", "BadRequestError"), InvalidRequest),
        (ReportedError("m", "x", kind="invalid_request_error"), InvalidRequest),
        (ReportedError("m", "rate_limit_error"), ReplicaBusy),
        (ReportedError("m", "overloaded_error"), ReplicaBusy),
        (ReportedError("m", "authentication_error"), AccountRefused),
        (ReportedError("m", "x", status=401), AccountRefused),
        (ReportedError("m"), ReplicaLost),
    ],
)
def test_an_error_in_place_of_an_answer_says_by_itself_what_it_is(error, kind):
    assert type(make_response_error("there", None, error)) is kind


def test_a_credential_is_masked_however_it_is_cut():
    mask = SecretMask(["sk-abc/def-123", "EMPTY"])
    text = b'{"a": "sk-abc/def-123", "b": "sk-abc\\/def-123", "c": "EMPTY sk-abc"}' * 3
    masked = text.replace(b"sk-abc/def-123", b"*" * 14).replace(b"sk-abc\\/def-123", b"*" * 15)
    assert mask.apply(text) == masked
    for size in range(1, len(text)):
        held, shown = b"", b""
        for at in range(0, len(text), size):
            piece, held = mask.split(held + text[at : at + size], body_over=at + size >= len(text))
            shown += piece
        assert (shown, held) == (masked, b"")


def test_a_prompt_that_is_too_long_is_called_so():
    for message in (
        "This model's maximum context length is 8 tokens.",
        "the request exceeds the available context size",
        "max_tokens=5000 cannot be greater than max_model_len=1024.",
        "prompt is too long: 205462 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease one of them",
        "Input is too long for requested model.",
        "The input token count (40000) exceeds the maximum number of tokens allowed (32768).",
        "Input tokens exceed the configured limit of 272000 tokens.",
        "This model's maximum prompt length is 131072 but the request contains 300000 tokens.",
        "Please reduce the length of the messages or completion.",
        "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and 200 `max_new_tokens`",
    ):
        assert type(make_response_error("there", 400, ReportedError(message), None)) is ContextLengthExceeded
    for message in ("max_tokens: 9000 > 8192, which is the maximum allowed number of output tokens", "Unknown tool."):
        assert type(make_response_error("there", 400, ReportedError(message), None)) is InvalidRequest


NOW_S = 1_792_567_660.0
"""2026-10-21T07:27:40Z."""


@pytest.mark.parametrize(
    ("milliseconds", "value", "date", "seconds"),
    [
        ("1500", "9", None, 1.5),
        (None, "9", None, 9),
        ("", "2.5", None, 2.5),
        ("", " 7 ", None, 7),
        ("x", "9", None, 9),
        (None, "7, 7", None, 7),
        (None, "7s", None, 7),
        # a date in its three forms
        (None, "Wed, 21 Oct 2026 07:28:20 GMT", None, 40),
        (None, "Wednesday, 21-Oct-26 07:28:20 GMT", None, 40),
        (None, "Wed Oct 21 07:28:20 2026", None, 40),
        ("nan", "Wed, 21 Oct 2026 07:28:20 GMT", None, 40),
        # by the clock of the server, if it tells its time
        (None, "Wed, 21 Oct 2026 07:28:20 GMT", "Wed, 21 Oct 2026 07:28:10 GMT", 10),
        (None, "Wed, 21 Oct 2026 07:28:20 GMT", "today", 40),
        (None, "Wed, 21 Oct 2026 07:00:00 GMT", None, 0),
        (None, "Wed, 21 Oct 2099 07:00:00 GMT", None, 86_400),
        (None, "99999999999999999999", None, 86_400),
        (None, "nan", None, None),
        (None, "inf", None, None),
        (None, "-5", None, None),
        (None, "soon", None, None),
        (None, None, None, None),
    ],
)
def test_when_to_come_back(milliseconds, value, date, seconds):
    assert parse_retry_after(milliseconds, value, date, NOW_S) == seconds


def test_a_busy_server_says_when_to_come_back():
    assert make_response_error("there", 429, None, 7.5).retry_after_s == 7.5
    assert make_response_error("there", 429, ReportedError(retry_after_s=34.5)).retry_after_s == 34.5
    assert make_response_error("there", 429, None).retry_after_s == 1.0


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
            async with upstream.generate(TextRequest("r", {"messages": MESSAGES, "prompt_embeds": "AA"}, 1)):
                pass
        assert upstream.open_streams == 0
        assert upstream.status.breaker_state is BreakerState.CLOSED, "it is not the server's fault"


@pytest.mark.parametrize(
    ("settings", "api"),
    [
        ({"url": "https://api.openai.com/v1", "dialect": "openai"}, "responses"),
        ({"url": "https://eu.api.openai.com/v1", "dialect": "openai"}, "responses"),
        ({"url": "https://api.openai.com/v1", "dialect": "openai", "responses": False}, None),
        ({"url": "https://api.openai.com/v1"}, None),
        ({"url": "https://notapi.openai.com.example/v1", "dialect": "openai"}, None),
        ({"url": "http://127.0.0.1:9/v1", "dialect": "vllm", "responses": True}, "responses"),
        ({"url": "https://api.anthropic.com/v1", "kind": "anthropic"}, "messages"),
    ],
)
async def test_a_server_gets_requests_as_they_were_written_in_the_api_that_it_speaks(settings, api):
    async with OpenConnections() as connections:
        assert UpstreamReplica(UpstreamConfig(**settings), "ours", connections).native_api == api


def test_a_server_of_messages_has_no_responses():
    upstream = UpstreamConfig(url="https://api.anthropic.com/v1", kind="anthropic", responses=True)
    ((setting, message),) = upstream_faults([upstream], "m.upstreams")
    assert setting == "m.upstreams[0].responses"
    assert "kind `openai`" in message
