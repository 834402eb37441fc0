"""Requests of the Responses API become the same chat completion that a client would have written."""

import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.sampling import to_tool_rules
from maitred.wire.responses.decode import decode_input_tokens, decode_responses
from maitred.wire.responses.inbound import custom_tools, to_chat, with_functions_only
from maitred.wire.responses.requests import decode_thoughts, encode_thoughts

FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CUSTOM = {"type": "custom", "name": "patch", "description": "p"}


def decoded(strict=False, **fields):
    body = {"model": "m", "input": "Hi", **fields}
    return decode_responses(
        json.dumps({name: value for name, value in body.items() if value is not ...}).encode(), strict=strict
    )


def chat(**fields):
    return to_chat(decoded(**fields))


def messages(*items, **fields):
    return [msgspec.to_builtins(message) for message in chat(input=[*items], **fields).messages]


def fault(**fields):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value


def test_a_text_is_a_message_of_the_user_behind_the_instructions():
    assert [msgspec.to_builtins(message) for message in chat(instructions="Be kind.").messages] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_a_turn_of_the_assistant_is_one_message():
    history = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}", "status": None},
        {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "So?"}]},
    ]
    assert messages(*history) == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "reasoning": "Look.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": '{"a":1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
        {"role": "user", "content": "So?"},
    ]


def test_calls_of_custom_tools_are_calls_with_a_text():
    history = [
        {"role": "user", "content": "Patch it."},
        {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": "abc"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
    ]
    _, call, result = messages(*history)
    assert call["tool_calls"] == [
        {"id": "call_1", "function": None, "type": "custom", "custom": {"name": "patch", "input": "abc"}}
    ]
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "done"}


def test_signed_thoughts_come_back_as_they_were():
    blocks = [{"type": "thinking", "thinking": "Hm", "signature": "sig"}, {"type": "redacted_thinking", "data": "x"}]
    thought = {"type": "reasoning", "summary": [], "encrypted_content": encode_thoughts(blocks)}
    _, answer, _ = messages(
        {"role": "user", "content": "a"},
        thought,
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    )
    assert answer["thinking_blocks"] == blocks
    assert answer["reasoning_content"] == "Hm"


@pytest.mark.parametrize(
    "text", ["", "gAAAAAB", "maitred1.", "maitred1.!!", "maitred1." + "bnVsbA==", "maitred1.W3sidGhpbmtpbmciOjF9XQ=="]
)
def test_thoughts_of_another_server_are_skipped(text):
    assert decode_thoughts(text) == []
    thought = {"type": "reasoning", "summary": [], "encrypted_content": text}
    assert messages(thought, {"role": "user", "content": "c"}) == [{"role": "user", "content": "c"}]


def test_a_client_that_only_tries_the_connection_sends_no_items():
    assert messages(max_output_tokens=1) == [{"role": "user", "content": ""}]


def test_records_of_a_providers_tools_are_skipped_and_results_for_them_refused():
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    assert decoded(input=[search]).ignored_fields == ("input[0] (web_search_call)",)
    assert messages({"role": "user", "content": "a"}, search, {"role": "user", "content": "b"}) == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    for kind in ("computer_call_output", "text", "no_such_type"):
        error = fault(input=[{"type": kind, "call_id": "c", "output": {}}])
        assert (error.param, kind in error.message) == ("input[0]", True)


def test_tools_are_those_of_a_chat_and_those_of_a_provider_are_named():
    request = decoded(tools=[FUNCTION, {"type": "web_search"}, CUSTOM, {"type": "namespace", "name": "n", "tools": []}])
    assert request.ignored_fields == ("tools[1] (web_search)", "tools[3] (namespace)")
    asked = to_chat(request)
    assert custom_tools(asked) == {"patch"}
    assert asked.tools == [
        {
            "type": "function",
            "function": {key: FUNCTION[key] for key in ("name", "description", "parameters", "strict")},
        },
        {"type": "custom", "custom": {"name": "patch", "description": "p"}},
    ]
    rules = to_tool_rules(with_functions_only(asked))
    assert [tool.name for tool in rules.tools] == ["f", "patch"]


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("auto", "auto", ["f", "patch"]),
        ("required", "required", ["f", "patch"]),
        ("none", "none", ["f", "patch"]),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}, ["f", "patch"]),
        ({"type": "custom", "name": "patch"}, {"type": "custom", "custom": {"name": "patch"}}, ["f", "patch"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            "required",
            ["f"],
        ),
    ],
)
def test_the_choice_among_tools(choice, expected, names):
    asked = chat(tools=[FUNCTION, CUSTOM], tool_choice=choice)
    assert asked.tool_choice == expected
    assert [tool[tool["type"]]["name"] for tool in asked.tools] == names
    to_tool_rules(with_functions_only(asked))


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "other"},
        {"type": "web_search"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
        {"type": "allowed_tools"},
        "any",
    ],
)
def test_a_choice_that_names_no_tool_is_refused(choice):
    assert fault(tools=[FUNCTION], tool_choice=choice).param.startswith("tool_choice")


def test_the_form_of_the_text():
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert chat(text={"format": form}).response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}
    assert chat(text={"format": {"type": "text"}, "verbosity": "low"}).response_format is None
    assert chat(text={"verbosity": "low"}).verbosity == "low"


def test_settings_have_their_names_in_a_chat():
    asked = chat(
        max_output_tokens=9,
        reasoning={"effort": "low", "summary": "auto"},
        temperature=0.5,
        top_logprobs=3,
        include=["message.output_text.logprobs"],
        parallel_tool_calls=False,
        prompt_cache_key="k",
        safety_identifier="s",
        user="u",
        service_tier="flex",
    )
    assert (asked.max_completion_tokens, asked.reasoning_effort, asked.temperature) == (9, "low", 0.5)
    assert (asked.logprobs, asked.top_logprobs, asked.parallel_tool_calls) == (True, 3, False)
    assert (asked.prompt_cache_key, asked.safety_identifier, asked.user) == ("k", "s", "u")
    assert chat(top_logprobs=3).logprobs is None


def test_hints_are_named():
    request = decoded(
        reasoning={"effort": "low", "summary": "auto"},
        client_metadata={"a": "b"},
        prompt_cache_retention="24h",
        stream=True,
        stream_options={"include_obfuscation": True},
        future_field=1,
    )
    assert set(request.ignored_fields) == {
        *("reasoning.summary", "client_metadata", "prompt_cache_retention", "stream_options.include_obfuscation"),
        "future_field",
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ...}, "input"),
        ({"model": ""}, "model"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"include": ["everything"]}, "include[0]"),
        ({"truncation": "middle"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": ""}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}}, "text.format.strict"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].file_data",
        ),
        (
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": 7}]}, "input[0].type"),
        ({"input": [7]}, "input[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": 7}]}, "tools[0].type"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ],
)
def test_what_is_wrong_is_named_in_the_clients_words(fields, param):
    error = fault(**fields)
    assert error.param == param, error.message


def test_strict_servers_refuse_unknown_fields():
    with pytest.raises(InvalidRequest, match="Did you mean temperature"):
        decoded(strict=True, temperatur=1)
    decoded(strict=True, client_metadata={})


def test_tokens_are_counted_of_what_the_model_reads():
    request = decode_input_tokens(json.dumps({"model": "m", "input": "Hi", "tools": [FUNCTION]}).encode(), strict=True)
    asked = to_chat(request)
    assert (len(asked.messages), len(asked.tools)) == (1, 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"])
        | JSON,
        "role": st.sampled_from(["user", "assistant", "tool"]) | JSON,
        "content": st.lists(
            st.fixed_dictionaries(
                {}, optional={"type": st.sampled_from(["input_text", "output_text"]) | JSON, "text": JSON}
            ),
            max_size=2,
        )
        | JSON,
        "id": JSON,
        "call_id": JSON,
        "name": JSON,
        "arguments": JSON,
        "output": JSON,
        "summary": JSON,
        "encrypted_content": JSON,
    },
)


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "input": st.lists(ITEMS, max_size=3) | JSON,
            "tools": st.lists(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "type": st.sampled_from(["function", "custom"]) | JSON,
                        "name": JSON,
                        "format": JSON,
                        "parameters": JSON,
                    },
                ),
                max_size=2,
            )
            | JSON,
            "tool_choice": st.fixed_dictionaries(
                {},
                optional={
                    "type": st.sampled_from(["allowed_tools", "function"]),
                    "mode": JSON,
                    "tools": JSON,
                    "name": JSON,
                },
            )
            | JSON,
            "text": st.fixed_dictionaries({}, optional={"format": JSON, "verbosity": JSON}) | JSON,
            "reasoning": JSON,
            "include": JSON,
            "metadata": JSON,
        },
    )
)
def test_any_body_is_decoded_or_refused_in_words(fields):
    body = json.dumps({"model": "m", "input": "Hi", **fields}).encode()
    with suppress(InvalidRequest):
        asked = to_chat(decode_responses(body, strict=False))
        to_tool_rules(with_functions_only(asked))
        assert asked.messages
