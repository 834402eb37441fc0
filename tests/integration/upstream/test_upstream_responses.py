"""Models of other servers asked through the Responses API: what they say comes through, and goes back to them."""

import openai
import pytest

from maitred.testing.scripted_anthropic import Reply, ScriptedAnthropic
from tests.integration.upstream.test_upstream_anthropic import HIDDEN, THOUGHT, THOUGHT_AND_CALL
from tests.integration.upstream.test_upstream_passing import Server, chunk, running
from tests.support.stores import response_routes
from tests.support.upstream_gateway import MODEL, upstream_gateway

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}


def client_of(system):
    return openai.AsyncOpenAI(
        base_url=f"{system.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stores", [False, True])
async def test_signed_thoughts_go_back_to_their_server(tmp_path, streams, stores):
    asked = {"model": MODEL, "tools": [LOOK], "store": stores}
    parameters = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4096}
    if not stores:
        asked["include"] = ["reasoning.encrypted_content"]
    async with ScriptedAnthropic([Reply(THOUGHT_AND_CALL)]) as server, response_routes(tmp_path) as further:
        behind = upstream_gateway(server.url, kind="anthropic", parameters=parameters, further=further)
        async with behind as system, client_of(system) as client:
            if streams:
                async with client.responses.stream(**asked, input="Where is the fox?") as stream:
                    response = await stream.get_final_response()
            else:
                response = await client.responses.create(**asked, input="Where is the fox?")
            reasoning, call = response.output
            assert (reasoning.content[0].text, call.name) == ("Hm.", "look")
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
            if stores:
                await client.responses.create(**asked, input=[result], previous_response_id=response.id)
            else:
                items = [item.model_dump(exclude_unset=True) for item in response.output]
                items[0].pop("content")  # some clients keep the text of none, and the encoded one of each
                await client.responses.create(
                    **asked, input=[{"role": "user", "content": "Where is the fox?"}, *items, result]
                )
    assert server.asked[1].body["messages"][1]["content"][:2] == [THOUGHT, HIDDEN]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_server_gets_what_the_client_sent_and_the_client_what_the_server_said(tmp_path, streams):
    cited = {
        "type": "url_citation",
        "url_citation": {"url": "http://a", "title": "A", "start_index": 0, "end_index": 2},
    }
    signed = {"google": {"thought_signature": "SIG"}}
    piece = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    server = Server(
        [
            {**chunk(role="assistant", content="So."), "system_fingerprint": "fp"},
            chunk(annotations=[cited]),
            chunk(tool_calls=[{**piece, "extra_content": signed}]),
            chunk(finish="tool_calls"),
        ]
    )
    async with running(server.answer) as url, response_routes(tmp_path) as further:
        behind = upstream_gateway(f"{url}/v1", dialect="openai", further=further)
        async with behind as system, client_of(system) as client:
            asked = {
                "model": MODEL,
                "tools": [LOOK, PATCH, {"type": "web_search"}],
                "instructions": "Be kind.",
                "reasoning": {"effort": "low"},
                "text": {"verbosity": "low", "format": {"type": "json_object"}},
                "prompt_cache_key": "k",
                "safety_identifier": "s",
                "max_output_tokens": 50,
            }
            if streams:
                async with client.responses.stream(**asked, input="Look") as stream:
                    response = await stream.get_final_response()
            else:
                response = await client.responses.create(**asked, input="Look")
            message, call = response.output
            assert message.content[0].annotations[0].url == "http://a"
            assert response.system_fingerprint == "fp"
            assert call.extra_content == signed
            stored = await client.responses.retrieve(response.id)
            assert stored.system_fingerprint == "fp"
            assert (stored.completed_at, stored.usage) == (response.completed_at, response.usage)
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
            await client.responses.create(**asked, input=[result], previous_response_id=response.id)
            counting = {"model": MODEL, "input": "Look", "tools": asked["tools"]}
            counted = await client.responses.input_tokens.with_raw_response.count(**counting)
            without_tools = await client.responses.input_tokens.count(model=MODEL, input="Look")
            assert counted.parse().estimated is True
            assert counted.parse().input_tokens > without_tools.input_tokens > 0
            assert "web_search" in counted.headers["x-maitred-ignored"]
    first, second = server.bodies
    assert first["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Look"}]
    assert [tool["type"] for tool in first["tools"]] == ["function", "custom"]
    assert first["tools"][1]["custom"]["format"]["grammar"] == {"syntax": "regex", "definition": "a+"}
    assert (first["reasoning_effort"], first["verbosity"], first["max_completion_tokens"]) == ("low", "low", 50)
    assert (first["prompt_cache_key"], first["safety_identifier"]) == ("k", "s")
    assert first["response_format"] == {"type": "json_object"}
    assert second["messages"][2]["tool_calls"][0]["extra_content"] == signed
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "7"}
