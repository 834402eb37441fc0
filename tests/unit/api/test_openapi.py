"""The API's description of itself."""

import json
from types import SimpleNamespace

import jsonschema
import pytest

from maitred.api.config import ServerConfig
from maitred.api.in_flight import InFlightLimiter
from maitred.core.clock import SystemClock
from maitred.core.errors import InvalidRequest
from maitred.wire.anthropic.decode import decode_messages
from maitred.wire.openai.decode import decode_chat
from tests.support.applications import make_app


async def document():
    sent = []

    async def send(message):
        sent.append(message)

    edge = make_app(ServerConfig(), SimpleNamespace(rate_limit_status=None), None, InFlightLimiter(1), SystemClock())
    scope = {"type": "http", "method": "GET", "path": "/openapi.json", "headers": []}
    await edge(scope, None, send)
    return json.loads(sent[1]["body"])


async def test_it_names_every_route_and_resolves_every_reference():
    api = await document()
    assert api["openapi"] == "3.1.0"
    operations = {(method, path) for path, methods in api["paths"].items() for method in methods}
    assert operations == {
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("post", "/v1/messages"),
        ("post", "/v1/messages/count_tokens"),
        ("get", "/v1/queue/{id}"),
        ("post", "/tokenize"),
        ("post", "/detokenize"),
        ("get", "/"),
        ("get", "/health"),
        ("get", "/health/live"),
        ("get", "/health/ready"),
        ("get", "/version"),
        ("get", "/metrics"),
        ("get", "/openapi.json"),
    }
    identifiers = [operation["operationId"] for methods in api["paths"].values() for operation in methods.values()]
    assert len(identifiers) == len(set(identifiers))
    schemas = api["components"]["schemas"]
    for reference in references(api):
        assert reference.removeprefix("#/components/schemas/") in schemas


async def test_its_schemas_accept_what_the_server_accepts():
    api = await document()
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": api["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True})
    assert not validator.is_valid({"model": "m"})


def references(node):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from references(child)


@pytest.mark.parametrize(
    ("field", "right", "wrong"),
    [
        ("model", ["m"], [""]),
        ("messages", [[{"role": "user", "content": "Hi"}]], [[]]),
        ("max_tokens", [1, 2**31 - 1, None], [0, 2**31]),
        ("temperature", [0, 2, 1.5, None], [-0.1, 2.1]),
        ("top_p", [0.1, 1], [0, 1.1]),
        ("top_k", [-1, 0], [-2]),
        ("repetition_penalty", [0.01, 100], [0, 101]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("n", [1, 128], [0, 129]),
        ("seed", [-(2**63), 0], []),
        ("stop", ["a", [], ["a"] * 16, "a" * 1024], ["", [""], ["a"] * 17, "a" * 1025, ["a" * 1025]]),
        ("stop_token_ids", [[0], [1] * 128], [[-1], [1] * 129, [2**31]]),
        ("logit_bias", [{}, {"0": -100, "7": 100}], [{"0": 101}, {"a": 1}, {str(n): 1 for n in range(1025)}]),
        ("service_tier", ["auto", "flex", None], ["fast", ""]),
        ("priority", [1, 10], [0, 11]),
    ],
)
async def test_its_schemas_are_as_strict_as_the_rules_of_single_fields(field, right, wrong):
    """What the server decodes decides."""
    api = await document()
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": api["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    for values, is_right in ((right, True), (wrong, False)):
        for value in values:
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], field: value}
            assert validator.is_valid(body) == is_right, value
            if is_right:
                decode_chat(json.dumps(body).encode(), strict=True)
            else:
                with pytest.raises(InvalidRequest):
                    decode_chat(json.dumps(body).encode(), strict=True)


@pytest.mark.parametrize(
    ("block", "is_right"),
    [
        ({"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, True),
        ({"type": "text", "text": "Hi", "citations": [{"type": "char_location"}]}, True),
        ({"type": "text"}, False),
        ({"text": "Hi"}, False),
    ],
)
async def test_blocks_of_a_server_are_those_of_any_other_type(block, is_right):
    api = await document()
    schema = {"$ref": "#/components/schemas/MessagesRequest", "components": api["components"]}
    turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "Hi"}]
    body = {"model": "m", "max_tokens": 5, "messages": turns}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == is_right
    if is_right:
        decode_messages(json.dumps(body).encode(), strict=True)
    else:
        with pytest.raises(InvalidRequest):
            decode_messages(json.dumps(body).encode(), strict=True)
