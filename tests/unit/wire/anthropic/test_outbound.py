"""Chat completions as Messages requests."""

import json
import re

import msgspec
import pytest

from maitred.core.errors import InvalidRequest
from maitred.wire.anthropic.outbound import to_messages
from maitred.wire.anthropic.requests import encode_request
from maitred.wire.openai.requests import ChatRequest

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}


def written(messages, **fields):
    """The body that is sent, as the server reads it."""
    chat = msgspec.convert({"model": "m", "messages": messages, **fields}, ChatRequest)
    return json.loads(encode_request(to_messages(chat, model="claude", max_tokens=9)))


def test_the_least_request():
    assert written([USER]) == {"model": "claude", "max_tokens": 9, "messages": [USER], "stream": True}


def test_what_both_know_is_passed_on():
    body = written([USER], temperature=0.5, top_p=0.9, top_k=4, stop="END", user="u1")
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "stop_sequences", "metadata")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u1"},
    }
    assert written([USER], temperature=1.7)["temperature"] == 1
    assert "top_k" not in written([USER], top_k=-1)


def test_instructions_stand_apart_and_turns_alternate():
    body = written(
        [
            {"role": "system", "content": "One."},
            {"role": "developer", "content": "Two."},
            USER,
            {"role": "user", "content": [{"type": "text", "text": "there"}, {"type": "text", "text": ""}]},
            {"role": "assistant", "content": "Yes?"},
            USER,
        ]
    )
    assert body["system"] == [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert body["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Yes?"},
        USER,
    ]


def test_tools_their_calls_and_their_results():
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
    bare = {"type": "function", "function": {"name": "wait"}}
    body = written(
        [
            USER,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "waves"},
            {"role": "tool", "tool_call_id": "c2", "content": ""},
            {"role": "user", "content": "And?"},
        ],
        tools=[tool, bare],
    )
    assert body["tools"] == [
        {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}},
        {"name": "wait", "input_schema": {"type": "object", "properties": {}}},
    ]
    used = {"type": "tool_use", "name": "look", "input": {"at": "sea"}}
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me see."}, {**used, "id": "c1"}, {**used, "id": "c2"}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "waves"},
                {"type": "tool_result", "tool_use_id": "c2"},
                {"type": "text", "text": "And?"},
            ],
        },
    ]


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"tool_choice": "auto"}, {"type": "auto"}),
        ({"tool_choice": "none"}, {"type": "none"}),
        ({"tool_choice": "required"}, {"type": "any"}),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, {"type": "tool", "name": "look"}),
        ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"type": "any", "disable_parallel_tool_use": True},
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
            {"type": "any"},
        ),
    ],
)
def test_which_tool_is_to_be_called(asked, sent):
    tools = [{"type": "function", "function": {"name": "look"}}]
    if isinstance(chosen := asked.get("tool_choice"), dict) and "allowed_tools" in chosen:
        chosen["allowed_tools"]["tools"] = tools
    assert written([USER], tools=tools, **asked)["tool_choice"] == sent
    assert "tool_choice" not in written([USER], **asked)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_the_allowed_tools_are_declared(mode):
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "wait", "run")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tools[2], tools[0]]}}
    body = written([USER], tools=tools, tool_choice=choice)
    assert [tool["name"] for tool in body["tools"]] == ["look", "run"]
    assert body["tool_choice"] == {"type": {"auto": "auto", "required": "any"}[mode]}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {"type": "object", "properties": {}}),
        (None, {"type": "object", "properties": {}}),
        ({"properties": {"x": {}}}, {"type": "object", "properties": {"x": {}}}),
        ({"type": None, "required": []}, {"type": "object", "required": []}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, {"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {}}}),
        ({"type": "object", "additionalProperties": False}, {"type": "object", "additionalProperties": False}),
    ],
)
def test_the_schema_of_a_tool_is_that_of_an_object(given, sent):
    body = written([USER], tools=[{"type": "function", "function": {"name": "f", "parameters": given}}])
    assert body["tools"][0]["input_schema"] == sent


def ids_of(messages):
    """The ids of calls and of results in what is sent, in their order."""
    blocks = [
        block
        for turn in written(messages)["messages"]
        if isinstance(turn["content"], list)
        for block in turn["content"]
    ]
    return (
        [block["id"] for block in blocks if block["type"] == "tool_use"],
        [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"],
    )


def round_of(*call_ids):
    calls = [{**CALL, "id": call_id} for call_id in call_ids]
    results = [{"role": "tool", "tool_call_id": call_id, "content": "waves"} for call_id in call_ids]
    return [{"role": "assistant", "tool_calls": calls}, *results]


@pytest.mark.parametrize(
    "rounds",
    [
        [["functions.look:0"], ["functions.look:1"]],
        [["call_0"], ["call_0"], ["call_0"]],
        [["", ""], [""]],
        [["a|b", "a_b"]],
        [["x" * 200]],
        [["ü"], ["ü"]],
    ],
)
def test_ids_of_other_servers_become_ids_that_messages_accepts(rounds):
    messages = [USER, *(message for ids in rounds for message in round_of(*ids))]
    calls, results = ids_of(messages)
    assert calls == results
    assert len(set(calls)) == len(calls) == sum(map(len, rounds))
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", call_id) for call_id in calls)
    # A longer conversation begins with the same ids: the server's prefix cache knows them.
    assert ids_of([*messages, *round_of("more")])[0][: len(calls)] == calls


@pytest.mark.parametrize("strict", [True, None])
def test_a_json_schema_for_the_answer(strict):
    schema = {"type": "object", "properties": {}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": strict}}
    body = written([USER], response_format=asked)
    assert body["output_config"] == {"format": {"type": "json_schema", "schema": schema}}
    assert "output_config" not in written([USER], response_format={"type": "text"})


def test_white_space_around_calls_is_no_text():
    called = {"role": "assistant", "content": "\n\n", "tool_calls": [CALL]}
    assert [block["type"] for block in written([USER, called])["messages"][1]["content"]] == ["tool_use"]
    parts = [{"type": "text", "text": " "}, {"type": "text", "text": " See."}]
    assert written([USER, {"role": "assistant", "content": parts}, USER])["messages"][1]["content"] == " See."


def test_signed_thoughts_come_first_and_those_of_others_are_left_out():
    blocks = [
        {"index": 0, "type": "thinking", "thinking": "Hm.", "signature": "SIG"},
        {"index": 1, "type": "redacted_thinking", "data": "XX"},
        {"type": "thinking", "thinking": "unsigned"},
        {"type": "weather"},
    ]
    answer = {"role": "assistant", "content": "See.", "reasoning_content": "Hm.", "thinking_blocks": blocks}
    assert written([USER, {**answer, "tool_calls": [CALL]}])["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "SIG"},
        {"type": "redacted_thinking", "data": "XX"},
        {"type": "text", "text": "See."},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "sea"}},
    ]


def test_an_id_that_messages_accepts_stays():
    assert ids_of([USER, *round_of("toolu_01", "call-2")]) == (["toolu_01", "call-2"], ["toolu_01", "call-2"])


def test_a_result_may_come_out_of_order():
    called, first, second = round_of("b.1", "b.2")
    calls, results = ids_of([USER, called, second, first])
    assert results == calls[::-1]


def test_a_function_call_of_the_older_form_and_its_result():
    function = CALL["function"]
    body = written(
        [
            USER,
            {"role": "assistant", "content": None, "function_call": function},
            {"role": "function", "name": "look", "content": "waves"},
            {"role": "assistant", "content": None, "function_call": function},
            {"role": "function", "name": "look", "content": "more waves"},
        ]
    )
    used = [turn["content"][0] for turn in body["messages"][1::2]]
    told = [turn["content"][0] for turn in body["messages"][2::2]]
    assert [(block["name"], block["input"]) for block in used] == [("look", {"at": "sea"})] * 2
    assert [(block["tool_use_id"], block["content"]) for block in told] == [
        (used[0]["id"], "waves"),
        (used[1]["id"], "more waves"),
    ]
    assert used[0]["id"] != used[1]["id"]


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("data:image/png;base64,AAAA", {"type": "base64", "media_type": "image/png", "data": "AAAA"}),
        ("https://example.org/a.png", {"type": "url", "url": "https://example.org/a.png"}),
    ],
)
def test_images(url, source):
    body = written([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert body["messages"][0]["content"] == [{"type": "image", "source": source}]


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([USER], {"stop": ["\n"]}, "stop"),
        ([USER], {"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ([USER], {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "maybe"}, "tool_choice"),
        ([{"role": "system", "content": "x"}], {}, "messages"),
        ([{"role": "assistant", "content": "x"}, USER], {}, "messages"),
        ([USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]}], {},
         "messages[1].tool_calls[0].function.arguments"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], {}, "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}], {},
         "messages[0].content[0].image_url.url"),
    ],
)  # fmt: skip
def test_what_the_other_api_cannot_express_is_refused(messages, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        written(messages, **fields)
    assert caught.value.param == param


def test_hints_go_unheard():
    hints = {"seed": 7, "reasoning_effort": "low", "prompt_cache_key": "k", "presence_penalty": 0, "n": 1}
    assert written([USER], **hints) == written([USER])
