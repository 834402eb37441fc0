"""What a caller says about caches is for the gateway: no server gets it, and no answer names it as ignored."""

import pytest

from maitred.replica.upstream.config import UpstreamConfig, upstream_faults
from maitred.testing.scripted_anthropic import Reply, ScriptedAnthropic, text
from maitred.testing.scripted_responses import Reply as Response
from maitred.testing.scripted_responses import ScriptedResponses, message, stream
from tests.integration.upstream.test_request_fields import behind
from tests.support.stores import response_routes
from tests.support.upstream_gateway import MODEL, upstream_gateway

USER = [{"role": "user", "content": "Hi"}]
CACHE = {"no-cache": True, "no-store": True, "ttl": 60, "s-maxage": 5, "namespace": "n"}
HEADERS = {"anthropic-version": "2023-06-01", "cache-control": "no-cache"}
ASKED = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/responses": {"input": "Hi"},
}
"""Path of each API -> a body."""


async def ask(system, path, **fields):
    return await system.client.post(path, json={"model": MODEL, **ASKED[path], **fields}, headers=HEADERS)


async def check(system, path, bodies):
    """A request with the field is for its server the same as one without."""
    plain = await ask(system, path)
    heard = await ask(system, path, cache=CACHE)
    assert (plain.status_code, heard.status_code) == (200, 200), heard.text
    assert "x-maitred-ignored" not in heard.headers
    first, second = bodies()
    assert first == second
    assert "cache" not in second


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("dialect", ["generic", "vllm", "litellm", "openai", "transformers"])
async def test_no_server_of_chat_completions_gets_it(tmp_path, path, dialect):
    async with response_routes(tmp_path) as further, behind(dialect=dialect, further=further) as (server, system):
        await check(system, path, lambda: server.bodies)


async def test_a_server_gets_the_operators_parameter_of_this_name_alone(tmp_path):
    async with behind(dialect="litellm", parameters={"cache": {"ttl": 1}}) as (server, system):
        assert (await ask(system, "/v1/chat/completions", cache=CACHE)).status_code == 200
        assert server.bodies[-1]["cache"] == {"ttl": 1}


@pytest.mark.parametrize("path", [path for path in ASKED if path != "/v1/completions"])
async def test_no_server_of_messages_gets_it(tmp_path, path):
    async with (
        ScriptedAnthropic([Reply(text("Hi"))]) as server,
        response_routes(tmp_path) as further,
        upstream_gateway(server.url, kind="anthropic", further=further) as system,
    ):
        await check(system, path, lambda: [asked.body for asked in server.asked])
        body = {"model": MODEL, "messages": USER, "cache": CACHE}
        counted = await system.client.post("/v1/messages/count_tokens", json=body, headers=HEADERS)
        assert (counted.status_code, counted.headers.get("x-maitred-ignored")) == (200, None)
        assert all("cache" not in asked.body for asked in server.asked)


@pytest.mark.parametrize("stores", [False, True])
async def test_no_server_of_responses_gets_it(tmp_path, stores):
    async with (
        ScriptedResponses([Response(stream(message("Hi")))]) as server,
        response_routes(tmp_path) as further,
        upstream_gateway(server.url, dialect="openai", responses=True, further=further) as system,
    ):
        for cache in ({}, {"cache": CACHE}):
            answer = await ask(system, "/v1/responses", store=stores, **cache)
            assert (answer.status_code, answer.headers.get("x-maitred-ignored")) == (200, None), answer.text
        first, second = [asked.body for asked in server.asked]
        assert first == second
        assert "cache" not in second


@pytest.mark.parametrize("path", ASKED)
async def test_a_wrong_value_is_refused_before_a_server_gets_anything(tmp_path, path):
    async with response_routes(tmp_path) as further, behind(dialect="vllm", further=further) as (server, system):
        for cache, name in (({"ttl": 0}, "cache.ttl"), ({"ttl_s": 5}, "cache.ttl_s"), (True, "cache")):
            answer = await ask(system, path, cache=cache)
            assert (answer.status_code, answer.json()["error"]["message"].startswith(f"{name} must ")) == (400, True)
        body = {"model": MODEL, **ASKED[path]}
        answer = await system.client.post(path, json=body, headers={**HEADERS, "cache-control": "max-age=x"})
        assert answer.status_code == 400
        assert "max-age" in answer.json()["error"]["message"]
        assert server.bodies == []


def test_no_operator_passes_it_on():
    upstream = UpstreamConfig(url="http://127.0.0.1:9/v1", request_fields=["cache"])
    assert [setting for setting, _ in upstream_faults([upstream], "m.upstreams")] == ["m.upstreams[0].request_fields"]
