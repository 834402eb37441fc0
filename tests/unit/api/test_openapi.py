"""The API's description of itself."""

import base64
import hashlib
import json
import re
from types import SimpleNamespace

import jsonschema
import pytest

from maitred.api.config import ServerConfig
from maitred.api.in_flight import InFlightLimiter
from maitred.api.reference_page import render
from maitred.core.clock import SystemClock
from maitred.core.errors import InvalidRequest
from maitred.wire.anthropic.decode import decode_messages
from maitred.wire.openai.decode import decode_chat
from tests.support.applications import make_app


async def document():
    return json.loads((await answer_of("/openapi.json"))[1]["body"])


async def answer_of(path):
    sent = []

    async def send(message):
        sent.append(message)

    edge = make_app(ServerConfig(), SimpleNamespace(rate_limit_status=None), None, InFlightLimiter(1), SystemClock())
    await edge({"type": "http", "method": "GET", "path": path, "headers": []}, None, send)
    return sent


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
        ("get", "/docs"),
    }
    identifiers = [operation["operationId"] for methods in api["paths"].values() for operation in methods.values()]
    assert len(identifiers) == len(set(identifiers))
    schemas = api["components"]["schemas"]
    for reference in references(api):
        assert reference.removeprefix("#/components/schemas/") in schemas


async def test_its_page_has_every_operation_and_schema_and_needs_nothing_else():
    api = await document()
    head, body = await answer_of("/docs")
    assert (b"content-type", b"text/html; charset=utf-8") in head["headers"]
    page = body["body"].decode()
    for path, methods in api["paths"].items():
        for method in methods:
            assert f"<span class='method'>{method.upper()}</span> <code>{path}</code>" in page
    assert sorted(re.findall("<details id='([^']*)'>", page)) == sorted(api["components"]["schemas"])
    assert set(re.findall("href='#([^']*)'", page)) <= api["components"]["schemas"].keys()
    assert re.findall(r"src=|@import|url\(|http:|https:|<script|<link", page) == []
    policy = dict(head["headers"])[b"content-security-policy"].decode()
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy


def test_its_page_shows_text_as_text():
    schema = {"description": "<b>", "properties": {"<i>": {"type": "string", "description": "a & b", "enum": ["<u>"]}}}
    about = {"info": {"title": "<x>", "version": "1"}, "components": {"schemas": {"S": schema}}}
    operation = {"summary": "<s>", "parameters": [{"name": "<q>", "in": "query", "schema": {"type": "string"}}]}
    page = render({**about, "paths": {"/a": {"get": operation}}}).decode()
    assert [tag for tag in "biuxsq" if f"<{tag}>" in page] == []
    assert "a &amp; b" in page


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
        (
            "cache",
            [{"no-cache": True, "ttl": 0.5, "s-maxage": 0, "namespace": "a"}, {}, None],
            [{"ttl": 0}, {"s-maxage": -1}, {"namespace": ""}, {"namespace": "a" * 65}, {"no_cache": True}, True],
        ),
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
        ({"type": "document", "source": {"type": "url", "url": "https://e.x"}}, True),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, True),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}, True),
        ({"type": "image", "source": {"type": "base64"}}, False),
        ({"type": "image", "source": {}}, False),
        ({"type": "image"}, False),
        ({"type": "text"}, False),
        ({"text": "Hi"}, False),
    ],
)
async def test_blocks_of_a_server_are_those_of_any_other_type(block, is_right):
    api = await document()
    schema = {"$ref": "#/components/schemas/MessagesRequest", "components": api["components"]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    for turn in (
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [block]},
        {"role": "user", "content": [result]},
    ):
        body = {"model": "m", "max_tokens": 5, "messages": [turn, {"role": "user", "content": "Hi"}]}
        assert jsonschema.Draft202012Validator(schema).is_valid(body) == is_right, body
        if is_right:
            decode_messages(json.dumps(body).encode(), strict=True)
        else:
            with pytest.raises(InvalidRequest):
                decode_messages(json.dumps(body).encode(), strict=True)
