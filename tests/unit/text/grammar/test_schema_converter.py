"""Keywords that are rewritten, against a validator: nothing wrong is taken, and what is expected is."""

import json

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from maitred.core.grammar import Constraint
from maitred.text.grammar.language import GrammarFault, grammar_source
from maitred.text.grammar.reading import parse_grammar
from maitred.text.grammar.schema_converter import convert_schema

BYTES = LLTokenizer("byte")
VALUES: list[object] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        5,
        10,
        0.5,
        1.5,
        -0.5,
        "",
        "a",
        "b",
        "ab",
        "ba",
        "c",
        "http://x",
        "./x",
        "x" * 5,
    ),
    *([], ["a"], ["a", "b"], ["b", "a"], ["a", "a"], ["a", "b", "c"], [1], [1, 1], [None], {}, {"a": 1}, {"b": 1}),
    *({"a": 1, "b": 1}, {"a": 1, "b": "x"}, {"a": "x"}, {"a": "x", "b": 1}, {"kind": "cat"}, {"kind": "dog"}, {"c": 1}),
    *({"kind": "cat", "lives": 9}, {"kind": "dog", "lives": 1}, {"a": None}, {"b": 1, "a": 1}),
]
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog"]}}, "required": ["kind"]}
PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "lives": {"type": "integer"}},
    "required": ["kind"],
    "additionalProperties": False,
}


def taken(schema: object) -> list[object]:
    start = LLMatcher(BYTES, grammar_source(parse_grammar(Constraint("json_schema", schema, "p"))))
    found = []
    for value in VALUES:
        matcher, text = start.deep_copy(), json.dumps(value, separators=(",", ":")).encode()
        if matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting():
            found.append(value)
    return found


@pytest.mark.parametrize(
    ("schema", "among"),
    [
        ({"not": {"type": "string"}}, [None, True, 0, 0.5, ["a"], {"a": 1}]),
        ({"not": {"type": ["object", "array"]}}, [None, "a", 1]),
        ({"type": "string", "not": {"const": "a"}}, ["", "b", "ab", "ba"]),
        ({"type": "string", "not": {"enum": ["", "ab", "b"]}}, ["a", "ba", "c", "http://x"]),
        ({"type": "number", "not": {"enum": [1, 0.5]}}, [0, 2, -1, 1.5]),
        ({"type": ["boolean", "null"], "not": {"const": True}}, [None, False]),
        ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}]),
        ({"type": "object", "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}]),
        ({"type": "object", "not": {"properties": {"a": {"type": "string"}}}}, [{"a": 1}, {"a": 1, "b": 1}]),
        ({"type": "integer", "not": {"minimum": 2}}, [0, 1, -1]),
        ({"type": "integer", "not": {"exclusiveMaximum": 2}}, [2, 3, 10]),
        ({"type": "string", "not": {"minLength": 2}}, ["", "a"]),
        ({"type": "array", "not": {"maxItems": 1}}, [["a", "b"], ["a", "b", "c"]]),
        ({"not": {"anyOf": [{"type": "string"}, {"type": "object"}]}}, [1, None, ["a"]]),
        ({"type": "integer", "not": {"allOf": [{"minimum": 1}, {"maximum": 2}]}}, [0, 3, 10]),
        ({"not": {"not": {"const": "a"}}}, ["a"]),
        ({"not": {"$ref": "#/$defs/t"}, "$defs": {"t": {"type": "string"}}}, [1, None]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, [{"a": 1}, {"b": 1}]),
        ({"oneOf": [CAT, DOG]}, [{"kind": "cat"}, {"kind": "dog"}]),
        ({"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}}, [{"kind": "cat"}]),
        ({"oneOf": [{"type": "string", "pattern": "^http://"}, {"type": "string", "pattern": "^\\./"}]}, ["./x"]),
        ({"oneOf": [{"type": "integer", "maximum": 1}, {"type": "integer", "minimum": 3}]}, [0, 1, 3, 5]),
        ({"oneOf": [{"type": "object"}, {"dependentSchemas": {"a": {"required": ["b"]}}}]}, [{"a": 1}, 1, "a"]),
        ({"oneOf": [{"type": "number", "maximum": 2}, {"type": "number", "minimum": 1}]}, [0, 0.5, 3, 10]),
        ({"oneOf": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 3}]}, [[], ["a"], ["a", "b", "c"]]),
        ({"oneOf": [{"enum": ["a", 1]}, {"enum": ["b", 1.0]}]}, ["a", "b"]),
        ({"oneOf": [{"type": "string"}]}, ["a"]),
        ({"oneOf": [{"type": "object", "properties": {"a": {"type": "string"}}}, {"type": "object"}]}, [{"a": 1}]),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}}, ["", "a", None]),
        (
            {**PET, "if": {"properties": {"kind": {"const": "cat"}}}, "then": {"required": ["lives"]}},
            [{"kind": "dog"}, {"kind": "cat", "lives": 9}],
        ),
        ({"then": {"type": "string"}}, [1, "a"]),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}]),
        ({"type": "object", "dependencies": {"a": {"properties": {"b": {"type": "string"}}}}}, [{"a": 1, "b": "x"}]),
        ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, [{}, {"a": 1, "b": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^[ab]$"}}, [{}, {"a": 1}, {"b": 1}]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{}, {"a": 1}, {"a": 1, "b": 1}]),
        ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}}, [[], ["a"], ["a", "b"], ["b", "a"]]),
        ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}, "minItems": 2}, [["a", "b"]]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], ["a"], [None]]),
        ({"type": "array", "uniqueItems": False}, [["a", "a"]]),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 1, "maximum": 3}}, [[], [1]]),
        ({"contains": {"const": "a"}}, [None, 1, ["a"], ["b", "a"], ["a", "b", "c"], {"a": 1}]),
        ({"type": "array", "contains": {"const": "a"}, "items": {"type": "string"}}, [["a"], ["b", "a"], ["a", "a"]]),
        ({"type": "array", "contains": {"const": "a"}, "minContains": 2}, [["a", "a"]]),
        ({"type": "array", "contains": {"const": "a"}, "minContains": 0}, [[], ["a"], ["b", "a"]]),
        ({"type": "array", "contains": {"const": "a"}, "maxContains": 1}, [["a"], ["a", "b"], ["b", "a"]]),
        ({"type": "array", "contains": {"enum": ["a", 1]}, "minContains": 0, "maxContains": 0}, [[], [None]]),
        ({"type": "array", "contains": {"const": "a"}, "maxItems": 1}, [["a"]]),
        ({"type": "array", "not": {"contains": {"type": "string"}}}, [[], [1], [None]]),
        ({"type": "array", "not": {"items": {"type": "string"}}}, [[1], [1, 1], [None]]),
        ({"type": "object", "properties": {"a": True, "b": True}, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"c": 1}]),
        ({"type": "object", "properties": {"a": True, "b": True}, "minProperties": 2}, [{"a": 1, "b": 1}]),
        ({"type": "object", "properties": {"a": True}, "minProperties": 2}, [{"a": 1, "b": 1}]),
        ({"properties": {"a": True, "b": True}, "maxProperties": 1}, [None, {}, {"a": 1}, {"b": 1}, {"c": 1}]),
        ({"properties": {"a": True, "b": True}, "maxProperties": 0, "additionalProperties": False}, [None, {}]),
        (
            {
                "properties": {"a": True, "b": True},
                "minProperties": 1,
                "maxProperties": 1,
                "additionalProperties": False,
            },
            [None, {"a": 1}, {"b": 1}],
        ),
        ({"properties": {"a": True}, "propertyNames": {"pattern": "^[ab]$"}}, [{}, {"a": 1}, {"a": 1, "b": 1}]),
        ({"properties": {"kind": True}, "propertyNames": {"maxLength": 1}, "type": "object"}, [{}, {"a": 1}, {"b": 1}]),
        ({"properties": {"a": {"type": "string"}}, "propertyNames": {"enum": ["a"]}, "type": "object"}, [{"a": "x"}]),
        ({"properties": {"a": True}, "unevaluatedProperties": False, "type": "object"}, [{}, {"a": 1}]),
        (
            {"allOf": [{"properties": {"a": True}}], "properties": {"b": True}, "unevaluatedProperties": False},
            [None, {}, {"a": 1}, {"a": 1, "b": 1}],
        ),
        (
            {
                "anyOf": [{"properties": {"a": True}, "required": ["a"]}, {"properties": {"b": True}}],
                "unevaluatedProperties": {"type": "string"},
            },
            [{"a": 1}, {"b": 1}, {"a": 1, "b": "x"}, {"kind": "cat"}],
        ),
        (
            {
                "if": {"properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
                "then": {"properties": {"lives": True}},
                "unevaluatedProperties": False,
            },
            [{"kind": "cat"}, {"kind": "cat", "lives": 9}, {}],
        ),
        ({"prefixItems": [True], "unevaluatedItems": False, "type": "array"}, [[], ["a"], [1]]),
        ({"allOf": [{"prefixItems": [True]}], "unevaluatedItems": {"const": "b"}, "type": "array"}, [["a", "b"], [1]]),
        ({"properties": {"a": {"$id": "http://x/", "type": "string"}}, "type": "object"}, [{}, {"a": "x"}]),
    ],
    ids=lambda part: json.dumps(part)[:60],
)
def test_what_is_rewritten_is_strict_grammar(schema, among):
    found = taken(schema)
    valid = [value for value in VALUES if jsonschema.Draft202012Validator(schema).is_valid(value)]
    if "dependencies" in schema:  # of earlier drafts
        valid = [value for value in VALUES if jsonschema.Draft7Validator(schema).is_valid(value)]
    assert all(any(value is other or json.dumps(value) == json.dumps(other) for other in valid) for value in found)
    assert all(json.dumps(value) in map(json.dumps, found) for value in among)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "not": {"multipleOf": 2}},
        {"type": "string", "not": {"pattern": "a"}},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
        {"not": {"$ref": "#"}},
        {"not": {"enum": [f"word {number}" for number in range(100)]}},
        {"not": {}},
        {"type": "array", "contains": {"pattern": "a"}, "maxContains": 1},
        {"type": "array", "contains": {"type": "string"}, "minContains": 65},
        {"type": "object", "minProperties": 2},
        {"type": "object", "properties": {"a": True}, "minProperties": 3},
        {"$dynamicRef": "#a", "unevaluatedProperties": False},
        {"$schema": "http://json-schema.org/draft-04/schema#", "not": {"const": 1}},
    ],
    ids=lambda part: json.dumps(part)[:60],
)
def test_what_cannot_be_decided_is_refused(schema):
    with pytest.raises(GrammarFault):
        parse_grammar(Constraint("json_schema", schema, "p"))


def test_a_schema_that_needs_nothing_stays_as_it_is():
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["a"],
    }
    assert convert_schema(schema) == schema
