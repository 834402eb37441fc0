"""Whether a text is JSON that follows a schema."""

import urllib.request

import pytest

from maitred.routing.escalation.schema import SchemaResult, validate_text

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
}


@pytest.mark.parametrize("text", ['{"name": "Ada"}', ' {"name": "Ada", "age": 36}\n'])
def test_what_follows_it(text):
    assert validate_text(PERSON, text) is SchemaResult.VALID


@pytest.mark.parametrize(
    "text",
    [
        *("", "Ada", '{"age": 36}', '{"name": "Ada", "age": -1}', '{"name": "Ada", "more": 1}', "[]", "null"),
        '```json\n{"name": "Ada"}\n```',
        '{"name": "Ada"',
        '{"name": "Ada"} and so on',
        '{"name": NaN}',
    ],
)
def test_what_breaks_it(text):
    assert validate_text(PERSON, text) is SchemaResult.INVALID


def test_references_within_a_schema_are_followed():
    assert validate_text(TREE, "[[], [[]]]") is SchemaResult.VALID
    assert validate_text(TREE, "[[], [1]]") is SchemaResult.INVALID
    assert validate_text(True, "1") is SchemaResult.VALID


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "file:///etc/hostname"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"pattern": "("},
        [],
        "object",
        7,
    ],
)
def test_a_schema_that_cannot_be_judged_by_condemns_nothing(schema, monkeypatch):
    fetched = []
    monkeypatch.setattr(urllib.request, "urlopen", fetched.append)
    assert validate_text(schema, '"text"') is SchemaResult.UNKNOWN
    assert not fetched


def test_what_lies_too_deep_is_not_judged():
    assert validate_text(TREE, "[" * 100_000 + "]" * 100_000) is SchemaResult.UNKNOWN
