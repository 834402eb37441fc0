"""Whatever bytes come in, a request body is a struct that keeps the rules, or InvalidRequest. Nothing else."""

import json
import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.decode import decode_chat, decode_completion, decode_detokenize, decode_tokenize
from maitred.wire.openai.requests import (
    CacheFields,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    StreamOptions,
    TokenizeRequest,
)
from maitred.wire.openai.sampling import to_sampling_params
from maitred.wire.openai.written import request_fields

DECODERS = {
    ChatRequest: decode_chat,
    CompletionRequest: decode_completion,
    TokenizeRequest: decode_tokenize,
    DetokenizeRequest: decode_detokenize,
}
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 1e308, 5e-324])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from(["user", "text", "none"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "5", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot"])
part = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]) | values}, optional={"text": values})
content = st.text(max_size=8) | st.lists(part, max_size=2) | values
message = st.fixed_dictionaries(
    {"role": roles | values, "content": content},
    optional={name: values for name in Message.__struct_fields__ if name not in ("role", "content")},
)
known = {
    "model": st.text(max_size=3),
    "messages": st.lists(message, min_size=1, max_size=2),
    "prompt": st.text(max_size=4) | st.lists(st.integers(0, 9), max_size=3),
    "tokens": st.lists(st.integers(), max_size=3),
    "cache": st.dictionaries(st.sampled_from(CacheFields.__struct_encode_fields__), values),
    "stream_options": st.dictionaries(st.sampled_from(StreamOptions.__struct_fields__), values),
}


def bodies(kind):
    """Requests with sound required fields and anything in a few of the others."""
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    fields = st.lists(st.sampled_from(kind.__struct_fields__), max_size=4, unique=True)
    return fields.flatmap(
        lambda names: st.fixed_dictionaries(
            {name: known.get(name, values) for name in required}
            | {name: known.get(name, values) | values for name in names}
        )
    ).map(lambda body: json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def decoded(kind, body, strict):
    try:
        return DECODERS[kind](body, strict=strict)
    except InvalidRequest as error:
        check_sendable(error)
        return None


def sent_of(value):
    """What was sent, field by field."""
    if isinstance(value, msgspec.Struct):
        fields = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        pairs = ((written, getattr(value, name)) for name, written in fields)
        return {name: sent_of(entry) for name, entry in pairs if entry is not None and entry is not msgspec.UNSET}
    return [sent_of(entry) for entry in value] if isinstance(value, list) else value


def check_sendable(error):
    assert error.message.endswith((".", "?"))
    assert len(error.message) < 500
    # No stray surrogates.
    json.dumps([error.message, error.param], ensure_ascii=False).encode()


@pytest.mark.parametrize("kind", DECODERS)
@given(body=st.binary(max_size=64), strict=st.booleans())
def test_any_bytes(kind, body, strict):
    decoded(kind, body, strict)


def without_nulls(value):
    """As if the members that are null had been left out: of messages, they say the same."""
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), strict=st.booleans())
def test_any_fields(kind, data, strict):
    check_fields(kind, data.draw(bodies(kind)), strict)


@given(body=bodies(ChatRequest), strict=st.booleans())
@example(body=b'{"model":"m","messages":[{"role":"user","content":"x","name":null}]}', strict=True)
@example(
    body=b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}],"tool_calls":null}]}',
    strict=True,
)
@example(
    body=b'{"model":"m","messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,"refusal":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}]}]}',
    strict=True,
)
def test_members_of_messages_that_are_null_are_not_passed_on(body, strict):
    check_fields(ChatRequest, body, strict)
    request = decoded(ChatRequest, body, strict)
    for message in () if request is None else request_fields(request)["messages"]:
        assert [name for name, value in message.items() if value is None] in ([], ["content"])


def check_fields(kind, body, strict):
    request = decoded(kind, body, strict)
    if isinstance(request, ChatRequest | CompletionRequest):
        params = to_sampling_params(request, max_tokens=1, seed=0)
        assert 0 <= params.temperature <= 2
        assert 0 < params.top_p <= 1
        assert 1 <= params.n <= 128
        assert all(math.isfinite(bias) for bias in params.logit_bias.values())
        # The engine gets it over the wire.
        msgspec.msgpack.encode(params)
        assert all(request.stops)
        sent, known_fields = {**request.sent}, sent_of(request)
        for name in ("messages", "cache"):  # their members may be null
            assert without_nulls(sent.pop(name, [])) == without_nulls(known_fields.pop(name, []))
        assert sent == known_fields
    if isinstance(request, ChatRequest | TokenizeRequest):
        for turn in request.conversation():
            calls = turn.get("tool_calls") or turn.get("function_call")
            assert isinstance(turn["content"], str) or (calls and turn["content"] is None)
    if isinstance(request, CompletionRequest):
        assert request.prompts()


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), strict=st.booleans())
def test_damaged_bodies(kind, data, strict):
    body = bytearray(data.draw(bodies(kind)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    decoded(kind, bytes(body), strict)


@given(depth=st.integers(1, 3000), kind=st.sampled_from(["x", "metadata", "tools", "messages", "prompt", "prediction"]))
def test_any_depth(depth, kind):
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        nested = opening * depth + b"1" + closing * depth
        for request in DECODERS:
            decoded(request, b'{"model":"m","prompt":"a","tokens":[],"' + kind.encode() + b'":' + nested + b"}", True)
