"""Characters that a server cuts between two events are whole again, in every text of an answer and on every API."""

import json

import pytest

from maitred.testing.scripted_anthropic import end, start
from tests.integration.upstream.test_upstream_members import COUNTED, DONE, Bytes, asked, chunk, event, events_of
from tests.integration.upstream.test_upstream_passing import running
from tests.support.upstream_gateway import upstream_gateway

TEXT = "a€b😀c"
MARK = "CUT"


def cut_forms():
    """Pairs of JSON strings whose texts together are the text, cut within each of its characters."""
    encoded = TEXT.encode()
    for at in range(1, len(encoded)):
        yield b'"' + encoded[:at] + b'"', b'"' + encoded[at:] + b'"'
    escaped = json.dumps(TEXT).encode()
    half = escaped.index(b"\\ude00")
    yield escaped[:half] + b'"', b'"' + escaped[half:]


FORMS = list(cut_forms())


def cut(make, first, second):
    """Two events that `make` makes of a text, with the two JSON strings in its place."""
    return b"".join(make(MARK).replace(f'"{MARK}"'.encode(), piece) for piece in (first, second))


def call(text):
    return chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": text}}]})


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_texts_thoughts_and_arguments_of_chats(line_end):
    members = [
        lambda text: chunk({"content": text}),
        lambda text: chunk({"reasoning_content": text}),
        lambda text: chunk({"content": [{"type": "text", "text": text}]}),
        lambda text: chunk({"refusal": text}),
    ]
    for make in members:
        for first, second in (FORMS[2], FORMS[5], FORMS[-1]):
            body = chunk({"content": "-"}) + cut(make, first, second) + chunk({}, "stop") + COUNTED + DONE
            whole, events = await asked(body.replace(b"\n", line_end))
            message = whole["choices"][0]["message"]
            assert TEXT in (message["content"].lstrip("-"), message.get("reasoning_content"), message.get("refusal"))
            assert "\ufffd" not in json.dumps([whole, events], ensure_ascii=False)


async def test_arguments_of_calls_are_whole():
    for first, second in FORMS:
        body = cut(call, first, second) + chunk({}, "tool_calls") + COUNTED + DONE
        whole, events = await asked(body)
        assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == TEXT
        deltas = [entry["choices"][0]["delta"] for entry in events if entry["choices"]]
        pieces = [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", ())]
        assert "".join(pieces) == TEXT


async def test_completions():
    def text(text, finish=None):
        return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})

    for first, second in FORMS:
        server = Bytes(text("-") + cut(text, first, second) + text("", "stop") + COUNTED + DONE)
        async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="generic") as system:
            body = {"model": "far", "prompt": "Hi", "max_tokens": 20}
            whole = (await system.client.post("/v1/completions", json=body)).json()
            events = events_of(await system.client.post("/v1/completions", json={**body, "stream": True}))
        assert whole["choices"][0]["text"] == f"-{TEXT}"
        assert "".join(entry["choices"][0]["text"] for entry in events) == f"-{TEXT}"


async def test_a_character_whose_rest_never_comes_is_replaced():
    for first in (b'"x\xe2\x82"', b'"x\\ud83d"', b'"x\xf0"'):
        body = cut(lambda text: chunk({"content": text}), first, b'""') + chunk({}, "stop") + COUNTED + DONE
        whole, _ = await asked(body)
        assert whole["choices"][0]["message"]["content"] == "x\ufffd"
        body = cut(lambda text: chunk({"content": text}), first, b'"y"') + chunk({}, "stop") + COUNTED + DONE
        whole, _ = await asked(body)
        assert whole["choices"][0]["message"]["content"] == "x\ufffdy"


def claude_event(fields):
    return f"event: {fields['type']}\n".encode() + event(fields)


def claude_stream(block, member, delta_type, first, second):
    def delta(text):
        return claude_event({"type": "content_block_delta", "index": 0, "delta": {"type": delta_type, member: text}})

    opened = {"type": "content_block_start", "index": 0, "content_block": block}
    closed = {"type": "content_block_stop", "index": 0}
    before = b"".join(map(claude_event, [start(10, 0), opened]))
    return before + cut(delta, first, second) + b"".join(map(claude_event, [closed, *end("end_turn", 7)]))


@pytest.mark.parametrize(
    ("block", "member", "delta_type"),
    [
        ({"type": "text", "text": ""}, "text", "text_delta"),
        ({"type": "thinking", "thinking": "", "signature": ""}, "thinking", "thinking_delta"),
        ({"type": "tool_use", "id": "t", "name": "f", "input": {}}, "partial_json", "input_json_delta"),
    ],
)
async def test_servers_of_messages(block, member, delta_type):
    for first, second in (FORMS[2], FORMS[5], FORMS[-1]):
        server = Bytes(claude_stream(block, member, delta_type, first, second))
        async with running(server.answer) as url, upstream_gateway(f"{url}/v1", kind="anthropic") as system:
            message = (await system.chat()).json()["choices"][0]["message"]
            calls = message.get("tool_calls") or [{"function": {"arguments": ""}}]
            texts = message["content"], message.get("reasoning_content"), calls[0]["function"]["arguments"]
            assert TEXT in texts
