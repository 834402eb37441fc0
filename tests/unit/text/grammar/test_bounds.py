"""Bounds of numbers are held exactly, whatever their size and wherever they stand."""

import json
from fractions import Fraction

import pytest
from llguidance import LLMatcher, LLTokenizer

from maitred.core.grammar import Constraint
from maitred.text.grammar.bounds import narrow_bounds
from maitred.text.grammar.language import GrammarFault, grammar_source
from maitred.text.grammar.reading import parse_grammar

BYTES = LLTokenizer("byte")


def takes(schema, text, **fields):
    matcher = LLMatcher(BYTES, grammar_source(parse_grammar(Constraint("json_schema", schema, "p", **fields))))
    return matcher.try_consume_tokens([*text.encode()]) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "taken", "not_taken"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.25", "0.000001"], ["0", "-0", "0.0", "0.5", "0.50"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0", "-0.0"]),
        ({"exclusiveMinimum": 0}, ["1", "0.1"], ["0", "-0", "0.0"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1e-12}, ["0.0000000000005"], ["0", "0.000000000001"]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.5"], ["0", "-0"]),
        ({"type": "integer", "allOf": [{"exclusiveMinimum": 0}, {"exclusiveMaximum": 2}]}, ["1"], ["0", "2"]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, ["0.5"], ["0"]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": False}, ["0", "0.0"], ["-0.1"]),
        ({"exclusiveMinimum": 0, "multipleOf": 0.1, "maximum": 0.3}, ["0.1", "0.3"], ["0", "0.15", "0.4"]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, ["9007199254740994"], ["9007199254740992"]),
        ({"type": "integer", "maximum": 2**63 - 1}, ["9223372036854774784"], ["9223372036854775808"]),
        ({"type": "integer", "maximum": 2**63 - 2}, ["1"], ["9223372036854775807"]),
        ({"type": "integer", "minimum": -(2**63)}, ["-9223372036854774784", "5"], ["-9223372036854775809"]),
        ({"type": "integer", "minimum": 10**18}, [f"{10**18}"], [f"{10**18 - 1}"]),
        ({"type": "number", "maximum": 1e30, "minimum": -1e30}, ["1"], []),
        ({"type": "number", "minimum": 1e15 + 0.5}, ["1000000000000010"], ["1000000000000000.4"]),
        ({"type": "number", "exclusiveMaximum": -(2**53) - 1}, ["-9007199254741000"], ["-9007199254740993"]),
        ({"const": 10**18}, [f"{10**18}"], [f"{10**18 + 1}"]),
        ({"const": 0.1}, ["0.1"], ["0.2", "0.11"]),
    ],
    ids=str,
)
def test_numbers_beyond_a_bound_are_not_taken(schema, taken, not_taken):
    assert [text for text in taken if not takes(schema, text)] == []
    assert [text for text in not_taken if takes(schema, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"enum": ["a", 2**64 + 1]},
        {"properties": {"a": {"const": {"b": [-(10**18) - 1]}}}},
        {"type": "integer", "multipleOf": 2**53 + 1},
        {"type": "integer", "minimum": 10**19},
        {"type": "number", "exclusiveMaximum": -1e21},
    ],
    ids=str,
)
def test_numbers_that_no_double_holds_are_refused_or_relaxed_by_name(schema):
    constraint = Constraint("json_schema", schema, "p")
    with pytest.raises(GrammarFault, match=r"The number of `\w+`, at #.* is too large"):
        parse_grammar(constraint)
    relaxed: list[str] = []
    parse_grammar(Constraint("json_schema", schema, "p", strict=False), relaxed)
    assert len(relaxed) == 1


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 123456789.123456789, "maximum": 2e17},
        {"minimum": 1 / 3, "exclusiveMaximum": 2 / 3},
        {"type": "integer", "exclusiveMinimum": 0.5, "exclusiveMaximum": 10**17 + 1},
        {"type": ["integer", "null"], "minimum": -(10**25), "maximum": 10**25},
    ],
    ids=str,
)
def test_bounds_move_inwards_only(bounds):
    narrowed = narrow_bounds(bounds)
    low, high = Fraction(repr(narrowed["minimum"])), Fraction(repr(narrowed["maximum"]))
    assert low <= high
    for keyword, value in bounds.items():
        if keyword != "type":
            bound = Fraction(repr(value))
            fits = {"minimum": low >= bound, "maximum": high <= bound}
            fits |= {"exclusiveMinimum": low > bound, "exclusiveMaximum": high < bound}
            assert fits[keyword]
    assert json.loads(json.dumps(narrowed)) == narrowed
