"""What a client says reaches the model that answers, is refused by its name, or is named as ignored."""

import json
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from maitred.replica.upstream.config import UpstreamConfig, upstream_faults
from maitred.testing.scripted_anthropic import Reply, ScriptedAnthropic, text
from maitred.wire.openai.decode import decode_chat
from tests.support.gateway import MODEL as OWN
from tests.support.gateway import gateway
from tests.support.upstream_gateway import MODEL, upstream_gateway

USER = {"role": "user", "content": "Hello there"}
ANSWER = [
    {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hi"}}]},
    {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"id": "c", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}},
]
TEXT = [
    {"id": "c", "choices": [{"index": 0, "text": "Hi", "finish_reason": "stop"}]},
    {"id": "c", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}},
]
SCORED = [None, {"5": {"logprob": -1.5, "rank": 2, "decoded_token": "Hi"}, "7": {"logprob": -0.5, "rank": 1}}]
ECHOED = {"tokens": ["Oh", "Hi"], "token_logprobs": [None, -1.5], "top_logprobs": [None, {"Hi": -1.5}]}
"""What vLLM says of a prompt of two tokens: in a chat beside the choices, in a text completion within the choice."""
WHOLE = {
    "chat/completions": {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
        "prompt_logprobs": SCORED,
    },
    "completions": {
        "choices": [
            {
                "index": 0,
                "text": "OhHi",
                "logprobs": {**ECHOED, "text_offset": [0, 2]},
                "finish_reason": "length",
                "prompt_logprobs": SCORED,
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    },
}
PASSED = {
    "vllm": {"cache_salt": "s", "allowed_token_ids": [1], "bad_words": ["x"], "return_token_ids": True, "top_k": 3},
    "sglang": {"regex": "[0-9]+", "separate_reasoning": False},
    "llamacpp": {"grammar": 'root ::= "a"', "mirostat": 2, "samplers": ["top_k"]},
    "openai": {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}, "metadata": {"a": "b"}},
    "generic": {"thinking": {"type": "enabled"}, "reasoning": {"effort": "low"}, "cache_control": {"type": "x"}},
    "groq": {"reasoning_format": "raw", "citation_options": "enabled"},
    "together": {"reasoning": {"enabled": True}, "context_length_exceeded_behavior": "truncate"},
}
REFUSED = {
    "vllm": {"thinking": {"type": "enabled"}, "kv_transfer_params": {"remote_host": "x"}, "prefix": 0, "regex": "a"},
    "generic": {"cache_salt": "s", "models": ["a"], "audio_in": 0, "functions": [{"name": "f"}]},
    "openai": {"allowed_token_ids": [1], "continue_final_message": True, "top_k": 2, "max_output_tokens": 9},
    "ollama": {"n": 2, "logit_bias": {"1": 1}, "options": {"num_predict": 9}},
    "transformers": {"generation_config": "{}", "parallel_tool_calls": False},
}
NOTHING = ({"modalities": ["text"]}, {"functions": []}, {"function_call": "none"}, {"logit_bias": {}}, {"n": 1})


class Server:
    """A server of OpenAI's API that keeps the bodies it gets."""

    def __init__(self):
        self.bodies = []
        self.events = ANSWER

    async def handle(self, request):
        if request.method == "GET":
            return web.json_response({"data": []})
        self.bodies.append(await request.json())
        if not self.bodies[-1].get("stream"):
            return web.json_response({"id": "c", "created": 0, **WHOLE[request.path.removeprefix("/v1/")]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events if request.path.endswith("chat/completions") else TEXT:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def behind(**settings):
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        async with upstream_gateway(f"http://127.0.0.1:{port}/v1", **settings) as system:
            yield server, system
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("dialect", PASSED)
async def test_what_the_dialect_has_is_passed_on_as_it_was_written(dialect):
    async with behind(dialect=dialect) as (server, system):
        answer = await system.chat(**PASSED[dialect])
    assert answer.status_code == 200, answer.text
    assert {name: server.bodies[-1].get(name) for name in PASSED[dialect]} == PASSED[dialect]
    assert "x-maitred-ignored" not in answer.headers


async def test_token_ids_of_the_server_come_once():
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    async with behind(dialect="vllm") as (server, system):
        server.events = [
            {"prompt_token_ids": [1, 2, 3], "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"index": 0, "delta": {"content": "Hi"}, "token_ids": [7]}]},
            {"choices": [{"index": 0, "delta": {"content": "!"}, "token_ids": [8], "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        whole = (await system.chat(return_token_ids=True)).json()
        streamed = await system.chat(
            return_token_ids=True,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([1, 2, 3], [7, 8])
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    told = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [choice["token_ids"] for choice in told if "token_ids" in choice] == [[7], [8]]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [[1, 2, 3]]
    assert all(chunk["usage"]["total_tokens"] for chunk in chunks)


async def test_log_probabilities_of_a_prompt_are_asked_of_vllm_which_has_no_stream_for_them():
    async with behind(dialect="vllm") as (server, system):
        answer = await system.chat(prompt_logprobs=1)
        assert (answer.status_code, answer.json().get("prompt_logprobs")) == (200, SCORED), answer.text
        assert server.bodies[-1]["prompt_logprobs"] == 1
        assert server.bodies[-1].keys() & {"stream", "stream_options"} == set()
        fields = {"prompt": "OhHi", "echo": True, "logprobs": 1, "prompt_logprobs": -1, "max_tokens": 0}
        answer = await system.client.post("/v1/completions", json={"model": MODEL, **fields})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["prompt_logprobs"]) == ("OhHi", SCORED)
        assert choice["logprobs"] == {**ECHOED, "text_offset": [0, 2]}
        assert {name: server.bodies[-1][name] for name in fields} == fields
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage.get("estimated")) == (2, 0, None)
        streamed = await system.chat(prompt_logprobs=0, stream=True)
        assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "prompt_logprobs")
    async with behind(dialect="openai") as (server, system):
        answer = await system.chat(prompt_logprobs=1)
        assert (answer.status_code, answer.json()["error"]["param"], server.bodies) == (400, "prompt_logprobs", [])


@pytest.mark.parametrize("dialect", REFUSED)
async def test_what_changes_the_answer_and_the_dialect_lacks_is_refused_by_its_name(dialect):
    async with behind(dialect=dialect) as (server, system):
        for field, value in REFUSED[dialect].items():
            answer = await system.chat(**{field: value or None})
            error = answer.json().get("error", {})
            assert (answer.status_code, error.get("param")) == ((400, field) if value else (200, None)), field
        assert len(server.bodies) == sum(not value for value in REFUSED[dialect].values())


@pytest.mark.parametrize("dialect", ["openai", "generic", "groq", "transformers"])
async def test_what_asks_for_nothing_is_no_reason_to_refuse(dialect):
    async with behind(dialect=dialect) as (_, system):
        for fields in NOTHING:
            answer = await system.chat(**fields)
            assert (answer.status_code, answer.headers.get("x-maitred-ignored")) == (200, None), fields


async def test_hints_that_the_server_lacks_and_unknown_fields_are_left_out_and_named():
    hints = {"user": "u", "verbosity": "low", "colour": "red"}
    async with behind(dialect="ollama") as (server, system):
        whole = await system.chat(**hints)
        streamed = await system.chat(**hints, stream=True, stream_options={"include_obfuscation": True})
        plain = await system.chat()
    assert (whole.status_code, whole.headers["x-maitred-ignored"]) == (200, "user, colour")
    assert streamed.headers["x-maitred-ignored"] == "user, colour, stream_options.include_obfuscation"
    assert server.bodies[0]["verbosity"] == "low"
    assert server.bodies[0].keys() & {"user", "colour"} == set()
    assert "x-maitred-ignored" not in plain.headers


async def test_text_completions_follow_their_own_lists():
    async with behind(dialect="vllm") as (server, system):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 4}
        answer = await system.client.post("/v1/completions", json={**body, "bad_words": ["x"], "session_id": "s"})
        assert (answer.status_code, server.bodies[-1]["bad_words"], server.bodies[-1]["session_id"]) == (
            200,
            ["x"],
            "s",
        )
        answer = await system.client.post("/v1/completions", json={**body, "max_completion_tokens": 99})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_completion_tokens")
        answer = await system.client.post("/v1/completions", json={**body, "add_special_tokens": True})
        assert answer.status_code == 200


async def test_members_of_messages_and_calls_reach_the_server():
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
        "extra_content": {"google": {"thought_signature": "abc"}},
    }
    custom = {"id": "c2", "type": "custom", "custom": {"name": "g", "input": "x"}}
    messages = [
        {**USER, "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "tool_calls": [call, custom], "reasoning_details": [{"a": 1}]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "Well", "prefix": True},
    ]
    with_nulls = [{**message, "audio": None, "refusal": None} for message in messages]
    async with behind(dialect="generic") as (server, system):
        assert (await system.chat(messages=with_nulls)).status_code == 200
    assert server.bodies[-1]["messages"] == messages


async def test_an_operator_can_allow_further_fields():
    provider, order = {"order": ["a"]}, {"a": 1}
    async with behind(dialect="openai", request_fields=["provider"], parameters={"order": 0}) as (server, system):
        assert (await system.chat(provider=provider, order=order)).status_code == 200
    assert (server.bodies[-1]["provider"], server.bodies[-1]["order"]) == (provider, order)


def test_no_operator_lets_clients_pass_by_the_limits():
    upstream = UpstreamConfig(url="http://127.0.0.1:9/v1", request_fields=["max_new_tokens", "provider", "model"])
    assert [setting for setting, _ in upstream_faults([upstream], "m.upstreams")] == [
        "m.upstreams[0].request_fields"
    ] * 2


@pytest.mark.parametrize("dialect", ["vllm", "openai"])
async def test_an_answer_that_a_client_of_messages_has_begun_is_continued_where_the_server_can(dialect):
    begun = [USER, {"role": "assistant", "content": "The answer"}]
    body = {"model": MODEL, "max_tokens": 9, "messages": begun}
    async with behind(dialect=dialect) as (server, system):
        answer = await system.client.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    if dialect == "openai":
        assert (answer.status_code, server.bodies) == (400, [])
        assert "End messages with one of the role user." in answer.json()["error"]["message"]
        return
    assert answer.status_code == 200, answer.text
    asked = server.bodies[-1]
    assert (asked["messages"], asked["continue_final_message"], asked["add_generation_prompt"]) == (begun, True, False)


async def test_a_server_that_speaks_anthropic_follows_the_same_lists():
    async with ScriptedAnthropic([Reply(text("Hi"))]) as server:
        async with upstream_gateway(server.url, kind="anthropic") as system:
            answer = await system.chat(seed=7, colour="red", n=1, modalities=["text"])
            assert (answer.status_code, answer.headers["x-maitred-ignored"]) == (200, "seed, colour")
            for field, value in {"n": 2, "logprobs": True, "guided_regex": "a", "allowed_token_ids": [1]}.items():
                answer = await system.chat(**{field: value})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            answer = await system.chat(messages=[USER, {"role": "assistant", "content": "A", "prefix": True}])
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].prefix")
            begun = [USER, {"role": "assistant", "content": "A"}]
            answer = await system.chat(messages=begun, continue_final_message=True, add_generation_prompt=False)
            assert (answer.status_code, answer.headers.get("x-maitred-ignored")) == (200, None), answer.text
        assert server.asked[-1].body["messages"] == begun


UNHEARD = {
    "chat_template": "x",
    "logprob_token_ids": [1],
    "return_prompt_text": True,
    "grammar": 'root ::= "a"',
    "regex": "[0-9]{3}",
    "max_new_tokens": 1,
    "use_beam_search": True,
    "echo": True,
    "cache_salt": "s",
    "thinking": {"type": "enabled"},
    "documents": [{"text": "a"}],
    "system": "Be brief.",
}


async def test_our_own_engine_refuses_by_name_what_it_would_not_heed():
    async with gateway() as system:
        for field, value in UNHEARD.items():
            answer = await system.chat(**{field: value})
            error = answer.json().get("error", {})
            assert (answer.status_code, error.get("param")) == (400, field), field
            assert error["message"].endswith("emove it."), error
        answer = await system.chat(messages=[USER, {"role": "assistant", "content": "A", "partial": True}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].partial")
        body = {"model": OWN, "prompt": "a", "max_tokens": 2, "tools": [{"type": "function"}]}
        answer = await system.client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_our_own_engine_names_the_hints_that_it_leaves_out():
    marked = {**USER, "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
    async with gateway() as system:
        answer = await system.chat(messages=[marked], metadata={"a": "b"}, store=True, colour="red", seed=1, user="u")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-maitred-ignored"] == "metadata, store, colour, messages.content.cache_control"
        streamed = await system.chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": True})
        assert streamed.headers["x-maitred-ignored"] == "stream_options.include_obfuscation"
        many = await system.chat(**{f"field{number}" + "x" * 100: 1 for number in range(40)}, ключ=1)
        assert many.headers["x-maitred-ignored"].endswith(", ...")
        assert len(many.headers["x-maitred-ignored"]) < 1200
        assert "x-maitred-ignored" not in (await system.chat(store=False, metadata={})).headers


async def test_messages_name_their_hints_and_refuse_the_rest():
    body = {"model": OWN, "max_tokens": 4, "messages": [USER]}
    headers = {"anthropic-version": "2023-06-01"}
    async with gateway() as system:

        async def message(**fields):
            return await system.client.post("/v1/messages", json={**body, **fields}, headers=headers)

        hints = {"speed": "fast", "output_config": {"effort": "low"}, "colour": "red", "metadata": {"user_id": "u"}}
        block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        answer = await message(**hints, system=[block])
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-maitred-ignored"] == "speed, colour, output_config.effort, system.cache_control"
        others = {"frequency_penalty": 0.5, "stop": ["a"], "logprobs": True, "n": 2}
        for field, value in {"container": "c", "thread": {"type": "create"}, "inference_geo": "us", **others}.items():
            answer = await message(**{field: value})
            assert (answer.status_code, field in answer.json()["error"]["message"]) == (400, True)
        counted = await system.client.post(
            "/v1/messages/count_tokens", json={"model": OWN, "messages": [USER], "speed": "fast"}, headers=headers
        )
        assert (counted.status_code, counted.headers["x-maitred-ignored"]) == (200, "speed")


async def test_messages_for_another_server_name_their_hints_and_pass_none_of_them_on():
    headers = {"anthropic-version": "2023-06-01"}
    hints = {"seed": 7, "user": "u", "speed": "fast", "colour": "red"}
    async with behind(dialect="vllm") as (server, system):
        body = {"model": MODEL, "max_tokens": 4, "messages": [USER], **hints}
        answer = await system.client.post("/v1/messages", json=body, headers=headers)
        assert (answer.status_code, answer.headers["x-maitred-ignored"]) == (200, "seed, user, speed, colour")
        assert server.bodies[-1].keys() & hints.keys() == set()


async def test_tokenize_refuses_what_would_make_other_tokens():
    async with gateway() as system:
        body = {"model": OWN, "messages": [USER]}
        answer = await system.client.post("/tokenize", json={**body, "continue_final_message": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")
        answer = await system.client.post("/tokenize", json={**body, "colour": "red"})
        assert (answer.status_code, answer.headers["x-maitred-ignored"]) == (200, "colour")


def test_the_body_is_kept_as_it_was_written():
    fields = {"model": "m", "messages": [USER], "temperature": 1, "colour": {"a": [1, None]}}
    assert decode_chat(msgspec.json.encode({**fields, "seed": None}), strict=False).sent == fields
