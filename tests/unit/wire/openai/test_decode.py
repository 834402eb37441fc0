"""Which request bodies are accepted, and the errors for the others."""
# ruff: noqa: E501 - messages stand on one line, as they are sent

import json

import pytest

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.decode import (
    decode_chat,
    decode_completion,
    decode_detokenize,
    decode_tokenize,
    unsupported_by_engine,
)
from maitred.wire.openai.written import request_fields

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def body(**fields):
    return json.dumps({"model": "tiny", **fields}).encode()


def chat(strict=False, **fields):
    return decode_chat(body(**{"messages": [USER], **fields}), strict=strict)


def completion(strict=False, **fields):
    return decode_completion(body(**{"prompt": "Hi", **fields}), strict=strict)


def message(**fields):
    return {"messages": [{**USER, **fields}]}


CHAT_FAULTS = [
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "chat_template_kwargs.messages is set by the request itself. Remove it, and send messages as a field."),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "The names in chat_template_kwargs must be names of variables, of at most 64 characters; got 'a b'."),
    ({"chat_template_kwargs": {f"v{n}": n for n in range(33)}}, "chat_template_kwargs", "chat_template_kwargs must have at most 32 entries; got 33."),
    ({"chat_template_kwargs": {"v": "x" * 17_000}}, "chat_template_kwargs", "chat_template_kwargs must have at most 16,384 bytes; got 17,008."),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "chat_template_kwargs must be an object or null; got a list."),
    ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, "enable_thinking", "enable_thinking and chat_template_kwargs.enable_thinking differ. Send only one."),
    (message(role="robot"), "messages[0].role", "messages[0].role must be one of system, developer, user, assistant, tool, function; got 'robot'."),
    (message(content=5), "messages[0].content", "messages[0].content must be a string, a list or null; got an integer."),
    (message(content=None), "messages[0].content", "messages[0].content must be a string or a list of text parts; got null."),
    (message(content=[]), "messages[0].content", "messages[0].content must hold at least one part."),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text", "messages[0].content[0].text is required."),
    (
        message(content=[{"type": "text", "text": "a"}, {"type": "hologram"}]),
        "messages[0].content[1]",
        "messages[0].content[1] must have one of the types text, audio_url, file, image_url, input_audio, video_url; got "
        "'hologram'.",
    ),
    (
        message(content=[{"type": "image_url"}]),
        "messages[0].content[0].image_url",
        "messages[0].content[0].image_url is required.",
    ),
    (
        message(role="tool"),
        "messages[0].tool_call_id",
        "messages[0].tool_call_id is required for the role tool: it names the call that this answers.",
    ),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "messages[0].role is required."),
    ({"messages": []}, "messages", "messages must hold at least one message."),
    ({"messages": "Hi"}, "messages", "messages must be a list; got a string."),
    ({"model": ""}, "model", "model must name a model; got an empty string."),
    ({"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens", "max_tokens must be at least 1; got 0."),
    ({"max_tokens": -5}, "max_tokens", "max_tokens must be at least 1; got -5."),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens must be an integer or null; got a number."),
    ({"max_tokens": True}, "max_tokens", "max_tokens must be an integer or null; got true or false."),
    ({"max_tokens": 10**30}, "max_tokens", "max_tokens must be at most 2147483647; got a number beyond 64 bits."),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "max_tokens and max_completion_tokens differ. Send only one."),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1; got 0."),
    ({"priority": 0}, "priority", "priority must be at least 1; got 0."),
    ({"priority": 11}, "priority", "priority must be at most 10; got 11."),
    ({"priority": "high"}, "priority", "priority must be an integer or null; got a string."),
    ({"service_tier": "gold"}, "service_tier", "service_tier must be one of auto, default, scale, priority, flex; got 'gold'."),
    ({"temperature": 2.5}, "temperature", "temperature must be at most 2; got 2.5."),
    ({"temperature": -0.5}, "temperature", "temperature must be at least 0; got -0.5."),
    ({"top_p": 0}, "top_p", "top_p must be greater than 0; got 0."),
    ({"top_k": -2}, "top_k", "top_k must be at least -1; got -2."),
    ({"min_p": 1.5}, "min_p", "min_p must be at most 1; got 1.5."),
    ({"presence_penalty": 3}, "presence_penalty", "presence_penalty must be at most 2; got 3."),
    ({"n": 129}, "n", "n must be at most 128; got 129."),
    ({"seed": 2**63}, "seed", "seed must be at most 9223372036854775807; got 9223372036854775808."),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "min_tokens (4) must not exceed max_tokens (3)."),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "stop_token_ids must have at most 128 entries; got 129."),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "logit_bias must have at most 1024 entries; got 1025."),
    ({"seed": -(2**63) - 1}, "seed", "seed must be at least -9223372036854775808; got a number beyond 64 bits."),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be at least 0.01; got 0."),
    ({"logit_bias": {"x": 1}}, "logit_bias", "The keys of logit_bias must be token ids; got 'x'."),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5 must be at most 100; got 101."),
    ({"logit_bias": {"5": "a"}}, "logit_bias[...]", "logit_bias[...] must be a number; got a string."),
    ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs to be true. Set it, or remove top_logprobs."),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be at most 20; got 21."),
    ({"stop": ""}, "stop", "stop must not be an empty string. Remove it."),
    ({"stop": ["a"] * 17}, "stop", "stop must hold at most 16 strings; got 17."),
    ({"stop": "a" * 1025}, "stop", "A stop string must have at most 1024 characters; got 1025."),
    ({"stop": ["a", 1]}, "stop[1]", "stop[1] must be a string; got an integer."),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids", "stop_token_ids must hold token ids; got -1."),
    ({"stream_options": {}}, "stream_options", "stream_options is only for streams. Set stream to true, or remove it."),
]  # fmt: skip
COMPLETION_FAULTS = [
    ({"prompt": []}, "prompt", "prompt must not be an empty list."),
    ({"prompt": None}, "prompt", "prompt must be a string or a list; got null."),
    ({"prompt": ["a", 1]}, "prompt", "prompt must hold only texts, only token ids, or only lists of token ids."),
    ({"prompt": [1, -2]}, "prompt", "prompt must hold token ids; got -2."),
    ({"prompt": [1] * 1_048_577}, "prompt", "prompt must hold at most 1,048,576 token ids; got 1,048,577."),
    ({"prompt": [[1], []]}, "prompt[1]", "prompt[1] must hold at least one token id."),
    ({"prompt": [[1], [2**31]]}, "prompt[1]", "prompt[1] must hold token ids; got 2147483648."),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]", "prompt[0][1] must be an integer; got a string."),
    ({"prompt": ["a"] * 17, "n": 128}, "prompt", "Prompts times n must be at most 2048; got 2176. Send several requests."),
    ({"min_tokens": 17}, "min_tokens", "min_tokens (17) must not exceed max_tokens (16)."),
    ({"logprobs": 21}, "logprobs", "logprobs must be at most 20; got 21."),
    ({"logprobs": -1}, "logprobs", "logprobs must be at least 0; got -1."),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "prompt_logprobs must be at least -1; got -2."),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "prompt_logprobs are not sent in streams. Set stream to false, or send echo and logprobs to /v1/completions."),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1; got 0. An answer without output needs echo or prompt_logprobs."),
    ({"max_tokens": 0, "echo": False}, "max_tokens", "max_tokens must be at least 1; got 0. An answer without output needs echo or prompt_logprobs."),
    ({"max_tokens": -1, "echo": True}, "max_tokens", "max_tokens must be at least 0; got -1."),
    ({"logprobs": True}, "logprobs", "logprobs must be an integer or null; got true or false."),
    ({"best_of": 3}, "best_of", "best_of must equal n (1); got 3. Remove it."),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "text"), CHAT_FAULTS)
def test_chat_faults_name_field_and_remedy(fields, param, text):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert (caught.value.message, caught.value.param) == (text, param)


MORE_THAN_TEXT = [
    ({"tools": [{}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": [{}]}, "functions"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize(("fields", "need"), MORE_THAN_TEXT)
def test_what_asks_for_more_than_text_is_named(fields, need):
    assert unsupported_by_engine(chat(**fields)) == ((need,), ())


def test_what_asks_for_nothing_is_no_need():
    nothing = chat(tools=[], tool_choice="auto", response_format={"type": "text"}, store=False, modalities=["text"])
    assert unsupported_by_engine(nothing) == ((), ())
    assert unsupported_by_engine(completion(suffix="")) == ((), ())
    assert unsupported_by_engine(completion(suffix="x")) == (("suffix",), ())


@pytest.mark.parametrize(("fields", "param", "text"), COMPLETION_FAULTS)
def test_completion_faults_name_field_and_remedy(fields, param, text):
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert (caught.value.message, caught.value.param) == (text, param)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (rb'{"model":"\ud83d"}', r"The body is not valid JSON: \ud83d (byte 10) is half of a surrogate pair. Cut texts between characters."),
        (rb'{"model":"\\\ud83d\ude00\ud83d and more"}', r"The body is not valid JSON: \ud83d (byte 24) is half of a surrogate pair. Cut texts between characters."),
        (rb'{"model":"and \ude00 more than that"}', r"The body is not valid JSON: \ude00 (byte 14) is half of a surrogate pair. Cut texts between characters."),
        (rb'{"model":"\\ud83d"', "The body is not valid JSON: input data was truncated. Send one JSON object."),
        (rb'{"model":"\ud83d\ud', "The body is not valid JSON: input data was truncated. Send one JSON object."),
        (b"", "The body is not valid JSON: input data was truncated. Send one JSON object."),
        (b"\xef\xbb\xbf{}", "The body begins with a byte order mark. Send it without."),
        ("{}".encode("utf-16"), "The body is not UTF-8. Encode it as UTF-8 JSON."),
        ("{}".encode("utf-16-le"), "The body is not UTF-8. Encode it as UTF-8 JSON."),
        ("{}".encode("utf-16-be"), "The body is not UTF-8. Encode it as UTF-8 JSON."),
        (b"[]", "The body must be an object; got a list."),
        (b'{"model":"m","messages":[]} x', "The body is not valid JSON: trailing characters (byte 29). Send one JSON object."),
        (b'{"model":"\xff"}', "The body is not UTF-8. Encode it as UTF-8 JSON."),
        (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "The body is nested too deeply. Send a flatter one."),
        (b'{"model":"m","messages":[],"n":1e999}', "n is a number too large to represent. Send a smaller one."),
        (b'{"model":"m","messages":[],"n":' + b"9" * 6000 + b"}", "n is a number too large to represent. Send a smaller one."),
    ],
)  # fmt: skip
def test_broken_bodies(data, text):
    with pytest.raises(InvalidRequest) as caught:
        decode_chat(data, strict=False)
    assert caught.value.message == text


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_are_none(constant):
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        decode_chat(
            b'{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":' + constant + b"}", strict=False
        )


def test_what_asks_for_nothing_passes():
    request = chat(
        tools=[],
        tool_choice="none",
        functions=[],
        response_format={"type": "text"},
        modalities=["text"],
        audio=None,
        store=False,
        reasoning_effort="low",
        unheard_of=1,
        max_tokens=7,
        max_completion_tokens=7,
        n=None,
    )
    assert (request.choices, request.token_limit, request.stops) == (1, 7, ())
    assert request.token_limit_param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"max_token": 5}, "max_token", "max_token is not a field of this request. Did you mean max_tokens?"),
        ({"zzz": 5}, "zzz", "zzz is not a field of this request. Remove it."),
        (message(nmae="a"), "messages[0].nmae", "messages[0].nmae is not a field of this request. Did you mean messages[0].name?"),
        (
            {"stream": True, "stream_options": {"included_usage": True}},
            "stream_options.included_usage",
            "stream_options.included_usage is not a field of this request. Did you mean stream_options.include_usage?",
        ),
    ],
)  # fmt: skip
def test_strictness_names_the_closest_field(fields, param, text):
    chat(**fields)
    with pytest.raises(InvalidRequest) as caught:
        chat(strict=True, **fields)
    assert (caught.value.message, caught.value.param) == (text, param)


def test_conversation_is_what_templates_know():
    request = chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
        ]
    )
    assert request.conversation() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_prompts_however_written(prompt, prompts):
    assert completion(prompt=prompt).prompts() == prompts


def test_completions_end_after_16_tokens_by_default():
    assert completion().token_limit == 16


def test_stream_flags():
    request = chat(stream=True, stream_options={"include_usage": True})
    assert request.streams
    assert request.include_usage
    assert not chat().streams


def test_tokenize_takes_a_text_or_a_conversation():
    assert decode_tokenize(body(prompt="a"), strict=True).adds_special_tokens
    request = decode_tokenize(body(messages=[USER]), strict=True)
    assert not request.adds_special_tokens
    assert request.conversation() == [USER]
    for fields in ({}, {"prompt": "a", "messages": [USER]}):
        with pytest.raises(InvalidRequest, match="either prompt or messages"):
            decode_tokenize(body(**fields), strict=True)
    with pytest.raises(InvalidRequest, match="chat_template is for messages"):
        decode_tokenize(body(prompt="a", chat_template="{{ messages }}"), strict=True)


def test_detokenize_takes_token_ids():
    assert decode_detokenize(b'{"tokens":[1,2]}', strict=True).tokens == [1, 2]
    with pytest.raises(InvalidRequest, match="token ids; got -1"):
        decode_detokenize(b'{"tokens":[1,-1]}', strict=True)


@pytest.mark.parametrize("decoded", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, None),
        ({"priority": 9}, 9),
        ({"service_tier": None}, None),
        ({"service_tier": "auto"}, 7),
        ({"service_tier": "default"}, 7),
        ({"service_tier": "scale"}, 7),
        ({"service_tier": "priority"}, 10),
        ({"service_tier": "flex"}, 4),
        ({"service_tier": "flex", "priority": 8}, 8),
    ],
)
def test_a_body_names_its_priority_by_number_or_by_service_tier(decoded, fields, priority):
    assert decoded(strict=True, **fields).requested_priority == priority


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "deep": {"a": [1]}}},
            {"enable_thinking": False, "deep": {"a": [1]}},
        ),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
            {"reasoning_effort": "low"},
        ),
    ],
)
def test_arguments_of_a_chat_template(fields, expected):
    assert chat(**fields).template_arguments() == expected


def test_upstreams_get_template_arguments_under_the_names_that_they_know():
    request = chat(enable_thinking=False, chat_template_kwargs={"style": "short"})
    assert request_fields(request)["chat_template_kwargs"] == {"enable_thinking": False, "style": "short"}
    assert "enable_thinking" not in request_fields(request)


@pytest.mark.parametrize("decoded", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token id"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "must hold token ids; got -1"),
        ({"allowed_token_ids": [1] * 65_537}, "allowed_token_ids", "at most 65536 entries; got 65537"),
        ({"bad_words": ["a", " "]}, "bad_words", "must not hold an empty string"),
        ({"bad_words": ["a"] * 129}, "bad_words", "at most 128 entries; got 129"),
        ({"bad_words": ["a" * 257]}, "bad_words", "at most 256 characters; got 257"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1; got -2"),
        ({"truncation_side": "middle"}, "truncation_side", "one of left, right; got 'middle'"),
    ],
)
def test_fields_about_tokens_have_bounds(decoded, fields, param, words):
    with pytest.raises(InvalidRequest, match=words) as refusal:
        decoded(**fields)
    assert refusal.value.param == param


ASSISTANT = {"role": "assistant", "content": "The answer"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [USER, ASSISTANT], "add_generation_prompt": True}, "exclude each other"),
        ({"messages": [USER]}, "needs a last message of the role assistant"),
        ({"messages": [USER, CALLING]}, "needs a last message of the role assistant"),
        ({"messages": [USER, {"role": "assistant", "refusal": "No."}]}, "needs a last message of the role assistant"),
    ],
)
def test_a_message_that_cannot_be_continued(fields, words):
    with pytest.raises(InvalidRequest, match=words) as refusal:
        decode_chat(body(model="m", continue_final_message=True, **fields), strict=True)
    assert refusal.value.param == "continue_final_message"


def test_usage_is_continuous_only_where_it_is_included():
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert unsupported_by_engine(chat(stream=True, stream_options=options)).ignored == ()
    request = chat(stream=True, stream_options={**options, "include_usage": False})
    assert unsupported_by_engine(request).ignored == ("stream_options.continuous_usage_stats",)
