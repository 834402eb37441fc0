"""Cases of the compliance suite of Open Responses (https://www.openresponses.org/compliance), on one running server.

The cases about WebSockets are in `test_responses_websocket`.
"""

import pytest

from maitred.testing.script import ScriptedAnswer
from tests.conformance.open_responses import COMPACTED, RESPONSE, read_stream, validate
from tests.conformance.test_responses import END, serving
from tests.integration.upstream.test_upstream_passing import Server, chunk, running
from tests.support.gateway import MODEL
from tests.support.stores import response_routes
from tests.support.tool_models import save_tool_tokenizer
from tests.support.upstream_gateway import upstream_gateway

WORDS = "Ahoy there, matey."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


def message(role, content, **members):
    return {"type": "message", "role": role, "content": content, **members}


CASES = {
    "basic": {"input": [message("user", "Say hello in three words.")]},
    "system prompt": {"input": [message("system", "You are a pirate."), message("user", "Say hello.")]},
    "tool call": {"input": [message("user", "How is the weather in Paris?")], "tools": [WEATHER]},
    "multi-turn": {
        "input": [
            message("user", "My name is Alice."),
            message("assistant", "Hello Alice! What can I do?"),
            message("user", "What is my name?"),
        ]
    },
    "assistant phases": {
        "input": [
            message("user", "Look it up."),
            message("assistant", "I look.", phase="commentary"),
            message("assistant", "It is so.", phase="final_answer"),
            message("user", "Thanks."),
        ]
    },
}


def check(case, response):
    """Checks a response to a case, beyond its shape."""
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
    (item,) = response["output"]
    if case == "tool call":
        assert (item["name"], item["arguments"]) == ("get_weather", '{"location": "Paris"}')
    else:
        assert [part["text"] for part in item["content"]] == [WORDS]


async def test_the_cases_hold_whole_and_streamed(tmp_path, subtests):
    tokenizer = save_tool_tokenizer(tmp_path / "model", "hermes")

    def answer(request):
        calls = "get_weather" in tokenizer.decode(request.prompt, skip_special_tokens=False)
        return ScriptedAnswer(tokens=[*tokenizer.encode(CALL if calls else WORDS, add_special_tokens=False), END])

    async with serving(tmp_path / "store", answer, tokenizer) as (system, _):
        for case, body in CASES.items():
            with subtests.test(case):
                whole = await system.client.post("/v1/responses", json={"model": MODEL, **body})
                validate(RESPONSE, whole.json())
                check(case, whole.json())
            with subtests.test(f"{case}, streamed"):
                streamed = await system.client.post("/v1/responses", json={"model": MODEL, **body, "stream": True})
                check(case, read_stream(streamed.content)[-1]["response"])
        with subtests.test("stored"):
            stored = await system.client.get(f"/v1/responses/{whole.json()['id']}")
            assert stored.json() == whole.json()
            replayed = await system.client.get(f"/v1/responses/{whole.json()['id']}", params={"stream": "true"})
            assert read_stream(replayed.content)[-1]["response"] == whole.json()
        with subtests.test("compaction"):
            compacting = {"input": CASES["multi-turn"]["input"], "prompt_cache_key": "alice"}
            compacted = await system.client.post("/v1/responses/compact", json={"model": MODEL, **compacting})
            validate(COMPACTED, compacted.json())
            assert [item["type"] for item in compacted.json()["output"]] == ["message", "message", "compaction"]
            refused = await system.client.post("/v1/responses/compact", json=compacting)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        with subtests.test("compaction before the answer"):
            body = {**CASES["multi-turn"], "context_management": [{"type": "compaction", "compact_threshold": 1}]}
            streamed = await system.client.post("/v1/responses", json={"model": MODEL, **body, "stream": True})
            output = read_stream(streamed.content)[-1]["response"]["output"]
            assert [item["type"] for item in output] == ["compaction", "message"]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_image_reaches_a_server_that_reads_it(tmp_path, streams):
    server = Server([chunk(role="assistant", content=WORDS), chunk(finish="stop")])
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": PIXEL}]
    async with running(server.answer) as url, response_routes(tmp_path) as further:  # noqa: SIM117
        async with upstream_gateway(f"{url}/v1", dialect="openai", further=further) as system:
            body = {"model": "far", "input": [message("user", parts)], "stream": streams}
            answer = await system.client.post("/v1/responses", json=body)
    response = read_stream(answer.content)[-1]["response"] if streams else answer.json()
    validate(RESPONSE, response)
    check("image input", response)
    (sent,) = server.bodies
    assert sent["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": PIXEL}}
