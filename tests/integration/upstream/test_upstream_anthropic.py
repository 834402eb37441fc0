"""A model behind a server that speaks Anthropic: chat completions and messages through the gateway, and failures."""
# ruff: noqa: SIM117 - nested contexts say who lives within whom

import json

import anthropic
import httpx
import openai
import pytest

from maitred.core.request import FinishReason, Usage
from maitred.core.secret import Secret
from maitred.replica.upstream.event_stream import EventStreamParser
from maitred.testing.scripted_anthropic import PING, Reply, ScriptedAnthropic, block, end, error, start, text, tool_use
from maitred.wire.anthropic.answer import MessagesStreamParser
from tests.integration.upstream.test_upstream_passing import Server, chunk, running
from tests.support.upstream_gateway import MODEL, upstream_gateway

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the fox?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
VERSION = {"anthropic-version": "2023-06-01"}
WORDS = ("In ", "the ", "wood.")


def behind(server, **settings):
    return upstream_gateway(server.url, kind="anthropic", **settings)


def client_of(system):
    return openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


async def test_a_chat_completion_whole_and_streamed():
    async with ScriptedAnthropic([Reply([PING, *text(*WORDS, prompt_tokens=10, cached_tokens=4)])]) as server:
        async with behind(server) as system, client_of(system) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=20, temperature=1.5)
            assert whole.choices[0].message.content == "".join(WORDS)
            assert whole.choices[0].finish_reason == "stop"
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 3)
            assert whole.usage.prompt_tokens_details.cached_tokens == 4
            stream = await client.chat.completions.create(
                model=MODEL, messages=ASKED, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            assert "".join(pieces) == "".join(WORDS)
            assert chunks[-1].usage.completion_tokens == 3
            await system.wait_until(lambda: system.nothing_left)
            billed = system.ledger.events[0]
            assert (billed.prompt_tokens, billed.cached_tokens, billed.output_tokens) == (10, 4, 3)
        asked = server.asked[0]
        assert asked.path == "/v1/messages"
        assert asked.headers["anthropic-version"] == "2023-06-01"
        assert asked.body["system"] == "Be brief."
        assert asked.body["messages"] == [{"role": "user", "content": "Where is the fox?"}]
        assert (asked.body["max_tokens"], asked.body["temperature"], asked.body["stream"]) == (20, 1, True)


async def test_the_key_goes_into_the_header_of_that_api_and_parameters_into_the_body():
    async with ScriptedAnthropic([Reply(text("x"))]) as server:
        key = Secret("sk-ant-1", "env KEY")
        async with behind(
            server, api_key=key, parameters={"max_tokens": 77, "thinking": {"type": "adaptive"}}
        ) as system:
            answer = await system.client.post("/v1/chat/completions", json={"model": MODEL, "messages": ASKED})
            assert answer.status_code == 200
        assert server.asked[0].headers["x-api-key"] == "sk-ant-1"
        assert "authorization" not in server.asked[0].headers
        assert server.asked[0].body["thinking"] == {"type": "adaptive"}
        assert server.asked[0].body["max_tokens"] == 77


async def test_tools_in_requests_and_answers():
    async with ScriptedAnthropic([Reply(tool_use("look", '{"at": ', '"wood"}'))]) as server:
        async with behind(server) as system, client_of(system) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=ASKED, tools=[TOOL], max_tokens=20)
            (call,) = whole.choices[0].message.tool_calls
            assert (call.function.name, call.function.arguments) == ("look", '{"at": "wood"}')
            assert whole.choices[0].finish_reason == "tool_calls"
        assert server.asked[0].body["tools"] == [{"name": "look", "input_schema": {"type": "object"}}]


async def message_of(system, asked, *, streams):
    """The message that the official client takes."""
    async with anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0) as client:
        if not streams:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as events:
            return await events.get_final_message()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_speaks_anthropic_gets_tools_through(streams):
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    asked = {"model": MODEL, "messages": ASKED[1:], "max_tokens": 20, "tools": tools}
    async with ScriptedAnthropic([Reply(tool_use("look", '{"at": ', '"wood"}'))]) as server:
        async with behind(server) as system:
            message = await message_of(system, asked, streams=streams)
        (block,) = message.content
        assert (block.type, block.id, block.name, block.input) == ("tool_use", "toolu_1", "look", {"at": "wood"})
        assert message.stop_reason == "tool_use"
        assert server.asked[0].body["tools"] == tools


async def test_a_failed_tool_call_is_no_good_one_to_either_api():
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "42", "is_error": True}
    messages = [*ASKED[1:], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    asked = {"model": MODEL, "max_tokens": 20, "messages": messages}
    async with ScriptedAnthropic([Reply(text("x"))]) as server, behind(server) as system:
        assert (await system.client.post("/v1/messages", json=asked, headers=VERSION)).status_code == 200
        assert server.asked[0].body["messages"][-1]["content"] == [result]
    chat_server = Server([chunk(content="x"), chunk(finish="stop")])
    async with running(chat_server.answer) as url, upstream_gateway(f"{url}/v1") as system:
        assert (await system.client.post("/v1/messages", json=asked, headers=VERSION)).status_code == 200
        assert chat_server.bodies[0]["messages"][-1] == {"role": "tool", "tool_call_id": "t1", "content": "Error: 42"}


class KeepsThoughts(ScriptedAnthropic):
    """A server that thinks before it calls a tool, and refuses a turn whose thoughts were not sent back."""

    async def _answer(self, asked, reader, writer):
        if asked.method == "POST" and (asked.body.get("thinking") or {}).get("type") == "enabled":
            for message in asked.body["messages"]:
                kinds = [block["type"] for block in message["content"]] if isinstance(message["content"], list) else []
                if "tool_use" in kinds and kinds[0] not in ("thinking", "redacted_thinking"):
                    self._replies = [Reply(status=400, error=("invalid_request_error", "Expected `thinking`."))]
        return await super()._answer(asked, reader, writer)


THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "SIG"}
HIDDEN = {"type": "redacted_thinking", "data": "XX"}
THOUGHT_AND_CALL = [
    start(10, 0),
    *block(
        *(0, {"type": "thinking", "thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": "H"}),
        *({"type": "thinking_delta", "thinking": "m."}, {"type": "signature_delta", "signature": "SIG"}),
    ),
    *block(1, HIDDEN),
    *block(2, {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}),
    *end("tool_use", 7),
]
ENABLED = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize("streams", [False, True])
async def test_thoughts_with_their_signatures_pass_in_both_directions_for_clients_of_messages(streams):
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    asked = {"model": MODEL, "max_tokens": 4096, "tools": tools, "thinking": ENABLED}
    async with KeepsThoughts([Reply(THOUGHT_AND_CALL)]) as server, behind(server) as system:
        async with anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0) as client:
            if streams:
                async with client.messages.stream(**asked, messages=ASKED[1:]) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked, messages=ASKED[1:])
            content = [block.model_dump(exclude_none=True) for block in message.content]
            assert content[:2] == [THOUGHT, HIDDEN]
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "7"}
            turns = [*ASKED[1:], {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
            await client.messages.create(**asked, messages=turns)
        assert server.asked[1].body["messages"][1]["content"][:2] == [THOUGHT, HIDDEN]
        assert [request.body["thinking"] for request in server.asked] == [ENABLED, ENABLED]


@pytest.mark.parametrize("streams", [False, True])
async def test_thoughts_between_texts_and_calls_stay_where_they_are(streams):
    def thought(index, words):
        deltas = {"type": "thinking_delta", "thinking": words}, {"type": "signature_delta", "signature": words.upper()}
        return block(index, {"type": "thinking", "thinking": "", "signature": ""}, *deltas)

    said = block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Let me see."})
    used = block(3, {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}})
    events = [start(10, 0), *thought(0, "one"), *said, *thought(2, "two"), *used, *end("tool_use", 7)]
    asked = {"model": MODEL, "max_tokens": 4096, "messages": ASKED[1:], "thinking": ENABLED}
    async with ScriptedAnthropic([Reply(events)]) as server, behind(server) as system:
        async with anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0) as client:
            if streams:
                async with client.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked)
    kinds = [(entry.type, getattr(entry, "signature", None)) for entry in message.content]
    assert kinds == [("thinking", "ONE"), ("text", None), ("thinking", "TWO"), ("tool_use", None)]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("keeps", [True, False])
async def test_thoughts_in_a_conversation_with_tools_for_clients_of_chat_completions(streams, keeps):
    asked = {"model": MODEL, "tools": [TOOL]}
    parameters = {"thinking": ENABLED, "max_tokens": 4096}
    async with KeepsThoughts([Reply(THOUGHT_AND_CALL)]) as server, behind(server, parameters=parameters) as system:
        async with client_of(system) as client:
            if streams:
                async with client.chat.completions.stream(**asked, messages=ASKED) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked, messages=ASKED)).choices[0].message
            turn = message.model_dump(exclude_none=True, exclude={"parsed"})
            assert turn["reasoning_content"] == "Hm."
            assert [
                {name: block[name] for name in block if name not in ("index", "position")}
                for block in turn["thinking_blocks"]
            ] == [
                THOUGHT,
                HIDDEN,
            ]
            if not keeps:
                turn = {name: turn[name] for name in ("role", "tool_calls")}
            result = {"role": "tool", "tool_call_id": "toolu_1", "content": "7"}
            await client.chat.completions.create(**asked, messages=[*ASKED, turn, result])
        # Whose client does not send the thoughts back is answered without new ones.
        assert server.asked[1].body.get("thinking") == (ENABLED if keeps else None)
        if keeps:
            assert server.asked[1].body["messages"][1]["content"][:2] == [THOUGHT, HIDDEN]


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"max_tokens": 1024}, False),
        ({"tools": [TOOL], "tool_choice": "auto"}, True),
        ({"tools": [TOOL], "tool_choice": "required"}, False),
    ],
)
async def test_configured_thinking_yields_to_what_the_caller_asks_for(fields, thinks):
    parameters = {"thinking": ENABLED, "max_tokens": 4096}
    async with ScriptedAnthropic([Reply(text("x"))]) as server, behind(server, parameters=parameters) as system:
        assert (await system.chat(**{"max_tokens": 2048, **fields})).status_code == 200
        assert ("thinking" in server.asked[0].body) is thinks


async def test_a_caller_who_does_not_want_thoughts_gets_none():
    async with ScriptedAnthropic([Reply(THOUGHT_AND_CALL)]) as server, behind(server) as system:
        answer = await system.chat(tools=[TOOL], include_reasoning=False)
        assert "Hm." not in answer.text
        asked = {"model": MODEL, "max_tokens": 20, "messages": ASKED[1:]}
        answer = await system.client.post("/v1/messages", json=asked, headers=VERSION)
        assert [block["type"] for block in answer.json()["content"]] == ["tool_use"]


CUT_CALL = [
    start(10, 0),
    *block(
        *(0, {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}),
        {"type": "input_json_delta", "partial_json": '{"city": "Par'},
    ),
    *end("max_tokens", 7),
]


async def test_a_call_that_max_tokens_cuts_is_an_end():
    async with ScriptedAnthropic([Reply(CUT_CALL)]) as server, behind(server) as system:
        choice = (await system.chat(tools=[TOOL])).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]) == (
            *("length", '{"city": "Par'),
        )
        asked = {"model": MODEL, "max_tokens": 20, "messages": ASKED[1:]}
        whole = (await system.client.post("/v1/messages", json=asked, headers=VERSION)).json()
        assert (whole["stop_reason"], whole["content"]) == (
            *("max_tokens", [{"type": "text", "text": 'look({"city": "Par'}]),
        )
        streamed = await system.client.post("/v1/messages", json={**asked, "stream": True}, headers=VERSION)
        assert '"partial_json":"{\\"city\\": \\"Par"' in streamed.text
        assert '"stop_reason":"max_tokens"' in streamed.text
        assert len(server.asked) == 3
        assert all(event.output_tokens == 7 for event in system.ledger.events)


@pytest.mark.parametrize(
    ("reason", "told", "finish"), [("pause_turn", "pause_turn", "length"), ("refusal", "refusal", "content_filter")]
)
async def test_an_end_that_only_messages_has_a_word_for(reason, told, finish):
    async with ScriptedAnthropic([Reply(text("x", stop_reason=reason))]) as server, behind(server) as system:
        assert (await system.chat()).json()["choices"][0]["finish_reason"] == finish
        asked = {"model": MODEL, "max_tokens": 20, "messages": ASKED[1:]}
        assert (await system.client.post("/v1/messages", json=asked, headers=VERSION)).json()["stop_reason"] == told


async def test_the_stop_sequence_is_named_between_clients_and_servers_of_messages():
    events = text("x", stop_reason="stop_sequence")
    events[-2] = {**events[-2], "delta": {"stop_reason": "stop_sequence", "stop_sequence": "END"}}
    async with ScriptedAnthropic([Reply(events)]) as server, behind(server) as system:
        asked = {"model": MODEL, "max_tokens": 20, "messages": ASKED[1:], "stop_sequences": ["END"]}
        whole = (await system.client.post("/v1/messages", json=asked, headers=VERSION)).json()
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
        assert server.asked[0].body["stop_sequences"] == ["END"]


async def test_a_body_that_ends_after_the_reason_for_its_end_is_whole():
    async with ScriptedAnthropic([Reply(CUT[:-1])]) as server, behind(server) as system:
        answer = (await system.chat()).json()
        assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == ("".join(WORDS), 3)
        assert len(server.asked) == 1


def test_its_last_event_needs_no_blank_line():
    delta = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "See."}}
    end = {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"input_tokens": 5, "output_tokens": 3},
    }
    parser = EventStreamParser("there", MessagesStreamParser())
    parser.feed(b"data: " + json.dumps(delta).encode() + b"\n\n")
    assert parser.feed(b"data: " + json.dumps(end).encode()) is None
    batch = parser.on_end(is_framed=True)
    assert ([part.finish for part in batch.parts], batch.usage, batch.whole) == ([FinishReason.STOP], Usage(5, 3), True)
    assert parser.is_complete


WHOLE = {
    **{"id": "msg_1", "type": "message", "role": "assistant", "model": "scripted"},
    "content": [
        THOUGHT,
        {"type": "text", "text": "See."},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ],
    **{"stop_reason": "tool_use", "stop_sequence": None, "usage": {"input_tokens": 10, "output_tokens": 7}},
}


async def test_an_answer_in_one_piece_is_one_though_a_stream_was_asked_for():
    whole = json.dumps(WHOLE, indent=1)
    reply = Reply([whole[:50], whole[50:]], content_type="application/json")
    async with ScriptedAnthropic([reply]) as server, behind(server) as system:
        answer = (await system.chat(tools=[TOOL])).json()
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("See.", "Hm.")
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (10, 7)
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}), 503),
        (json.dumps({"error": {"type": "invalid_request_error", "message": "max_tokens: too many"}}), 400),
        (json.dumps({**WHOLE, "stop_reason": None}), 502),
        (json.dumps(WHOLE)[:-9], 502),
        ("{}", 502),
        ("[1]", 502),
    ],
)
async def test_another_object_in_place_of_a_stream_is_no_answer(body, status):
    async with ScriptedAnthropic([Reply([body], content_type="application/json")]) as server, behind(server) as system:
        assert (await system.chat()).status_code == status


CUT = text(*WORDS)
BROKEN = {
    "cut before its end": Reply(CUT[:4], cut=True),
    "no reason for the end": Reply([*CUT[:-2], CUT[-1]]),
    "a block lost": Reply([CUT[0], *CUT[2:]]),
    "an error in its middle": Reply([*CUT[:4], error("overloaded_error", "secret words")]),
    "no JSON": Reply([*CUT[:4], "data: {oops\n\n"]),
    "half an event": Reply([*CUT[:4], 'event: content_block_delta\ndata: {"type": "content_bl']),
}


@pytest.mark.parametrize("reply", BROKEN.values(), ids=BROKEN)
async def test_an_answer_that_is_not_whole_never_looks_so(reply):
    async with ScriptedAnthropic([reply]) as server, behind(server) as system:
        answer = await system.chat()
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "replica_lost"
        assert "secret words" not in answer.text
        streamed, cut = b"", False
        body = {"model": MODEL, "messages": ASKED, "stream": True}
        try:
            async with system.client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for piece in response.aiter_bytes():
                    streamed += piece
        except httpx.RemoteProtocolError:
            cut = True
        # If all of it came at once, nothing had been passed on yet.
        assert cut or response.status_code == 502
        assert b"[DONE]" not in streamed
        assert b'"finish_reason":"stop"' not in streamed
        assert b"replica_lost" in streamed
        await system.wait_until(lambda: system.nothing_left)


@pytest.mark.parametrize(
    ("reply", "status", "code"),
    [
        (Reply(status=529, error=("overloaded_error", "x"), headers={"retry-after": "7"}), 503, "replica_unavailable"),
        (Reply(status=429, error=("rate_limit_error", "x"), headers={"retry-after": "7"}), 503, "replica_unavailable"),
        (Reply(status=401, error=("authentication_error", "x")), 503, "replica_unavailable"),
        (Reply(status=400, error=("invalid_request_error", "max_tokens: too many")), 400, "invalid_value"),
        (Reply(status=500), 502, "replica_lost"),
        (Reply([error("overloaded_error", "x")]), 503, "replica_unavailable"),
        (Reply([start(3, 0), error("api_error", "x")]), 502, "replica_lost"),
        (Reply(["<html>"], content_type="text/html"), 502, "replica_lost"),
        (Reply(), 502, "replica_lost"),
    ],
)
async def test_a_refusal_keeps_its_finish_reason(reply, status, code):
    async with ScriptedAnthropic([reply]) as server, behind(server) as system:
        answer = await system.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        if "retry-after" in reply.headers:
            assert answer.headers["retry-after"] == "7"
        if status == 400:
            assert "max_tokens: too many" in answer.json()["error"]["message"]


async def test_what_the_api_cannot_say_is_refused_before_anybody_is_asked():
    async with ScriptedAnthropic([Reply(text("x"))]) as server, behind(server) as system:
        answer = await system.chat(presence_penalty=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "presence_penalty")
        answer = await system.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert answer.status_code == 400
        assert server.asked == []


async def test_silence_in_the_middle_is_a_failure_and_the_connection_is_closed():
    async with ScriptedAnthropic([Reply(CUT[:4], stall=True)]) as server:
        async with behind(server, idle_timeout_s=0.2) as system:
            answer = await system.chat()
            assert answer.status_code == 502
            await system.wait_until(lambda: server.left == 1)
            await system.wait_until(lambda: system.nothing_left)
