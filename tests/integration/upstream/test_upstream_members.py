"""Whatever a server says of its answer reaches the client, on every API, whole and streamed."""

import json

import pytest
from aiohttp import web

from maitred.config.tree import TextModelConfig
from maitred.replica.upstream.config import UpstreamConfig
from tests.integration.upstream.test_upstream_passing import client, running
from tests.support.upstream_gateway import MODEL, upstream_gateway

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
CLAUDE_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in "fg"]
USER = [{"role": "user", "content": "Hi"}]
VERSION = {"anthropic-version": "2023-06-01"}
USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 7,
    "total_tokens": 37,
    "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 4, "accepted_prediction_tokens": 1},
    "num_search_queries": 2,
}


def event(fields):
    return b"data: " + (fields if isinstance(fields, bytes) else json.dumps(fields).encode()) + b"\n\n"


DONE = event(b"[DONE]")
COUNTED = event({"choices": [], "usage": USAGE})


def chunk(delta, finish=None, choice=None, **more):
    entry = {"index": 0, "delta": delta, "finish_reason": finish, **(choice or {})}
    return event({"id": "x", "object": "chat.completion.chunk", "choices": [entry], **more})


class Bytes:
    """A server that answers with the same bytes each time."""

    def __init__(self, body, content_type="text/event-stream", status=200):
        self.body, self.content_type, self.status = body, content_type, status
        self.calls = 0

    async def answer(self, request):
        if request.method == "GET":
            return web.json_response({"data": []})
        await request.read()
        self.calls += 1
        headers = {} if self.content_type is None else {"content-type": self.content_type}
        response = web.Response(body=self.body, headers=headers, status=self.status)
        if self.content_type is None:
            response.headers.popall("content-type", None)
        return response


def events_of(response):
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
    assert response.status_code == 200
    return [json.loads(line) for line in lines]


async def asked(body, content_type="text/event-stream", **fields):
    """The whole answer of a chat, and the events of a stream."""
    server = Bytes(body, content_type)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="openai", retries=2) as system:
        whole = await system.chat(**fields)
        streamed = await system.chat(stream=True, stream_options={"include_usage": True}, **fields)
        assert server.calls == 2
        assert system.upstream.status.weight == 1.0
        return whole.json(), events_of(streamed)


async def test_members_of_chunks_choices_deltas_and_usage_reach_the_client():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}, "index": 0}
    cited = {"type": "url_citation", "url_citation": {"url": "https://e.x", "title": "t"}}
    always = {"system_fingerprint": "fp_1", "service_tier": "flex", "citations": ["https://e.x"]}
    filtered = {"content_filter_results": {"hate": {"filtered": False}}}
    body = (
        event({"choices": [], "prompt_filter_results": [{"prompt_index": 0}]})
        + chunk({"role": "assistant", "content": ""}, **always)
        + chunk({"content": "He"}, choice=filtered, **always)
        + chunk({"content": "llo"}, choice=filtered, **always)
        + chunk({"annotations": [cited]}, **always)
        + chunk({"images": [image]}, **always)
        + chunk({"audio": {"id": "au", "data": "AAAA", "transcript": "He"}}, **always)
        + chunk({"audio": {"data": "AQ==", "transcript": "llo", "expires_at": 5}}, **always)
        + chunk({"reasoning_details": [{"type": "reasoning.text", "text": "so ", "index": 0}]})
        + chunk({"reasoning_details": [{"type": "reasoning.text", "text": "it is", "index": 0, "signature": "S"}]})
        + chunk({}, "stop", choice={"stop_reason": 7, "native_finish_reason": "end_turn"}, **always)
        + event({"choices": [], "usage": USAGE, **always, "x_groq": {"id": "req"}})
        + DONE
    )
    whole, events = await asked(body)
    assert {name: whole[name] for name in always} == always
    assert whole["prompt_filter_results"] == [{"prompt_index": 0}]
    assert whole["x_groq"] == {"id": "req"}
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["native_finish_reason"]) == ("stop", 7, "end_turn")
    assert choice["content_filter_results"] == {"hate": {"filtered": False}}
    message = choice["message"]
    assert message["content"] == "Hello"
    assert (message["annotations"], message["images"]) == ([cited], [image])
    assert message["audio"] == {"id": "au", "data": "AAAAAQ==", "transcript": "Hello", "expires_at": 5}
    assert message["reasoning_details"] == [
        {"type": "reasoning.text", "text": "so it is", "index": 0, "signature": "S"}
    ]
    assert whole["usage"] == USAGE

    texts = [entry for entry in events if entry["choices"] and entry["choices"][0]["delta"].get("content")]
    assert "".join(entry["choices"][0]["delta"]["content"] for entry in texts) == "Hello"
    assert all(entry["choices"][0]["content_filter_results"] for entry in texts)
    assert all(entry["system_fingerprint"] == "fp_1" for entry in texts)
    assert [entry["prompt_filter_results"] for entry in events if "prompt_filter_results" in entry]
    deltas = [entry["choices"][0]["delta"] for entry in events if entry["choices"]]
    assert [delta["annotations"] for delta in deltas if "annotations" in delta] == [[cited]]
    assert [delta["images"] for delta in deltas if "images" in delta] == [[image]]
    assert [delta["audio"]["data"] for delta in deltas if "audio" in delta] == ["AAAA", "AQ=="]
    (end,) = [entry["choices"][0] for entry in events if entry["choices"] and entry["choices"][0]["finish_reason"]]
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", 7)
    assert events[-1]["usage"] == USAGE
    assert events[-1]["service_tier"] == "flex"


async def test_texts_of_the_completions_api_keep_their_members_too():
    def text(text, finish=None, **more):
        choice = {"index": 0, "text": text, "finish_reason": finish, **more}
        return event({"id": "x", "choices": [choice], "system_fingerprint": "fp"})

    body = text("He", token_ids=[1, 2]) + text("llo", token_ids=[3]) + text("", "stop", stop_reason=5) + COUNTED + DONE
    server = Bytes(body)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="generic") as system:
        asked = {"model": "far", "prompt": "Hi", "max_tokens": 8}
        whole = (await system.client.post("/v1/completions", json=asked)).json()
        streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        events = events_of(await system.client.post("/v1/completions", json=streamed))
    (choice,) = whole["choices"]
    assert (choice["text"], choice["token_ids"], choice["stop_reason"]) == ("Hello", [1, 2, 3], 5)
    assert (whole["system_fingerprint"], whole["usage"]) == ("fp", USAGE)
    assert [entry["choices"][0].get("token_ids") for entry in events[:2]] == [[1, 2], [3]]
    assert events[-1]["usage"] == USAGE


async def test_every_success_is_one():
    for status in (201, 203):
        server = Bytes(STREAM, status=status)
        async with running(server.answer) as url, upstream_gateway(f"{url}/v1") as system:
            assert (await system.chat()).json()["choices"][0]["message"]["content"] == "Hello"


async def test_an_answer_without_text_keeps_what_it_has():
    signed = {"google": {"thought_signature": "SIG"}}
    call = {"index": 0, "id": "t", "type": "custom", "custom": {"name": "shell", "input": ""}, "extra_content": signed}
    more = {"tool_calls": [{"index": 0, "custom": {"input": "ls"}}]}
    body = chunk({"tool_calls": [call]}) + chunk(more) + chunk({}, "tool_calls") + COUNTED + DONE
    whole, events = await asked(body)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"] == [
        {"id": "t", "type": "custom", "custom": {"name": "shell", "input": "ls"}, "extra_content": signed}
    ]
    pieces = [entry["choices"][0]["delta"].get("tool_calls") for entry in events if entry["choices"]]
    assert [piece for piece in pieces if piece] == [[call], more["tool_calls"]]


@pytest.mark.parametrize(
    ("settings", "thoughts", "named"),
    [
        ({"dialect": "openai"}, {"reasoning_content": "Hmm"}, "messages.reasoning_content"),
        ({"dialect": "groq"}, {"reasoning_content": "Hmm", "reasoning": "Hmm"}, None),
        ({"dialect": "vllm"}, {"thinking_blocks": [{"type": "redacted_thinking"}]}, "messages.thinking_blocks"),
        ({"dialect": "generic"}, {"reasoning_content": "Hmm"}, None),
        ({"kind": "anthropic"}, {"reasoning": "Hmm"}, "messages.reasoning"),
        ({"kind": "anthropic"}, {"thinking_blocks": [{"type": "redacted_thinking", "data": "D"}]}, None),
    ],
)
async def test_a_thought_that_a_server_does_not_get_is_named(settings, thoughts, named):
    history = [*USER, {"role": "assistant", "content": "So.", **thoughts}, *USER]
    message = {"type": "message", "content": "Hello", "stop_reason": "end_turn"}
    server = Bytes(json.dumps(message).encode() if "kind" in settings else STREAM)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", **settings) as system:
        answer = await system.chat(messages=history)
    assert answer.status_code == 200
    assert answer.headers.get("x-maitred-ignored") == named


async def test_the_text_of_a_custom_call_is_a_member_of_its_input_for_messages():
    call = {"index": 0, "id": "t", "type": "custom", "custom": {"name": "shell", "input": ""}}
    pieces = [call, *({"index": 0, "custom": {"input": piece}} for piece in ('echo "', "\\n\n", 'ö"'))]
    body = b"".join(chunk({"tool_calls": [piece]}) for piece in pieces) + chunk({}, "tool_calls") + COUNTED + DONE
    server = Bytes(body)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="openai") as system:
        asked = {"model": MODEL, "max_tokens": 100, "messages": USER}
        whole = (await system.client.post("/v1/messages", json=asked, headers=VERSION)).json()
        events = events_of(await system.client.post("/v1/messages", json={**asked, "stream": True}, headers=VERSION))
    written = "".join(entry["delta"].get("partial_json", "") for entry in events if "delta" in entry)
    assert json.loads(written) == whole["content"][0]["input"] == {"input": 'echo "\\n\nö"'}


ANSWER = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
STREAM = chunk({"content": "He"}) + chunk({"content": "llo"}) + chunk({}, "end") + COUNTED + DONE


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (STREAM, "application/json"),
        (STREAM, "text/plain; charset=utf-8"),
        (STREAM, "application/octet-stream"),
        (json.dumps(ANSWER).encode(), "application/json"),
        (json.dumps(ANSWER, indent=2).encode(), "text/event-stream"),
        (event(ANSWER) + DONE, "text/event-stream"),
        (STREAM.removesuffix(DONE), "text/event-stream"),
        (STREAM.removesuffix(b"\n\n"), "text/event-stream"),
        (STREAM.replace(COUNTED, b"event: ping\ndata: {}\n\n: comment\n\ndata:\n\n" + COUNTED), "text/event-stream"),
        (STREAM.replace(COUNTED, chunk({"role": "assistant", "content": ""}, "stop") + COUNTED), "text/event-stream"),
    ],
)
async def test_right_content_in_an_odd_form_is_a_whole_answer_at_the_first_call(body, content_type):
    whole, events = await asked(body, content_type)
    assert (whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"]) == ("Hello", "stop")
    assert whole["usage"] == events[-1]["usage"] == USAGE
    assert "".join(entry["choices"][0]["delta"].get("content", "") for entry in events[:-1]) == "Hello"


def call(index=None, call_id=None, name=None, arguments=None):
    function = {"name": name, "arguments": arguments}
    piece = {
        "index": index,
        "id": call_id,
        "function": {key: value for key, value in function.items() if value is not None},
    }
    return {"tool_calls": [{key: value for key, value in piece.items() if value is not None}]}


TURNS = [
    *(call(0, "a", "f", ""), call(1, "b", "g", ""), call(0, arguments='{"x":'), call(1, arguments='{"y":')),
    *(call(0, arguments="1}"), call(1, arguments="2}")),
]
IN_ORDER = [call(0, "a", "f", ""), call(0, arguments='{"x":1}'), call(1, "b", "g", ""), call(1, arguments='{"y":2}')]
NO_INDEX = [call(None, "a", "f", '{"x":1}'), call(None, "b", "g", '{"y":2}')]
SHARED_INDEX = [call(0, "a", "f", '{"x":1}'), call(0, "b", "g", '{"y":2}')]
LATE_IDS = [call(0, None, "f", ""), call(0, "a"), call(0, arguments='{"x":1}'), call(1, "b", "g", '{"y":2}')]
WITH_TEXT = [call(0, "a", "f", '{"x":'), {"content": "mid"}, call(0, arguments="1}"), call(1, "b", "g", '{"y":2}')]


@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
@pytest.mark.parametrize("deltas", [TURNS, IN_ORDER, NO_INDEX, SHARED_INDEX, LATE_IDS, WITH_TEXT])
async def test_calls_are_whole_on_every_api_however_their_pieces_come(deltas, finish):
    server = Bytes(chunk({"content": "A"}) + b"".join(map(chunk, deltas)) + chunk({}, finish) + COUNTED + DONE)
    right = [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')]
    text = "Amid" if deltas is WITH_TEXT else "A"
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="generic") as system:
        async with client(system) as sdk:
            whole = await sdk.chat.completions.create(model="far", messages=USER, tools=TOOLS)
            async with sdk.chat.completions.stream(model="far", messages=USER, tools=TOOLS) as stream:
                final = await stream.get_final_completion()
        for completion in (whole, final):
            (choice,) = completion.choices
            called = [(each.id, each.function.name, each.function.arguments) for each in choice.message.tool_calls]
            assert (called, choice.finish_reason, choice.message.content) == (right, "tool_calls", text)
        message = {"model": "far", "max_tokens": 50, "messages": USER, "tools": CLAUDE_TOOLS}
        headers = {"anthropic-version": "2023-06-01"}
        answer = (await system.client.post("/v1/messages", json=message, headers=headers)).json()
        streamed = await system.client.post("/v1/messages", json={**message, "stream": True}, headers=headers)
    blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert [(block["id"], block["name"], block["input"]) for block in blocks] == [
        ("a", "f", {"x": 1}),
        ("b", "g", {"y": 2}),
    ]
    assert answer["stop_reason"] == "tool_use"
    made, open_block = [], None
    for entry in events_of(streamed):
        match entry["type"]:
            case "content_block_start":
                assert (open_block, entry["index"]) == (None, len(made))
                open_block = entry["index"]
                made.append({**entry["content_block"], "written": ""})
            case "content_block_delta":
                assert entry["index"] == open_block
                made[-1]["written"] += entry["delta"].get("text", "") + entry["delta"].get("partial_json", "")
            case "content_block_stop":
                assert entry["index"] == open_block
                open_block = None
            case "message_delta":
                assert (open_block, entry["delta"]["stop_reason"]) == (None, "tool_use")
    assert [(each["id"], each["name"], each["written"]) for each in made if each["type"] == "tool_use"] == right
    assert "".join(each["written"] for each in made if each["type"] == "text") == text


async def test_calls_without_ids_can_be_answered_on_every_api():
    """One call has its arguments at once, the other in pieces."""
    deltas = [call(0, None, "f", '{"x":1}'), call(1, None, "g", '{"y":'), call(1, arguments="2}")]
    server = Bytes(b"".join(map(chunk, deltas)) + chunk({}, "stop") + COUNTED + DONE)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="generic") as system:
        async with client(system) as sdk:
            whole = await sdk.chat.completions.create(model="far", messages=USER, tools=TOOLS)
            async with sdk.chat.completions.stream(model="far", messages=USER, tools=TOOLS) as stream:
                final = await stream.get_final_completion()
        message = {"model": "far", "max_tokens": 50, "messages": USER, "tools": CLAUDE_TOOLS}
        headers = {"anthropic-version": "2023-06-01"}
        answer = (await system.client.post("/v1/messages", json=message, headers=headers)).json()
        streamed = await system.client.post("/v1/messages", json={**message, "stream": True}, headers=headers)
    blocks = [entry["content_block"] for entry in events_of(streamed) if entry["type"] == "content_block_start"]
    for ids in (
        *([each.id for each in made.choices[0].message.tool_calls] for made in (whole, final)),
        *([block["id"] for block in made if block["type"] == "tool_use"] for made in (answer["content"], blocks)),
    ):
        assert len({*ids}) == 2
        assert all(ids)


async def test_a_call_without_an_end_is_as_long_as_it_is():
    body = chunk(call(0, "a", "f", '{"x": "lo'))
    whole, events = await asked(body + chunk({}, "length") + COUNTED + DONE)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "lo'}
    assert [entry["choices"][0]["finish_reason"] for entry in events if entry["choices"]][-1] == "length"


MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "c",
    "content": [
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 10, "output_tokens": 7},
}


def messages_stream():
    start = {**MESSAGE, "content": [], "stop_reason": None}
    yield {"type": "message_start", "message": start}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}}
    yield {"type": "content_block_stop", "index": 0}
    block = {**MESSAGE["content"][1], "input": {}}
    yield {"type": "content_block_start", "index": 1, "content_block": block}
    yield {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"x":1}'}}
    yield {"type": "content_block_stop", "index": 1}
    yield {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}}
    yield {"type": "message_stop"}


MESSAGE_EVENTS = b"".join(b"event: " + entry["type"].encode() + b"\n" + event(entry) for entry in messages_stream())


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (MESSAGE_EVENTS, "application/json"),
        (MESSAGE_EVENTS, "text/plain"),
        (json.dumps(MESSAGE).encode(), "application/json"),
        (json.dumps(MESSAGE, indent=2).encode(), "text/event-stream"),
        (b"\xef\xbb\xbf\n" + json.dumps(MESSAGE).encode(), "application/json"),
        (event(MESSAGE), "text/event-stream"),
    ],
)
async def test_right_content_in_an_odd_form_is_a_whole_message_too(body, content_type):
    server = Bytes(body, content_type)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", kind="anthropic", retries=2) as system:
        whole = (await system.chat(tools=TOOLS)).json()
        assert server.calls == 1
    (choice,) = whole["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Hello")
    assert (made["id"], made["function"]["name"], json.loads(made["function"]["arguments"])) == ("a", "f", {"x": 1})
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (10, 7)


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"<html>No.</html>", "text/html", 502),
        (b"", "text/event-stream", 502),
        (b'{"error": {"message": "boom"}}', "application/json", 502),
        (b'{"type": "error", "error": {"type": "overloaded_error", "message": "boom"}}', "application/json", 503),
        (b'{"odd": 1}', "application/json", 502),
        (b"{", "application/json", 502),
        (b"[]", "application/json", 502),
    ],
)
async def test_what_is_no_answer_is_none_whatever_it_is_called(kind, body, content_type, status):
    server = Bytes(body, content_type)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", kind=kind) as system:
        refused = await system.chat()
    assert refused.status_code == status


def scored(text, *entries, **more):
    return chunk({"content": text}, choice={"logprobs": {"content": list(entries), "refusal": None}}, **more)


A = {"id": 7, "token": "a", "bytes": [97], "logprob": -0.5, "rank": 1, "top_logprobs": []}
TOP_B = {"id": 8, "token": "b", "bytes": [98], "logprob": -1.0}
B = {**TOP_B, "top_logprobs": [TOP_B, {"token": "c", "logprob": -2.0, "p": 0.1}]}
C_TOLD = {"token": "c", "logprob": -2.0, "p": 0.1, "bytes": [99]}
REFUSED = {"token": "no", "logprob": -0.1, "bytes": None, "top_logprobs": [], "rank": 3}


async def test_members_of_log_probabilities_reach_the_client():
    told = [A, {**B, "top_logprobs": [TOP_B, C_TOLD]}]
    body = scored("a", A) + scored("b", B) + chunk({}, "stop") + COUNTED + DONE
    whole, events = await asked(body, logprobs=True, top_logprobs=2)
    assert whole["choices"][0]["logprobs"]["content"] == told
    choices = [entry["choices"][0] for entry in events if entry["choices"]]
    assert [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]] == told

    refusal = {"content": None, "refusal": [REFUSED]}
    body = chunk({"refusal": "no"}, choice={"logprobs": refusal}) * 2 + chunk({}, "stop") + COUNTED + DONE
    whole, events = await asked(body, logprobs=True)
    assert whole["choices"][0]["logprobs"]["refusal"] == [REFUSED, REFUSED]
    choices = [entry["choices"][0] for entry in events if entry["choices"] and entry["choices"][0]["logprobs"]]
    assert [choice["logprobs"]["refusal"] for choice in choices] == [[REFUSED], [REFUSED]]


async def test_log_probabilities_of_texts_keep_the_members_that_completions_have_no_place_for():
    def text(text, finish=None, logprobs=None, **more):
        return event({"choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs, **more}]})

    odd = {"tokens": ["ha"], "token_logprobs": [-0.5], "top_logprobs": [{"ha": -0.5}], "text_offset": [0], "ids": [5]}
    forms = [
        (text("a", logprobs={"content": [A]}) + text("b", logprobs={"content": [B]}), "content", [A["id"], B["id"]]),
        (text("ha", logprobs=odd) + text("ha", logprobs=odd), "ids", [5, 5]),
    ]
    for body, member, ids in forms:
        server = Bytes(body + text("", "stop") + COUNTED + DONE)
        async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="generic") as system:
            fields = {"model": "far", "prompt": "Hi", "max_tokens": 8, "logprobs": 1}
            whole = (await system.client.post("/v1/completions", json=fields)).json()
            events = events_of(await system.client.post("/v1/completions", json={**fields, "stream": True}))
        logprobs = [choice["logprobs"] for entry in events for choice in entry["choices"] if choice["logprobs"]]
        for members in (whole["choices"][0]["logprobs"][member], [each[member][0] for each in logprobs]):
            assert [entry["id"] if isinstance(entry, dict) else entry for entry in members] == ids
        assert len(whole["choices"][0]["logprobs"]["tokens"]) == 2


async def test_equal_token_ids_of_two_chunks_are_two_tokens():
    def ids(text):
        return chunk({"content": text}, choice={"token_ids": [5]})

    whole, events = await asked(ids("ha") + ids("ha") + ids("ha") + chunk({}, "stop") + COUNTED + DONE)
    assert whole["choices"][0]["token_ids"] == [5, 5, 5]
    choices = [entry["choices"][0] for entry in events if entry["choices"]]
    assert [choice["token_ids"] for choice in choices if choice["delta"].get("content")] == [[5]] * 3


class Breaks(Bytes):
    """A server whose first answer breaks off in its middle, and whose second one goes on."""

    def __init__(self, first, second):
        super().__init__(second)
        self.first = first

    async def answer(self, request):
        response = await super().answer(request)
        if self.calls == 1 and request.method == "POST":
            response.body = self.first
        return response


async def test_behind_a_break_chunks_have_the_members_of_the_server_that_goes_on():
    first = {"system_fingerprint": "fp_1", "service_tier": "flex", "x_first": 1}
    for second in ({"system_fingerprint": "fp_2", "x_second": 2}, {}):
        server = Breaks(
            chunk({"content": "He"}, choice={"mood": "good"}, **first) + chunk({"content": "ll"}, **first),
            chunk({"content": "o"}, **second)
            + chunk({}, "stop", **second)
            + event({"choices": [], "usage": USAGE})
            + DONE,
        )
        async with running(server.answer) as url:
            config = TextModelConfig(
                continuation="reprompt",
                upstreams=[UpstreamConfig(url=f"{url}/v1", dialect="vllm")],
            )
            async with upstream_gateway(f"{url}/v1", model=config, retries=2) as system:
                asked = {"stream": True, "stream_options": {"include_usage": True}}
                events = events_of(await system.chat(**asked))
        switch = next(at for at, entry in enumerate(events) if "maitred" in entry)
        before, behind = events[1:switch], events[switch:]
        assert all({**entry, **first} == entry for entry in before)
        for entry in behind:
            assert {name: entry[name] for name in second} == second
            assert not ({*first} - {*second}) & {*entry}
            assert "mood" not in (entry["choices"] or [{}])[0]


async def test_a_token_without_log_probability_has_none_at_the_client():
    logprobs = {
        "tokens": ["Hi", "ha"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"ha": -0.5}],
        "text_offset": [0, 2],
    }
    body = event({"choices": [{"index": 0, "text": "Hiha", "finish_reason": "stop", "logprobs": logprobs}]})
    server = Bytes(body + COUNTED + DONE)
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1", dialect="generic") as system:
        fields = {"model": "far", "prompt": "Hi", "max_tokens": 8, "logprobs": 1}
        whole = (await system.client.post("/v1/completions", json=fields)).json()
        events = events_of(await system.client.post("/v1/completions", json={**fields, "stream": True}))
    told = [choice["logprobs"] for body in events for choice in body["choices"] if choice["logprobs"]]
    assert [whole["choices"][0]["logprobs"], *told] == [logprobs, logprobs]
