"""The certain cost of a grammar is known from its text, and nothing else is refused for it."""

from fractions import Fraction

import pytest

from maitred.core.grammar import Constraint
from maitred.text.grammar import reading
from maitred.text.grammar.language import GrammarFault
from maitred.text.grammar.reading import parse_grammar
from maitred.text.grammar.static_cost import (
    CommonDivisor,
    divisor_states,
    longest_forced_run,
    longest_forced_run_of_lark,
)


@pytest.mark.parametrize(
    ("pattern", "run"),
    [
        ("abc", 3),
        ("a{3}b", 4),
        ("(?:ab){2}{3}", 12),
        ("(?P<n>a{2}){3,5}c", 6),
        ("[a]{4}", 4),
        ("[ab]{4}", 0),
        ("a*b?c+", 1),
        ("(a|a){5}", 5),
        ("(a|b){5}", 1),
        (r"(\x61|\x62){5}", 1),
        (r"\x{61}{5}\.{2}", 7),
        (r"\d{5}\p{L}{3}\w.", 0),
        ("x[ab]yz{3}|q", 4),
        ("(ab?a){3}", 2),
        ("^a{2}$", 2),
        ("(?i)a{9}", 0),
        ("(?i:a){9}", 0),
        (r"[\]a]{3}[^]a]{3}a", 1),
        ("(a{2,3}){4}", 2),
        (r"\(a\){3}", 5),
        ("((((", 0),
        ("a)b", 0),
        ("{3}", 3),
    ],
)
def test_what_an_expression_demands_in_a_row(pattern, run):
    assert longest_forced_run(pattern) == run


@pytest.mark.parametrize(
    ("grammar", "run"),
    [
        ('start: A\nA: B{10} "cd"\nB: "ab"{3}', 62),
        ("start: /a{7}/ | B\nB: /c{5}/", 7),
        ('start: A\nA: "a" A', 1),
        ('start: A\nA: "a"i{9} | /b/i{9}', 0),
        ('start: A\nA.2: "a\\n"{4}\n  | "b"', 8),
        ('start: "a"', 0),
    ],
)
def test_what_terminals_demand_in_a_row(grammar, run):
    assert longest_forced_run_of_lark(grammar) == run


def test_states_of_divisors():
    assert divisor_states(Fraction(1)) == 1
    assert divisor_states(Fraction(7)) == 7
    assert divisor_states(Fraction(1, 100)) == 1
    assert divisor_states(Fraction(10**6)) < 2_000
    assert divisor_states(Fraction(2**20)) < 50_000
    assert divisor_states(Fraction(999_983)) == 999_983


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "a{1000}{1000}", "p"),
        Constraint("regex", "[ab]{50}(?:x[y]){1000}{1000}z|q", "p"),
        Constraint("grammar", 'start: A\nA: B{1000}\nB: "a"{1000}', "p"),
        Constraint("grammar", "start: /a{1000}{1000}/", "p"),
        Constraint("json_schema", {"items": {"pattern": "^a{1000}{1000}$"}}, "p"),
        Constraint("json_schema", {"patternProperties": {"^a{1000}{1000}$": {}}}, "p"),
        Constraint("json_schema", {"type": "integer", "multipleOf": 999_983}, "p"),
        Constraint("json_schema", {"allOf": [{"multipleOf": 101}, {"multipleOf": 103}, {"multipleOf": 107}]}, "p"),
        *(
            Constraint("json_schema", {"$defs": {"a": {"multipleOf": 997}, "b": {"multipleOf": 991}}, **rest}, "p")
            for rest in (
                {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
                {"$ref": "#/$defs/a", "multipleOf": 991},
                {"items": {"$ref": "#/$defs/a", "allOf": [{"allOf": [{"$ref": "#/%24defs/b"}]}]}},
                {"multipleOf": 997, "anyOf": [{"type": "string"}, {"$ref": "#/$defs/b"}]},
                {"multipleOf": 997, "oneOf": [{"multipleOf": 991}, {"type": "null"}]},
                {"multipleOf": 997, "if": {"minimum": 9}, "then": {"multipleOf": 991}},
                {"allOf": [{"multipleOf": prime} for prime in (99991, 99989, 99971, 99961, 99929)]},
            )
        ),
    ],
    ids=str,
)
def test_what_is_too_costly_is_refused_before_it_is_compiled(constraint, monkeypatch):
    def compile_it(grammar):
        raise AssertionError(grammar)

    for name in ("error_in", "error_in_trial"):
        monkeypatch.setattr(reading, name, compile_it)
    with pytest.raises(GrammarFault, match=r"Send a simpler one\.$"):
        parse_grammar(constraint)


def test_what_is_too_costly_is_relaxed_alone():
    relaxed: list[str] = []
    content = {"type": "object", "properties": {"a": {"pattern": "a{1000}{1000}"}, "b": {"multipleOf": 999_983}}}
    content["properties"]["c"] = {"multipleOf": 0.07}  # is 0.7000000000000001 tenths, as a double
    parse_grammar(Constraint("json_schema", content, "p", strict=False), relaxed)
    assert relaxed == ["pattern at #/properties/a", "multipleOf at #/properties/b", "multipleOf at #/properties/c"]


def test_divisors_that_are_too_much_together_are_relaxed_together():
    relaxed: list[str] = []
    content = {"$defs": {"a": {"multipleOf": 997}}, "type": "integer", "$ref": "#/$defs/a", "multipleOf": 991}
    parse_grammar(Constraint("json_schema", content, "p", strict=False), relaxed)
    assert relaxed == ["multipleOf at #/$defs/a", "multipleOf at #"]


def test_divisors_of_schemas_that_refer_to_each_other_many_times_are_known_at_once():
    names = [f"n{number}" for number in range(40)]
    defs = {
        name: {"allOf": [{"$ref": f"#/$defs/{following}"}] * 2}
        for name, following in zip(names, [*names[1:], names[0]], strict=True)
    }
    root = {"$defs": {**defs, "last": {"anyOf": [{"multipleOf": n} for n in range(1, 400)]}}, "$ref": "#/$defs/n0"}
    assert CommonDivisor(root).of(root) == {Fraction(1)}
    assert len(CommonDivisor(root).of({"allOf": [{"$ref": "#/$defs/last"}] * 9})) <= 16
