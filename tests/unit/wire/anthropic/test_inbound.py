"""Messages requests as chat completions, and back."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import InvalidRequest
from maitred.wire.anthropic.decode import decode_count_tokens, decode_messages
from maitred.wire.anthropic.inbound import to_chat, to_openai_fields
from maitred.wire.anthropic.outbound import to_messages
from maitred.wire.anthropic.requests import encode_request
from maitred.wire.openai.fields import MESSAGES_THINKING
from maitred.wire.openai.requests import ChatRequest

USER = {"role": "user", "content": "Hi"}


def decoded(messages=(USER,), **fields):
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    return decode_messages(json.dumps(body).encode(), strict=True)


def chat(messages=(USER,), **fields):
    return to_chat(decoded(messages, **fields))


def messages_in(request):
    return [
        {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
        for message in request.messages
    ]


BEGUN = {"role": "assistant", "content": [{"type": "text", "text": "The answer"}]}
USED = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


def test_a_last_turn_of_the_assistant_is_continued():
    request = chat([USER, BEGUN])
    assert messages_in(request)[-1] == {"role": "assistant", "content": "The answer"}
    assert request.continue_final_message
    body = json.dumps({"model": "m", "messages": [USER, BEGUN]}).encode()
    assert to_chat(decode_count_tokens(body, strict=True)).continue_final_message
    assert chat([USER, BEGUN, USER]).continue_final_message is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("The answer ", "must not end with white space"),
        ([{"type": "text", "text": "The answer:\n"}], "must not end with white space"),
        ([{"type": "text", "text": "Let me see."}, USED], "End it with a block of the type text"),
        ([USED, {"type": "text", "text": "Done."}], "without calls"),
        ([{"type": "thinking", "thinking": "Hm.", "signature": "s"}], "End it with a block of the type text"),
    ],
)
def test_a_last_turn_that_only_its_own_server_may_continue(content, words):
    request = decoded([USER, {"role": "assistant", "content": content}])
    assert words in str(request.beyond_chat)
    assert request.beyond_chat.param == "messages[1]"
    assert to_chat(request).continue_final_message is None


def test_a_conversation_with_tools():
    request = chat(
        [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "See."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sea"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And?"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "waves", "cache_control": {"type": "ephemeral"}}],
                        "is_error": False,
                    },
                ],
            },
        ],
        system="Be brief.",
    )
    function = {"name": "look", "arguments": '{"at":"sea"}'}
    assert messages_in(request) == [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "See.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",
            "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x", "position": 0}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "waves"},
        {"role": "user", "content": "And?"},
    ]


@pytest.mark.parametrize("is_error", [True, False, None])
def test_a_failed_tool_call_stays_one_and_a_template_reads_so(is_error):
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "42", "is_error": is_error}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}
    request = chat([USER, called, {"role": "user", "content": [result]}])
    assert request.conversation()[-1]["content"] == ("Error: 42" if is_error else "42")
    sent = json.loads(encode_request(to_messages(request, model="m", max_tokens=9)))
    (told,) = sent["messages"][-1]["content"]
    assert told == {name: value for name, value in result.items() if value}


def test_thoughts_come_to_the_server_that_wrote_them_and_as_text_to_others():
    thoughts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "XX"},
        {"type": "thinking", "thinking": "Another model's.", "signature": ""},
    ]
    used = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    request = chat([USER, {"role": "assistant", "content": [*thoughts, used]}, USER], thinking={"type": "adaptive"})
    assert request.messages[1].reasoning_content == "Hm.\n\nAnother model's."
    sent = json.loads(encode_request(to_messages(request, model="m", max_tokens=9)))
    assert sent["messages"][1]["content"] == [*thoughts[:2], used]


def test_servers_of_messages_get_the_setting_of_thoughts_apart_from_that_of_others():
    request = decoded([USER], thinking={"type": "adaptive"})
    fields = to_openai_fields(request, to_chat(request))
    assert fields[MESSAGES_THINKING] == {"type": "adaptive"}
    assert "thinking" not in fields
    assert MESSAGES_THINKING not in to_openai_fields(decoded([USER]), to_chat(decoded([USER])))


def test_thoughts_keep_their_order_among_texts_and_calls():
    signed = [{"type": "thinking", "thinking": str(number), "signature": "x"} for number in range(4)]
    said = {"type": "text", "text": "See."}
    used = [{"type": "tool_use", "id": f"t{number}", "name": "look", "input": {}} for number in range(2)]
    content = [signed[0], said, signed[1], used[0], signed[2], used[1], signed[3]]
    request = chat([USER, {"role": "assistant", "content": content}, USER])
    sent = json.loads(encode_request(to_messages(request, model="m", max_tokens=9)))
    assert sent["messages"][1]["content"] == content


def test_the_form_of_the_answer_stays_one_for_a_server_of_messages():
    output = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    sent = json.loads(encode_request(to_messages(chat(output_config=output), model="m", max_tokens=9)))
    assert sent["output_config"] == output


def test_a_turn_of_thoughts_alone_is_left_out():
    thought = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    assert messages_in(chat([USER, thought, USER])) == [USER, USER]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": -1}, "top_k"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"inference_geo": "us"}, "inference_geo"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 1}]}},
            "context_management.edits[0]",
        ),
        (
            {
                "context_management": {
                    "edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}}]
                }
            },
            "context_management.edits[0]",
        ),
        ({"context_management": {"edits": "all"}}, "context_management.edits"),
        ({"context_management": "all"}, "context_management.edits"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 40}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stopsequences": []}, "stopsequences"),
    ],
)
def test_what_breaks_a_rule_is_named(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "a'b"}]}]}, "messages[1].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "server_block", "block": {"type": "text"}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "search_result"}]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]"),
        ({"messages": [USER, {"role": "assistant", "content": "Once "}]}, "messages[1]"),
    ],
)
def test_what_only_servers_of_messages_read_is_named_for_others_and_stays_as_it_was_sent(fields, param):
    request = decoded(**fields)
    assert request.beyond_chat.param == param
    assert {name: request.sent[name] for name in fields} == fields
    to_chat(request)  # its text, for the reservation


def test_what_a_chat_can_say_is_not_beyond_it():
    document = {
        "type": "document",
        "title": "Tides",
        "source": {"type": "text", "media_type": "text/plain", "data": "Ebb"},
    }
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    request = decoded([{"role": "user", "content": [document, pdf, {"type": "text", "text": "When?"}]}])
    assert request.beyond_chat is None
    (message,) = messages_in(to_chat(request))
    assert message["content"] == [
        {"type": "text", "text": "Tides\n\nEbb"},
        {"type": "file", "file": {"filename": "document.pdf", "file_data": "data:application/pdf;base64,AA=="}},
        {"type": "text", "text": "When?"},
    ]


def test_counting_needs_no_limit():
    request = decode_count_tokens(json.dumps({"model": "m", "messages": [USER]}).encode(), strict=True)
    assert to_chat(request).max_tokens is None


@given(st.binary(max_size=64))
def test_any_bytes(body):
    with pytest.raises(InvalidRequest):
        decode_messages(body, strict=True)


words = st.text(min_size=1, max_size=6)
inputs = st.dictionaries(words, st.integers(-9, 9) | words | st.lists(st.booleans(), max_size=2), max_size=2)
calls = st.builds(
    lambda name, arguments: {
        "id": "",
        "type": "function",
        "function": {"name": name, "arguments": msgspec.json.encode(arguments).decode()},
    },
    words,
    inputs,
)
turn = st.tuples(words, words.filter(str.strip) | st.none(), st.lists(calls, max_size=2), words)


@given(
    st.lists(turn, max_size=3),
    st.none() | words,
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 1),
            "top_p": st.floats(0.01, 1),
            "top_k": st.integers(1, 99),
            "stop": st.lists(words.filter(str.strip), min_size=1, max_size=3),
            "user": words,
        },
    ),
)
def test_there_and_back_again(turns, system, fields):
    """A chat completion that both APIs can say is the same one after it has been a Messages request."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for asked, answered, called, result in turns:
        messages.append({"role": "user", "content": asked})
        # Ids that Messages does not accept, or that come twice, would get substitutes.
        called = [{**call, "id": f"c-{len(messages)}-{number}"} for number, call in enumerate(called)]
        if answered is None and not called:
            continue
        reply = {"role": "assistant", "content": answered, "tool_calls": called or None}
        messages.append({name: value for name, value in reply.items() if value is not None})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in called]
    messages.append({"role": "user", "content": "Go on."})
    # Neighbours of a role are one turn to the one API and several to the other.
    alternating = [
        message for at, message in enumerate(messages)
        if message["role"] != "user" or at + 1 == len(messages) or messages[at + 1]["role"] != "user"
    ]  # fmt: skip
    body = {"model": "m", "messages": alternating, "max_tokens": 9, "stream": True, **fields}
    there = msgspec.convert(body, ChatRequest)
    sent = encode_request(to_messages(there, model="m", max_tokens=9))
    assert to_chat(decode_messages(sent, strict=True)) == there
