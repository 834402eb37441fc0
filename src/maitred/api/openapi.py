"""OpenAPI description of the API, made from the structs that requests are decoded with.

OpenAPI 3.1 uses JSON Schema, and msgspec writes JSON Schema.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from types import UnionType
from typing import Any

import msgspec

from maitred import __version__
from maitred.api.routes import Route
from maitred.core.flow import HIGHEST_PRIORITY, LOWEST_PRIORITY, PriorityClass
from maitred.wire.admin import rules as admin
from maitred.wire.anthropic import decode as anthropic
from maitred.wire.anthropic.requests import KNOWN_BLOCKS
from maitred.wire.openai import decode as openai
from maitred.wire.openai.decode import FieldSchema
from maitred.wire.responses import decode as responses
from maitred.wire.responses.requests import SERVER_CALLS

_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Repeats of a request with the same key and body get its answer, and run nothing.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
}
_REQUEST_HEADERS: list[dict[str, Any]] = [
    {
        "name": "x-maitred-priority",
        "in": "header",
        "required": False,
        "description": "How urgent it is: from 1 to 10 (the most urgent), or the name of a class. Wins over the body.",
        "schema": {
            "anyOf": [
                {"type": "integer", "minimum": LOWEST_PRIORITY, "maximum": HIGHEST_PRIORITY},
                {"type": "string", "enum": [str(name) for name in PriorityClass]},
            ]
        },
    },
    {
        "name": "x-maitred-ttft-ms",
        "in": "header",
        "required": False,
        "description": "Milliseconds within which the first token must come.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "x-maitred-itl-ms",
        "in": "header",
        "required": False,
        "description": "Milliseconds that should not be exceeded between two tokens.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "x-maitred-deadline-ms",
        "in": "header",
        "required": False,
        "description": "Milliseconds within which the whole answer must be there.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "x-maitred-partial",
        "in": "header",
        "required": False,
        "description": "Whether a part of the answer is welcome at the deadline.",
        "schema": {"type": "boolean", "default": False},
    },
    {
        "name": "x-maitred-no-degradation",
        "in": "header",
        "required": False,
        "description": "Whether to be refused rather than given less for the load.",
        "schema": {"type": "boolean", "default": False},
    },
    {
        "name": "x-maitred-escalate",
        "in": "header",
        "required": False,
        "description": "Whether an answer that fails a check may be asked of a larger model too, as far as the server "
        "allows it.",
        "schema": {"type": "boolean"},
    },
    {
        "name": "x-maitred-explain",
        "in": "header",
        "required": False,
        "description": "Whether the answer's headers shall say what the request waited for.",
        "schema": {"type": "boolean", "default": False},
    },
    {
        "name": "Cache-Control",
        "in": "header",
        "required": False,
        "description": "What is wanted of answers from a cache: `no-cache`, `no-store`, `max-age=N` in seconds, or "
        "`only-if-cached`. It adds to `cache` in the body.",
        "schema": {"type": "string"},
    },
]
_REF = "#/components/schemas/{name}"
_PUBLISHED_NAMES = {
    "AdminStatus": "DutyState",
    "FeedbackLabel": "Verdict",
    "HealthStatus": "Health",
    "PingEvent": "Ping",
    "RolloutPhase": "Phase",
    "VersionInfo": "Version",
    "TimelineBody": "StoryBody",
    "TimelineHead": "StoryHead",
    "TimelineList": "StoryList",
    "SpanBody": "ChapterBody",
}
"""Type -> the name of its schema, if the two names differ: generated clients use these names for their types."""


def describe(routes: Iterable[Route]) -> bytes:
    """Returns the OpenAPI document of these routes, as JSON."""
    routes = list(routes)
    structs = [
        struct for route in routes for struct in (route.reads, route.returns, route.streams, route.query) if struct
    ]
    types = list(dict.fromkeys([*structs, *(route.dialect.error_struct for route in routes)]))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    rules_of = [module.body_schemas() for module in (openai, anthropic, responses, admin)]
    for struct, rules in chain.from_iterable(bodies.items() for bodies in rules_of):
        if struct.__name__ in components:
            _add_rules(components[struct.__name__]["properties"], rules)
    if "CacheFields" in components:
        components["CacheFields"]["additionalProperties"] = False  # they are refused in a sentence of their own
    if "ServerBlock" in components:
        _describe_server_blocks(components)
    if "ServerItem" in components:
        _describe_items(components)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of, components)
    for query in {_name_in(schema_of[route.query]) for route in routes if route.query is not None}:
        del components[query]  # its fields are described as separate parameters
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
    return msgspec.json.encode(_publish_names(document))


_KEYWORD_TYPES = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "enum": ("string", "boolean"),
    "pattern": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "items": ("array",),
    "maxProperties": ("object",),
    "additionalProperties": ("object",),
    "propertyNames": ("object",),
}
"""Keyword of JSON Schema -> the types that it applies to."""


def _add_rules(properties: dict[str, Any], rules: Mapping[str, FieldSchema]) -> None:
    """Adds the rules of single fields to the schemas of a struct: the types alone allow more."""
    for field, keywords in rules.items():
        if field in properties:
            _add_keywords(properties[field], keywords)


def _add_keywords(schema: dict[str, Any], keywords: FieldSchema) -> None:
    """Adds each keyword to the alternatives of the type that it is for."""
    for choice in schema.get("anyOf", [schema]):
        for keyword, value in keywords.items():
            if choice.get("type") in _KEYWORD_TYPES[keyword]:
                if keyword == "items":
                    _add_keywords(choice.setdefault(keyword, {}), value)
                else:
                    choice[keyword] = {**choice.get(keyword, {}), **value} if isinstance(value, dict) else value


def _describe_server_blocks(components: dict[str, Any]) -> None:
    """Describes the blocks of a server as clients send them: of any other type or source, and without the wrapper."""
    described = components["ServerBlock"]
    others = {"properties": {"type": {"type": "string", "not": {"enum": sorted(KNOWN_BLOCKS)}}}}
    source: dict[str, Any] = {"type": "object", "required": ["type"]}
    source["properties"] = {"type": {"type": "string", "not": {"enum": ["base64", "url"]}}}
    images = {"properties": {"type": {"const": "image"}, "source": source}, "required": ["source"]}
    del described["properties"]
    described |= {"required": ["type"], "anyOf": [others, images]}
    described["description"] = described["description"].partition("\n")[0]
    for name in ("InputMessage", "ToolResultBlock"):
        for form in components[name]["properties"]["content"]["anyOf"]:
            form.get("items", {}).pop("discriminator", None)  # no mapping has all types


_BODIES_WITH_ITEMS = {
    "ResponsesRequest": "input",
    "InputTokensRequest": "input",
    "CreateConversation": "items",
    "AddItems": "items",
}
"""Struct of a body with items of responses -> its field that holds them."""


def _describe_items(components: dict[str, Any]) -> None:
    """Describes the items of a response's input as clients send them: some without a type, some without the wrapper."""
    for name in ("MessageItem", "ItemReference"):
        components[name]["required"].remove("type")
    described = components["ServerItem"]
    described |= {"properties": {"type": {"type": "string", "enum": [*SERVER_CALLS]}}, "required": ["type"]}
    described["description"] = described["description"].partition("; ")[0] + "."
    for request, field in _BODIES_WITH_ITEMS.items():
        lists = components.get(request, {}).get("properties", {}).get(field, {})
        for form in lists.get("anyOf", [lists]):
            form.get("items", {}).pop("discriminator", None)  # no mapping has items without a type


def _publish_names(schema: Any) -> Any:  # noqa: ANN401 - JSON
    """Returns a part of the document with the published names of schemas: as keys, as titles and in references."""
    if isinstance(schema, dict):
        return {_PUBLISHED_NAMES.get(key, key): _publish_names(value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_publish_names(item) for item in schema]
    if isinstance(schema, str):
        head, slash, name = schema.rpartition("/")
        return f"{head}{slash}{_PUBLISHED_NAMES.get(name, name)}"
    return schema


def _operation(route: Route, schema_of: dict[type | UnionType, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "responses": {
            **(
                {"101": {"description": "The connection is a WebSocket from then on."}}
                if route.upgrades
                else {"200": {"description": "The answer.", "content": _answer_content(route, schema_of)}}
            ),
            "default": {
                "description": "An error; `error.message` says what to do.",
                "content": {"application/json": {"schema": schema_of[route.dialect.error_struct]}},
            },
        },
    }
    parameters = _parameters(route, schema_of, components)
    if parameters:
        operation["parameters"] = parameters
    if route.reads is not None:
        body = components[_name_in(schema_of[route.reads])]
        operation["requestBody"] = {
            # If no field is required, a missing body means an empty object.
            "required": bool(body.get("required")),
            "content": {
                "multipart/form-data" if route.reads_form else "application/json": {"schema": schema_of[route.reads]}
            },
        }
    return operation


def _parameters(
    route: Route, schema_of: dict[type | UnionType, Any], components: dict[str, Any]
) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "header", "required": True, "schema": {"type": "string", "enum": values}}
        for name, values in route.dialect.required_headers.items()
    ]
    parameters += [
        {"name": part.partition("}")[0], "in": "path", "required": True, "schema": {"type": "string"}}
        for part in route.path.split("{")[1:]
    ]
    if route.query is not None:
        described = components[_name_in(schema_of[route.query])]
        for name, schema in described["properties"].items():
            schema = dict(schema)
            required = name in described.get("required", ())
            text = {"description": schema.pop("description")} if "description" in schema else {}
            parameters.append({"name": name, "in": "query", "required": required, **text, "schema": schema})
    if route.idempotent or route.remembers:
        parameters.append(_IDEMPOTENCY_KEY)
    if route.idempotent:
        parameters += _REQUEST_HEADERS
    return parameters


def _name_in(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _answer_content(route: Route, schema_of: dict[type | UnionType, Any]) -> dict[str, Any]:
    if route.returns is None:
        return {route.content_type: {"schema": {"type": "string" if "text" in route.content_type else "object"}}}
    content = {"application/json": {"schema": schema_of[route.returns]}}
    if route.also:
        content[route.also] = {"schema": {"type": "string"}}
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
    return "_".join([route.method.lower(), *([word for word in words if word] or ["root"])])
