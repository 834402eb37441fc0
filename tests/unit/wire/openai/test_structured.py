"""How requests say what their answers are to look like."""

import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.grammar import Constraint
from maitred.wire.openai.decode import check_template_arguments
from maitred.wire.openai.requests import ChatRequest, CompletionRequest, Message
from maitred.wire.openai.sampling import to_constraint, to_tool_rules

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


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema(schema=SCHEMA), "guided_json": SCHEMA},
        {"guided_json": '{"type": "integer"}', "structured_outputs": {"json": SCHEMA}},
        {"response_format": json_schema(schema=SCHEMA, strict=True), "structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}},
        {"response_format": {"type": "text"}, "guided_regex": "a"},
        {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
        {"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}},
        {"guided_grammar": "start: A", "structured_outputs": {"grammar": "start: A"}},
        {"guided_json": {"a": 1, "b": 2}, "structured_outputs": {"json": {"b": 2, "a": 1}}},
    ],
    ids=str,
)
def test_equal_constraints_are_one_and_the_strict_one_holds(fields):
    constraint = constraint_of(**fields)
    assert constraint is not None
    assert constraint.strict
    assert to_constraint(CompletionRequest(model="m", prompt="p", **fields)) == constraint


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": json_schema(schema=SCHEMA), "guided_json": {"type": "number"}},
        {"guided_json": {"const": 1}, "structured_outputs": {"json": {"const": True}}},
        {"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
        {"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["b", "a"]}},
        {"response_format": {"type": "json_object"}, "guided_json": {"type": "object"}},
    ],
    ids=str,
)
def test_different_constraints_are_refused_by_name(fields):
    with pytest.raises(InvalidRequest, match="exclude each other"):
        constraint_of(**fields)


FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


def rules_of(**fields):
    return to_tool_rules(ChatRequest(model="m", messages=[Message(role="user", content="Hi")], **fields))


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"tools": TOOLS, "functions": [FUNCTION]}, {"tools": TOOLS}),
        ({"tools": TOOLS, "tool_choice": "none", "function_call": "none"}, {"tools": TOOLS, "tool_choice": "none"}),
        (
            {
                "tools": TOOLS,
                "functions": [FUNCTION],
                "tool_choice": {"type": "function", "function": {"name": "look"}},
                "function_call": {"name": "look"},
            },
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}},
        ),
        ({"tools": TOOLS, "function_call": {"name": "look"}}, {"tools": TOOLS, "tool_choice": "required"}),
        (
            {"functions": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "look"}}},
            {"functions": [FUNCTION], "function_call": {"name": "look"}},
        ),
    ],
    ids=str,
)
def test_what_both_forms_of_tools_say_alike_is_one(fields, same):
    rules, other = rules_of(**fields), rules_of(**same)
    assert (rules.tools, rules.may, rules.must) == (other.tools, other.may, other.must)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "functions": [{"name": "see"}]}, "functions"),
        ({"tools": TOOLS, "tool_choice": "none", "function_call": "auto"}, "function_call"),
        ({"functions": [FUNCTION], "function_call": "auto", "tool_choice": "none"}, "tool_choice"),
    ],
    ids=str,
)
def test_different_tools_and_choices_are_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest, match=r"differ\. Send only one\.") as refusal:
        rules_of(**fields)
    assert refusal.value.param == param


@pytest.mark.parametrize("name", ["enable_thinking", "reasoning_effort"])
def test_arguments_of_the_template_agree_with_the_fields(name):
    value, other = (True, False) if name == "enable_thinking" else ("low", "high")
    check_template_arguments({name: value}, **{name: value})
    check_template_arguments({name: value}, **{name: None})
    with pytest.raises(InvalidRequest, match=f"{name} and chat_template_kwargs.{name} differ"):
        check_template_arguments({name: other}, **{name: value})
