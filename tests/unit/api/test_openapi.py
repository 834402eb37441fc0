"""The API's description of itself."""

import json
from types import SimpleNamespace

import jsonschema

from maitred.api.config import ServerConfig
from maitred.api.in_flight import InFlightLimiter
from maitred.core.clock import SystemClock
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
