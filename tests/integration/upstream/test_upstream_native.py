"""Requests that reach a server in the API of their client: nothing is lost, and the gateway decides what is its own."""

import json

import anthropic
import openai
import pytest

from maitred.testing.scripted_anthropic import Reply, ScriptedAnthropic, text
from tests.integration.upstream.test_upstream_anthropic import MODEL, VERSION, behind
from tests.integration.upstream.test_upstream_passing import Server, chunk, running
from tests.support.stores import response_routes
from tests.support.upstream_gateway import upstream_gateway

CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
PNG = "iVBORw0KGgo="
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
HISTORY = [
    {
        "role": "user",
        "content": [
            {"type": "document", "source": PDF, "citations": {"enabled": True}, "context": "A tide table.", **CACHED},
            {"type": "document", "source": {"type": "url", "url": "https://e.x/a.pdf"}},
            {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
            {
                "type": "search_result",
                "source": "https://e.x",
                "title": "T",
                "content": [{"type": "text", "text": "x"}],
            },
            {"type": "text", "text": "When is the ebb?", **CACHED},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "sig"},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sea"}, **CACHED},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "is_error": True,
                "content": [{"type": "text", "text": "no sea", **CACHED}, {"type": "document", "source": PDF}],
                **CACHED,
            },
        ],
    },
]
ASKED = {
    "model": MODEL,
    "max_tokens": 2048,
    "system": [{"type": "text", "text": "Be brief.", **CACHED}],
    "messages": HISTORY,
    "tools": [
        {"name": "look", "input_schema": {"type": "object"}, "eager_input_streaming": True, **CACHED},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "mcp_servers": [{"type": "url", "url": "https://mcp.e.x", "name": "m"}],
    "container": "container_1",
    "context_management": {"edits": [{"type": "compact_20260112"}, {"type": "clear_tool_uses_20250919"}]},
    "service_tier": "standard_only",
    "metadata": {"user_id": "u"},
    "stop_sequences": ["END"],
    "output_config": {"effort": "low"},
    "a_field_of_tomorrow": {"x": 1},
}
DECIDED = {"stream": True, "model": MODEL}
BETAS = {"anthropic-beta": "context-management-2025-06-27,files-api-2025-04-14"}


async def test_everything_that_a_client_of_messages_says_reaches_a_server_of_messages():
    async with ScriptedAnthropic([Reply(text("Soon."))]) as server, behind(server) as system:
        for streams in (False, True):
            answer = await system.client.post(
                "/v1/messages", json={**ASKED, "stream": streams}, headers={**VERSION, **BETAS}
            )
            assert answer.status_code == 200, answer.text
            assert "x-maitred-ignored" not in answer.headers
            asked = server.asked[-1]
            assert asked.body == {**ASKED, **DECIDED}
            assert asked.headers["anthropic-beta"] == BETAS["anthropic-beta"]
        await system.wait_until(lambda: system.nothing_left)
        assert [event.output_tokens for event in system.ledger.events] == [1, 1]


async def test_what_the_operator_decides_is_not_the_clients_to_say():
    own = {"speed": "fast", "fallbacks": [{"model": "dear"}], "workspace_id": "w", "anthropic_beta": ["x"]}
    async with ScriptedAnthropic([Reply(text("Soon."))]) as server, behind(server) as system:
        asked = {"model": MODEL, "max_tokens": 9, "messages": HISTORY[:1], **own}
        answer = await system.client.post("/v1/messages", json=asked, headers=VERSION)
        assert answer.headers["x-maitred-ignored"] == "speed, fallbacks, workspace_id, anthropic_beta"
        assert own.keys().isdisjoint(server.asked[0].body)
        for field in ("billing_policy", "inference_geo"):
            refused = await system.client.post("/v1/messages", json={**asked, field: "eu"}, headers=VERSION)
            assert refused.status_code == 400
            assert field in refused.json()["error"]["message"]
        headers = {**VERSION, "anthropic-beta": 'a"b'}
        refused = await system.client.post("/v1/messages", json=asked, headers=headers)
        assert refused.status_code == 400
        assert "anthropic-beta" in refused.json()["error"]["message"]
        assert len(server.asked) == 1


async def test_what_another_model_has_said_is_sent_as_a_server_of_messages_takes_it():
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Another model's.", "signature": ""},
                {"type": "tool_use", "id": "call:1", "name": "f", "input": {}, "extra_content": {"google": {}}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call:1", "content": "1"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "More.", "signature": ""}]},
        {"role": "user", "content": "Well?"},
    ]
    async with ScriptedAnthropic([Reply(text("x"))]) as server, behind(server) as system:
        asked = {"model": MODEL, "max_tokens": 9, "messages": messages}
        assert (await system.client.post("/v1/messages", json=asked, headers=VERSION)).status_code == 200
        sent = server.asked[0].body["messages"]
    (call,) = sent[1]["content"]
    assert call.keys() == {"type", "id", "name", "input"}
    assert call["id"].startswith("toolu_")
    assert sent[2]["content"][0]["tool_use_id"] == call["id"]
    assert sent[3:] == messages[4:]


@pytest.mark.parametrize("part", [HISTORY[0]["content"][1], HISTORY[0]["content"][2], HISTORY[0]["content"][3]])
async def test_a_server_of_another_api_is_not_asked_what_it_cannot_read(part):
    server = Server([chunk(content="x"), chunk(finish="stop")])
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1") as system:
        asked = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": [part]}]}
        refused = await system.client.post("/v1/messages", json=asked, headers=VERSION)
        assert refused.status_code == 400
        assert "messages[0].content[0] is of the type" in refused.json()["error"]["message"]
        assert server.bodies == []


async def test_pictures_and_files_reach_servers_of_either_api(tmp_path):
    url = f"data:image/png;base64,{PNG}"
    image = {"type": "image_url", "image_url": {"url": url, "detail": "high"}}
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF['data']}"}}
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    question = {"type": "text", "text": "What?"}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    server = Server([chunk(content="x"), chunk(finish="stop")])
    async with running(server.answer) as address, response_routes(tmp_path) as further:
        behind_it = upstream_gateway(f"{address}/v1", further=further)
        async with behind_it as system:
            async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
                parts = [question, image, file, sound]
                await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
                given = [
                    {"type": "input_text", "text": "What?"},
                    {"type": "input_image", "image_url": url, "detail": "high"},
                    {"type": "input_file", "filename": "a.pdf", "file_data": file["file"]["file_data"]},
                ]
                await client.responses.create(model=MODEL, input=[{"role": "user", "content": given}])
            document = {"type": "document", "title": "a.pdf", "source": PDF, "citations": {"enabled": True}}
            asked = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": [block, document]}]}
            answer = await system.client.post("/v1/messages", json=asked, headers=VERSION)
            assert answer.headers["x-maitred-ignored"] == "messages.content.citations"
    contents = [body["messages"][0]["content"] for body in server.bodies]
    assert contents[:2] == [parts, parts[:3]]
    assert contents[2] == [{**image, "image_url": {"url": url}}, file]
    async with ScriptedAnthropic([Reply(text("x"))]) as anthropic_server, behind(anthropic_server) as system:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": [image, file]}]}
        assert (await system.client.post("/v1/chat/completions", json=asked)).status_code == 200
        (message,) = anthropic_server.asked[0].body["messages"]
        assert message["content"] == [block, {"type": "document", "title": "a.pdf", "source": PDF}]


async def test_tokens_are_counted_by_the_server_where_it_can_be_asked():
    asked = {name: ASKED[name] for name in ("model", "system", "messages", "tools", "thinking", "context_management")}
    async with ScriptedAnthropic([Reply(text("x"))]) as server, behind(server) as system:
        server.token_count = {"input_tokens": 42, "context_management": {"original_input_tokens": 50}}
        async with anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0) as client:
            counted = await client.beta.messages.count_tokens(**asked)
        assert (counted.input_tokens, counted.context_management.original_input_tokens) == (42, 50)
        assert server.asked[0].path == "/v1/messages/count_tokens"
        assert server.asked[0].body == asked


async def test_tokens_are_estimated_where_no_server_counts_them():
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a" * 400}]}
    async with ScriptedAnthropic([Reply(status=529)]) as server, behind(server) as system:
        answer = await system.client.post("/v1/messages/count_tokens", json=asked, headers=VERSION)
        assert answer.json() == {"input_tokens": 106, "estimated": True}
    refusal = Reply(status=400, error=("invalid_request_error", "No such tool."))
    async with ScriptedAnthropic([refusal]) as server, behind(server) as system:
        answer = await system.client.post("/v1/messages/count_tokens", json=asked, headers=VERSION)
        assert answer.status_code == 400
        assert "No such tool." in answer.json()["error"]["message"]
    server = Server([chunk(content="x"), chunk(finish="stop")])
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1") as system:
        answer = await system.client.post("/v1/messages/count_tokens", json=asked, headers=VERSION)
        assert json.loads(answer.text) == {"input_tokens": 106, "estimated": True}
        assert server.bodies == []


async def test_the_context_is_edited_here_for_servers_that_do_not():
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "A long story. " * 50}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 0},
        "keep": {"type": "tool_uses", "value": 0},
    }
    asked = {"model": MODEL, "max_tokens": 9, "messages": messages, "context_management": {"edits": [edit]}}
    server = Server([chunk(content="x"), chunk(finish="stop")])
    async with running(server.answer) as url, upstream_gateway(f"{url}/v1") as system:
        async with anthropic.AsyncAnthropic(base_url=system.url, api_key="none", max_retries=0) as client:
            whole = await client.beta.messages.create(**asked)
            async with client.beta.messages.stream(**asked) as events:
                streamed = await events.get_final_message()
            del asked["max_tokens"]
            counted = await client.beta.messages.count_tokens(**asked)
        for message in (whole, streamed):
            (applied,) = message.context_management.applied_edits
            assert (applied.type, applied.cleared_tool_uses) == (edit["type"], 1)
            assert (
                applied.cleared_input_tokens == counted.context_management.original_input_tokens - counted.input_tokens
            )
        assert applied.cleared_input_tokens > 100
        sent = server.bodies[0]["messages"][-1]
        assert sent == {"role": "tool", "tool_call_id": "t1", "content": "[Old tool result content cleared]"}
