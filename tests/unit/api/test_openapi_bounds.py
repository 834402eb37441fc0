"""The published schemas are as strict as the rules of single fields: where the one refuses a value, so does the other.

Probes of every type are put into every field of every body and query. What the server decodes decides.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.api.openapi import describe
from maitred.api.routes import Route
from maitred.core.errors import InvalidRequest
from maitred.wire.admin import requests as admin
from maitred.wire.admin import rules
from maitred.wire.admin.decode import decode_body, decode_query
from maitred.wire.anthropic import requests as anthropic
from maitred.wire.anthropic.decode import decode_count_tokens, decode_messages
from maitred.wire.anthropic.inbound import to_chat
from maitred.wire.feedback import GiveFeedback, to_feedback
from maitred.wire.openai import decode as openai
from maitred.wire.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from maitred.wire.responses import inbound as responses_inbound
from maitred.wire.responses import requests as responses
from maitred.wire.responses.decode import decode_conversation, decode_input_tokens, decode_responses

MESSAGES = [{"role": "user", "content": "Hi"}]
ANTHROPIC = {"model": "m", "messages": MESSAGES}
KEY_ID = "abcdefgh01234567"
LIMIT = {"subject": "tenant:acme", "kind": "requests_per_minute", "value": 5}


def checked(kind: type, check: Callable[[Any], object]) -> Callable[[bytes], object]:
    return lambda body: check(decode_body(body, kind))


def check_key(request: admin.CreateKey) -> None:
    rules.check_id("tenant", request.tenant)
    rules.check_name(request.name)
    if request.id is not None:
        rules.check_key_id("id", request.id)
    rules.parse_scopes(request.scopes)


BODIES: dict[type, tuple[dict[str, Any], Callable[[bytes], object]]] = {
    ChatRequest: ({"model": "m", "messages": MESSAGES}, lambda body: openai.decode_chat(body, strict=False)),
    CompletionRequest: ({"model": "m", "prompt": "Hi"}, lambda body: openai.decode_completion(body, strict=False)),
    EmbeddingRequest: ({"model": "m", "input": "Hi"}, lambda body: openai.decode_embedding(body, strict=False)),
    TokenizeRequest: ({"prompt": "Hi"}, lambda body: openai.decode_tokenize(body, strict=False)),
    DetokenizeRequest: ({"tokens": [1]}, lambda body: openai.decode_detokenize(body, strict=False)),
    anthropic.MessagesRequest: (
        {**ANTHROPIC, "max_tokens": 9},
        lambda body: to_chat(decode_messages(body, strict=False)),
    ),
    anthropic.CountTokensRequest: (ANTHROPIC, lambda body: to_chat(decode_count_tokens(body, strict=False))),
    responses.ResponsesRequest: (
        {"model": "m", "input": "Hi"},
        lambda body: responses_inbound.to_chat(decode_responses(body, strict=False)),
    ),
    responses.InputTokensRequest: (
        {"model": "m", "input": "Hi"},
        lambda body: responses_inbound.to_chat(decode_input_tokens(body, strict=False)),
    ),
    responses.CreateConversation: (
        {},
        lambda body: responses_inbound.check_items(
            decode_conversation(body, responses.CreateConversation, strict=False).items or ()
        ),
    ),
    responses.AddItems: (
        {"items": []},
        lambda body: responses_inbound.check_items(decode_conversation(body, responses.AddItems, strict=False).items),
    ),
    admin.CreateTenant: ({"id": "acme"}, checked(admin.CreateTenant, rules.to_tenant)),
    admin.UpdateTenant: ({}, checked(admin.UpdateTenant, rules.tenant_changes)),
    admin.CreateKey: ({"tenant": "acme"}, checked(admin.CreateKey, check_key)),
    admin.RotateKey: ({}, checked(admin.RotateKey, rules.parse_overlap)),
    admin.CreateLimit: (
        LIMIT,
        checked(admin.CreateLimit, lambda it: rules.to_limit(it, "some" if it.id is None else it.id)),
    ),
    GiveFeedback: ({"request_id": "r", "score": 1}, checked(GiveFeedback, to_feedback)),
}
API = json.loads(
    describe([Route("POST", f"/{kind.__name__}", None, "", reads=kind) for kind in BODIES])  # type: ignore[arg-type]
)
COMPANIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "best_of": lambda value: {"n": value},
    "stream_options": lambda value: {"stream": True},
    "min_tokens": lambda value: {"max_tokens": openai.MAX_TOKEN_ID},
    "messages": lambda value: {},
}
"""Fields that a field needs beside it."""
COMPANIONS_OF: dict[type, Callable[[str], dict[str, Any]]] = {
    ChatRequest: lambda field: {"logprobs": True} if field == "top_logprobs" else {},
    CompletionRequest: lambda field: {"echo": True} if field == "max_tokens" else {},
}
"""The same for the bodies of one API."""

NUMBERS = [
    *(-(2**63) - 1, -(2**63), -(2**31), -101, -100, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 10, 11, 15, 16, 17, 20, 21, 100),
    *(101, 128, 129, 500, 501, 1000, 1001, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**12, 10**12 + 1, 90 * 86_400 + 1),
    *(-2.5, -0.01, 0.0001, 0.001, 0.01, 0.5, 1.01, 2.01, 100.5, 1e300),
]
WORDS = [
    *(
        "",
        "a",
        "user",
        "system",
        "auto",
        "flex",
        "float",
        "base64",
        "no such",
        "Ä",
        "acme",
        "tenant:acme",
        "key:*",
        "*",
    ),
    *("tenant:", "key:Ä", KEY_ID, "inference", "a b", "-a", "a" * 63, "a" * 64, "a" * 128, "a" * 129, "a" * 200),
    *("a" * 201, "a" * 256, "a" * 257, "a" * 1024, "a" * 1025, "a" * 4000, "a" * 4001),
]
LISTS = [
    *(
        [],
        [0],
        [-1],
        [2**31 - 1],
        [2**31],
        [""],
        ["a"],
        ["a" * 63],
        ["a" * 64],
        ["a" * 1024],
        ["a" * 1025],
        [[]],
        [[0]],
    ),
    *([[-1]], [{}], [{"type": "text", "text": "a"}], MESSAGES, ["inference"], ["a"] * 16, ["a"] * 17, ["a"] * 64),
    *(["a"] * 65, ["a"] * 1000, ["a"] * 1001, [1] * 128, [1] * 129, [{"role": "nobody", "content": "a"}]),
    *([{"role": "user", "content": ""}], [{"role": "user", "content": []}], [{"name": "a", "input_schema": {}}]),
    *([{"name": "a", "type": "bash_20250124", "input_schema": {}}], ["a b"], ["a" * 256], ["a" * 257]),
]
OBJECTS = [
    *({}, {"0": 1}, {"0": 101}, {"0": -100}, {"x": 1}, {"a" * 65: 1}, {"type": "auto"}, {"type": "no such"}),
    *({str(number): 1 for number in range(count)} for count in (32, 33, 1024, 1025)),
    {f"a{number}": 1 for number in range(33)},
]
PROBES = [None, True, False, *NUMBERS, *WORDS, *LISTS, *OBJECTS]

BEYOND_SCHEMAS = {"chat_template_kwargs", "enable_thinking"}
"""Fields with rules that have no keyword, such as which names a variable may have."""
RULES_OF_TWO_FIELDS: dict[type, dict[str, Callable[[Any], bool]]] = {
    ChatRequest: {"continue_final_message": lambda value: value is True},
    EmbeddingRequest: {
        "input": lambda value: value is None,
        "messages": lambda value: value is None,
        "continue_final_message": lambda value: value is True,
    },
    TokenizeRequest: {
        "prompt": lambda value: value is None,
        "messages": lambda value: value is None,
        "continue_final_message": lambda value: value is True,
        "chat_template": bool,
    },
    responses.ResponsesRequest: {"input": lambda value: value is None},
    responses.InputTokensRequest: {"input": lambda value: value is None},
    admin.CreateTenant: {"parent": lambda value: value == "acme"},
    admin.CreateLimit: {"value": lambda value: isinstance(value, float), "hard": lambda value: value is False},
}
"""Values that are right by themselves, and wrong beside what else the body has here."""


def fields_of(kind: type) -> list[str]:
    properties = API["components"]["schemas"][kind.__name__]["properties"]
    return [name for name, schema in properties.items() if name not in BEYOND_SCHEMAS and set(schema) - {"default"}]


def bodies_with(kind: type, field: str, value: Any) -> dict[str, Any]:
    companions = COMPANIONS.get(field, lambda _: {})(value) | COMPANIONS_OF.get(kind, lambda _: {})(field)
    body = {**BODIES[kind][0], **companions, field: value}
    if field == "messages" and kind in (TokenizeRequest, EmbeddingRequest):
        del body["prompt" if kind is TokenizeRequest else "input"]
    return body


def is_accepted(kind: type, body: object) -> bool:
    try:
        BODIES[kind][1](json.dumps(body).encode())
    except InvalidRequest:
        return False
    return True


@cache
def validator(kind: type) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{kind.__name__}", "components": API["components"]}
    )


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_value_is_valid_by_the_schema_exactly_if_the_server_takes_it(kind: type) -> None:
    differ = []
    for field in fields_of(kind):
        wrong_here = RULES_OF_TWO_FIELDS.get(kind, {}).get(field, lambda _: False)
        for value in PROBES:
            if wrong_here(value):
                continue
            body = bodies_with(kind, field, value)
            valid, accepted = validator(kind).is_valid(body), is_accepted(kind, body)
            if valid != accepted:
                differ.append((field, str(value)[:80], "too wide" if valid else "too strict"))
    assert differ == []


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
@given(value=st.integers() | st.floats(allow_nan=False, allow_infinity=False).filter(lambda it: not it.is_integer()))
@settings(max_examples=40, deadline=None)
def test_any_number_is_valid_by_the_schema_exactly_if_the_server_takes_it(kind: type, value: float) -> None:
    for field in fields_of(kind):
        if not RULES_OF_TWO_FIELDS.get(kind, {}).get(field, lambda _: False)(value):
            body = bodies_with(kind, field, value)
            assert validator(kind).is_valid(body) == is_accepted(kind, body), body


QUERIES = (
    admin.TenantsQuery,
    admin.KeysQuery,
    admin.LimitsQuery,
    admin.BudgetsQuery,
    admin.UsageQuery,
    admin.UsageEventsQuery,
)


@pytest.mark.parametrize("kind", QUERIES, ids=lambda kind: kind.__name__)
def test_pages_are_bounded_in_queries(kind: type) -> None:
    route = Route("GET", "/list", None, "", query=kind)  # type: ignore[arg-type]
    parameters = json.loads(describe([route]))["paths"]["/list"]["get"]["parameters"]
    schemas = {parameter["name"]: parameter["schema"] for parameter in parameters}
    for field, values in (("limit", (0, 1, 500, 501, -1)), ("after", ("", "a" * 512, "a" * 513))):
        for value in values:
            query = decode_query([(field, str(value))], kind)
            try:
                rules.check_page(query.limit, query.after)
            except InvalidRequest:
                accepted = False
            else:
                accepted = True
            assert jsonschema.Draft202012Validator(schemas[field]).is_valid(value) == accepted, (field, value)
