"""Content that one API has and the other has no place for: nothing of it is lost, and it goes back as it came."""

import json

import pytest

from maitred.testing.scripted_anthropic import Reply, ScriptedAnthropic, block, end, start
from tests.integration.upstream.test_upstream_anthropic import ASKED, VERSION, behind, client_of, message_of
from tests.integration.upstream.test_upstream_members import COUNTED, DONE, USER, Bytes, chunk, events_of
from tests.integration.upstream.test_upstream_passing import Server, running
from tests.support.upstream_gateway import MODEL, upstream_gateway

CITED = {
    "type": "web_search_result_location",
    "url": "https://a.x",
    "title": "A",
    "encrypted_index": "EI",
    "cited_text": "so",
}
PAGE = {"type": "char_location", "cited_text": "x", "document_index": 0, "start_char_index": 0, "end_char_index": 1}
RESULT = {"type": "web_search_result", "url": "https://a.x", "title": "A", "encrypted_content": "EC", "page_age": None}
RAN = {"type": "bash_code_execution_result", "stdout": "1", "stderr": "", "return_code": 0, "content": []}
CONTENT = [
    {"type": "redacted_thinking", "data": "RD"},
    {"type": "text", "text": "I look. "},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "fox"}},
    {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [RESULT]},
    {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "echo", "server_name": "s", "input": {"a": 1}},
    {
        "type": "mcp_tool_result",
        "tool_use_id": "mcptoolu_1",
        "is_error": False,
        "content": [{"type": "text", "text": "e"}],
    },
    {"type": "text", "text": "It says "},
    {"type": "text", "text": "so", "citations": [CITED]},
    {"type": "text", "text": " and so", "citations": [PAGE, CITED]},
    {"type": "bash_code_execution_tool_result", "tool_use_id": "srvtoolu_2", "content": RAN},
    {"type": "text", "text": "."},
]
TEXT = "I look. It says so and so."
SERVER_COUNTS = {"server_tool_use": {"web_search_requests": 1}, "service_tier": "priority"}
EDITS = {"applied_edits": [{"type": "clear_tool_uses_20250919"}]}
CONTAINER = {"id": "container_1", "expires_at": "2026-01-01T00:00:00Z"}


def stream():
    yield start(10, 0)
    for index, whole in enumerate(CONTENT):
        match whole:
            case {"type": "text", "text": text, **rest}:
                citations = [{"type": "citations_delta", "citation": each} for each in rest.get("citations", ())]
                half = len(text) // 2
                pieces = [{"type": "text_delta", "text": text[:half]}, {"type": "text_delta", "text": text[half:]}]
                yield from block(index, {"type": "text", "text": ""}, *pieces[:1], *citations, *pieces[1:])
            case {"input": given}:
                written = json.dumps(given)
                pieces = [{"type": "input_json_delta", "partial_json": part} for part in ("", written[:5], written[5:])]
                yield from block(index, {**whole, "input": {}}, *pieces)
            case _:
                yield from block(index, whole)
    ended, stopped = end("end_turn", 7)
    ended = {**ended, "delta": {**ended["delta"], "container": CONTAINER}, "context_management": EDITS}
    yield {**ended, "usage": {**ended["usage"], **SERVER_COUNTS}}
    yield stopped


STREAM = list(stream())


def assembled(events):
    """The message that the events of a stream make."""
    message, written = {}, ""
    for event in events:
        match event:
            case {"type": "message_start", "message": begun}:
                message = {**begun}
            case {"type": "content_block_start", "index": index, "content_block": each}:
                assert index == len(message["content"])
                message["content"].append({**each})
                written = ""
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(message["content"]) - 1
                each = message["content"][-1]
                match delta:
                    case {"type": "text_delta", "text": text}:
                        each["text"] += text
                    case {"type": "citations_delta", "citation": citation}:
                        each["citations"] = [*(each.get("citations") or ()), citation]
                    case {"type": "input_json_delta", "partial_json": piece}:
                        written += piece
            case {"type": "content_block_stop"} if written:
                message["content"][-1]["input"] = json.loads(written)
                written = ""
            case {"type": "message_delta", "delta": delta, "usage": usage, **beside}:
                message |= {**delta, "usage": usage, **beside, "type": "message"}
    return message


async def asked_of_messages(system, *, streams, **fields):
    """The message, which the official client takes without a complaint."""
    asked = {"model": MODEL, "max_tokens": 4096, "messages": ASKED[1:], **fields}
    taken = await message_of(system, asked, streams=streams)
    response = await system.client.post("/v1/messages", json={**asked, "stream": streams}, headers=VERSION)
    message = assembled(events_of(response)) if streams else response.json()
    assert [each.type for each in taken.content] == [each["type"] for each in message["content"]]
    return message


@pytest.mark.parametrize("streams", [False, True])
async def test_blocks_of_a_server_of_messages_come_and_go_back_as_they_are(streams):
    async with ScriptedAnthropic([Reply(STREAM)]) as server, behind(server) as system:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = await asked_of_messages(system, streams=streams, thinking=thinking)
        assert message["content"] == CONTENT
        assert message["stop_reason"] == "end_turn"
        assert {name: message["usage"][name] for name in SERVER_COUNTS} == SERVER_COUNTS
        assert (message["container"], message["context_management"]) == (CONTAINER, EDITS)
        hidden = await asked_of_messages(system, streams=streams)
        assert hidden["content"] == CONTENT[1:]
        history = [*ASKED[1:], {"role": "assistant", "content": CONTENT}, {"role": "user", "content": "And?"}]
        asked = {"model": MODEL, "max_tokens": 9, "messages": history}
        answer = await system.client.post("/v1/messages", json=asked, headers=VERSION)
        assert answer.status_code == 200
        assert "x-maitred-ignored" not in answer.headers
        assert server.asked[-1].body["messages"] == history


async def test_chats_have_citations_as_annotations_and_all_blocks_beside():
    spans = [(16, 18), (18, 25), (18, 25)]
    cited = [
        {"type": "url_citation", "url_citation": {"url": "https://a.x", "title": "A", "start_index": a, "end_index": b}}
        for a, b in (spans[0], spans[2])
    ]
    async with ScriptedAnthropic([Reply(STREAM)]) as server, behind(server) as system:
        async with client_of(system) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=99)
            async with client.chat.completions.stream(model=MODEL, messages=ASKED, max_tokens=99) as stream:
                final = await stream.get_final_completion()
        for completion in (whole, final):
            (choice,) = completion.choices
            message = choice.message.model_dump()
            assert (message["content"], choice.finish_reason) == (TEXT, "stop")
            assert message["annotations"] == cited
            assert message["content_blocks"] == CONTENT
        assert whole.container == CONTAINER
        assert whole.usage.server_tool_use == SERVER_COUNTS["server_tool_use"]
        back = [*ASKED[1:], whole.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
        await system.chat(messages=back)
        assert server.asked[-1].body["messages"][1]["content"] == CONTENT
        back[1]["content"] = "Another text."
        await system.chat(messages=back)
        sent = server.asked[-1].body["messages"][1]["content"]
        assert [each for each in sent if each["type"] == "text"] == [{"type": "text", "text": "Another text."}]


async def test_other_servers_get_the_text_of_foreign_blocks_and_the_rest_is_named():
    server = Server([{"id": "x", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}])
    history = [*ASKED[1:], {"role": "assistant", "content": CONTENT}, {"role": "user", "content": "And?"}]
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1") as system:
        asked = {"model": MODEL, "max_tokens": 9, "messages": history}
        answer = await system.client.post("/v1/messages", json=asked, headers=VERSION)
    assert answer.headers["x-maitred-ignored"] == "messages.content_blocks, messages.thinking_blocks"
    sent = server.bodies[0]["messages"][1]
    assert sent.keys() <= {"role", "content"}
    assert "".join(part["text"] for part in sent["content"]) == TEXT


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}, "index": 0}
REMOTE = {"type": "image_url", "image_url": {"url": "https://e.x/i.png"}, "index": 1}
ANNOTATION = {
    "type": "url_citation",
    "url_citation": {"url": "https://e.x", "title": "t", "start_index": 0, "end_index": 5},
}
FILE = {"type": "file_citation", "file_id": "f"}
SIGNED = {"google": {"thought_signature": "SIG"}}
CALL = {
    "index": 0,
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
    "extra_content": SIGNED,
}
CHAT = (
    chunk({"role": "assistant", "content": "Hello"}, system_fingerprint="fp", citations=["https://e.x"])
    + chunk({"annotations": [ANNOTATION, FILE]}, system_fingerprint="fp")
    + chunk({"images": [IMAGE, REMOTE]}, system_fingerprint="fp")
    + chunk({"audio": {"id": "au", "data": "AAAA", "transcript": "He"}}, system_fingerprint="fp")
    + chunk({"audio": {"data": "AQ==", "transcript": "llo"}}, system_fingerprint="fp")
    + chunk({"content": [{"type": "video", "id": "v"}]}, system_fingerprint="fp")
    + chunk({"tool_calls": [CALL]}, system_fingerprint="fp")
    + chunk({}, "tool_calls", choice={"content_filter_results": {"hate": {"filtered": False}}}, system_fingerprint="fp")
    + COUNTED
    + DONE
)


@pytest.mark.parametrize("streams", [False, True])
async def test_what_a_chat_says_beside_its_text_is_in_the_message(streams):
    server = Bytes(CHAT)
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="generic") as system:
        members = await asked_of_messages(system, streams=streams, tools=tools)
    content = members["content"]
    (text,) = [each for each in content if each["type"] == "text"]
    (citation,) = text["citations"]
    assert (text["text"], citation["type"], citation["url"]) == ("Hello", "web_search_result_location", "https://e.x")
    assert (citation["title"], citation["start_index"], citation["end_index"]) == ("t", 0, 5)
    assert [each["source"] for each in content if each["type"] == "image"] == [
        {"type": "base64", "media_type": "image/png", "data": "AA=="},
        {"type": "url", "url": "https://e.x/i.png"},
    ]
    (call,) = [each for each in content if each["type"] == "tool_use"]
    assert (call["name"], call["extra_content"]) == ("f", SIGNED)
    assert members["audio"] == {"id": "au", "data": "AAAAAQ==", "transcript": "Hello"}
    assert (members["system_fingerprint"], members["annotations"]) == ("fp", [FILE])
    assert members["content_parts"] == [{"type": "video", "id": "v"}]
    assert members["content_filter_results"] == {"hate": {"filtered": False}}
    assert members["usage"]["num_search_queries"] == 2
    assert members["stop_reason"] == "tool_use"


async def test_a_signature_of_a_call_goes_back_through_messages():
    server = Server([{"id": "x", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}])
    called = {"type": "tool_use", "id": "c1", "name": "f", "input": {}, "extra_content": SIGNED}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "42"}
    messages = [*USER, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="generic") as system:
        asked = {"model": MODEL, "max_tokens": 9, "messages": messages}
        answer = await system.client.post("/v1/messages", json=asked, headers=VERSION)
    assert "x-maitred-ignored" not in answer.headers
    (call,) = server.bodies[0]["messages"][1]["tool_calls"]
    assert call == {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
        "extra_content": SIGNED,
    }


async def test_a_turn_that_a_server_has_paused_is_sent_back_to_it():
    paused = [*ASKED[1:], {"role": "assistant", "content": CONTENT[:3]}]
    async with ScriptedAnthropic([Reply(STREAM)]) as server, behind(server) as system:
        asked = {"model": MODEL, "max_tokens": 9, "messages": paused}
        assert (await system.client.post("/v1/messages", json=asked, headers=VERSION)).status_code == 200
        assert server.asked[-1].body["messages"] == paused
        begun = [*ASKED[1:], {"role": "assistant", "content": CONTENT[1:2]}]
        asked = {"model": MODEL, "max_tokens": 9, "messages": begun}
        assert (await system.client.post("/v1/messages", json=asked, headers=VERSION)).status_code == 200
        assert server.asked[-1].body["messages"] == begun
