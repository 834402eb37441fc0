"""How requests say what their answers are to look like."""

import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.grammar import Constraint
from maitred.wire.openai.requests import ChatRequest, CompletionRequest, Message
from maitred.wire.openai.sampling import to_constraint

SCHEMA = {"type": "integer"}


def constraint_of(**fields):
    return to_constraint(ChatRequest(model="m", messages=[Message(role="user", content="Hi")], **fields))


def json_schema(**fields):
    return {"type": "json_schema", "json_schema": {"name": "n", **fields}}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json_object", None, "response_format")),
        (
            {"response_format": json_schema(schema=SCHEMA, strict=True)},
            Constraint("json_schema", SCHEMA, "response_format.json_schema.schema"),
        ),
        (
            {"response_format": json_schema(schema=SCHEMA)},
            Constraint("json_schema", SCHEMA, "response_format.json_schema.schema", strict=False),
        ),
        ({"guided_json": '{"type":"integer"}'}, Constraint("json_schema", SCHEMA, "guided_json")),
        ({"guided_regex": "a"}, Constraint("regex", "a", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, Constraint("choice", ["a", "b"], "guided_choice")),
        ({"guided_grammar": "start: A"}, Constraint("grammar", "start: A", "guided_grammar")),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": False, "disable_any_whitespace": True}}, None),
        (
            {"structured_outputs": {"json_object": True}},
            Constraint("json_object", None, "structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"json": True, "whitespace_pattern": " "}},
            Constraint("json_schema", True, "structured_outputs.json", whitespace=" "),
        ),
    ],
)
def test_fields_give_the_constraint(fields, constraint):
    assert constraint_of(**fields) == constraint
    if "response_format" not in fields:
        assert to_constraint(CompletionRequest(model="m", prompt="p", **fields)) == constraint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
        ({"response_format": json_schema(strict="yes", schema={})}, "response_format.json_schema.strict"),
        ({"response_format": json_schema()}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": 1}}, "structured_outputs.whitespace_pattern"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(InvalidRequest) as refusal:
        constraint_of(**fields)
    assert refusal.value.param == param
    assert param.split(".")[0] in refusal.value.message
