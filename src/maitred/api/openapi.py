"""The API's description of itself, made from the structs that requests are decoded with, so that it cannot lag behind.

OpenAPI 3.1 takes JSON Schema as it is, which is what msgspec writes.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from maitred import __version__
from maitred.api.routes import Route
from maitred.wire.openai.responses import ErrorBody

_REF = "#/components/schemas/{name}"


def describe(routes: Iterable[Route]) -> bytes:
    """The OpenAPI document for these routes, as JSON."""
    routes = list(routes)
    structs = [struct for route in routes for struct in (route.reads, route.returns, route.streams) if struct]
    types = list(dict.fromkeys([*structs, ErrorBody]))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "maitred",
            "version": __version__,
            "description": "Large language models for many users, with the API of OpenAI.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }
    return msgspec.json.encode(document)


def _operation(route: Route, schema_of: dict[type, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "responses": {
            "200": {"description": "The answer.", "content": _answer_content(route, schema_of)},
            "default": {
                "description": "An error; `error.message` says what to do.",
                "content": {"application/json": {"schema": schema_of[ErrorBody]}},
            },
        },
    }
    _, brace, parameter = route.path.partition("{")
    if brace:
        operation["parameters"] = [
            {"name": parameter.rstrip("}"), "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if route.reads is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[route.reads]}},
        }
    return operation


def _answer_content(route: Route, schema_of: dict[type, Any]) -> dict[str, Any]:
    if route.returns is None:
        return {route.content_type: {"schema": {"type": "string" if "text" in route.content_type else "object"}}}
    content = {"application/json": {"schema": schema_of[route.returns]}}
    if route.streams is not None:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": schema_of[route.streams],
            }
        }
    return content


def _operation_id(route: Route) -> str:
    words = route.path.replace("{", "").replace("}", "").replace(".", "/").split("/")
    return "_".join([route.method.lower(), *(word for word in words if word)])
