"""What callers want, and the grammars that it comes to."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.grammar import Constraint
from maitred.text.grammar.language import GrammarFault, grammar_source
from maitred.text.grammar.reading import parse_grammar

VOCABULARY = LLTokenizer((BUNDLED_MODEL / "tokenizer.json").read_text(encoding="utf-8"), eos_token=[4])


def takes(constraint, text):
    matcher = LLMatcher(VOCABULARY, grammar_source(parse_grammar(constraint)))
    tokens = VOCABULARY.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def schema(content, **fields):
    return Constraint("json_schema", content, "p", **fields)


@pytest.mark.parametrize(
    ("constraint", "taken", "not_taken"),
    [
        (Constraint("json_object", None, "p"), '{"a":[1,null]}', "[1]"),
        (Constraint("json_object", None, "p", whitespace="[ ]{0,2}"), '{ "a": 1 }', '{   "a":1}'),
        (Constraint("regex", "^[a-c]+$", "p"), "abc", "abd"),
        (Constraint("regex", r"a\$", "p"), "a$", "a"),
        (Constraint("choice", ["a b", 'say "no"\n', "Übel"], "p"), 'say "no"\n', "a"),
        (Constraint("grammar", 'root ::= "a" root | "b"', "p"), "aab", "aa"),
        (Constraint("grammar", 'start: NAME ("," NAME)*\nNAME: /[a-z]+/', "p"), "ab,c", "ab,"),
        (Constraint("grammar", '?start: "a" | "b"', "p"), "a", "ab"),
        (Constraint("grammar", '\n  !?start.2: x+ -> many\n!x.-1: "a"\n | A\nA.10: /b/i', "p"), "aB", ""),
        (
            Constraint(
                "grammar",
                '?start: sum\n?sum: atom\n  | sum "+" atom -> add\n?atom: NUMBER -> number\n  | "(" sum ")"\n'
                "%import common.NUMBER\n%import common.WS_INLINE\n%ignore WS_INLINE\n",
                "p",
            ),
            "1 + (2+3)",
            "1 +",
        ),
        (Constraint("grammar", 'root ::= item? [0-9]{2,3}\nitem ::= "a: "', "p"), "a: 12", "a: 1"),
        (schema(True), "[]", "]"),
        (schema({"type": "string", "format": "topic"}), '"anything"', "1"),
        (schema({"type": "array", "minItems": 2.0}), "[1,2]", "[1]"),
        (schema({"type": "string", "format": "date"}), '"2024-02-29"', '"2023-02-29"'),
        (schema({"type": "string", "format": "date"}), '"1999-12-31"', '"1999-11-31"'),
        (schema({"format": "date-time"}), '"2016-12-31T23:59:60Z"', '"2016-12-31T23:58:60Z"'),
        (schema({"format": "time", "pattern": "^0"}), '"08:30:00+01:00"', '"18:30:00+01:00"'),
        (schema({"format": "hostname"}), '"a-b.example.org"', '"xn--X"'),
        (schema({"format": "hostname", "maxLength": 5}), '"a.org"', '"ab.org"'),
        (schema({"not": {"const": 1}}, strict=False), "2", "1"),
        (schema({"type": "integer", "not": {"multipleOf": 2}}, strict=False), "2", '"2"'),
    ],
)
def test_what_is_taken(constraint, taken, not_taken):
    assert takes(constraint, taken)
    assert not takes(constraint, not_taken)


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (schema([]), "must be a JSON object"),
        (schema(False), "nsatisfiable"),
        (schema({"properties": {"a": {"items": {"not": {"pattern": "b"}}}}}), "`not` at #/properties/a/items"),
        (schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "Use `anyOf`"),
        (schema({"format": "regex"}), "The format `regex` cannot be enforced"),
        (schema({"type": "text"}), "Invalid type"),
        (Constraint("grammar", 'start: _sep{A, ","}\n_sep{x, y}: x (y x)*\nA: "a"', "p"), "The template `_sep{x, y}`"),
        (Constraint("grammar", "%declare A\nstart: A", "p"), "The statement `%declare`"),
        (Constraint("grammar", '%extend x: "a"\nstart: x', "p"), "The statement `%extend`"),
        (Constraint("grammar", "%import other.X\nstart: X", "p"), "Unknown common regex: other.X"),
        (schema({"$ref": "#/$defs/a"}), "does not exist"),
        (schema({"properties": {"a": {"$id": "http://x/", "$ref": "#/b"}}}), "`$id` of its own, at #/properties/a"),
        (schema({"type": "object", "minProperties": 2}), "`minProperties` above 1, at #"),
        (schema({"$schema": "http://json-schema.org/draft-07/schema#", "contentEncoding": "base64"}), "`contentEnc"),
        (Constraint("regex", "[a", "p"), "unclosed character class"),
        (Constraint("regex", "a(?=b)", "p"), "look-around"),
        (Constraint("grammar", 'start: "a" b', "p"), "unknown name"),
        (Constraint("grammar", "nothing of the kind", "p"), "Expected ::="),
        (Constraint("json_object", None, "p", whitespace="["), "unclosed character class"),
        (Constraint("grammar", "start: start", "p"), "leads back to itself"),
        (Constraint("grammar", 'start: a\na: b "x"\nb: a', "p"), "leads back to itself"),
        (schema({"$ref": "#"}), "leads back to itself"),
        (schema({"allOf": [{"$ref": "#"}]}), "leads back to itself"),
        (Constraint("grammar", "start: <|im_end|>", "p"), "The token <|im_end|> cannot be named by its text"),
        (Constraint("grammar", 'start: "a" (<tool_call> | "b")', "p"), "The token <tool_call> cannot be named"),
    ],
)
def test_what_is_refused(constraint, says):
    with pytest.raises(GrammarFault, match=r"\.$") as refusal:
        parse_grammar(constraint)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "taken", "not_taken", "named"),
    [
        ({"type": "string", "pattern": r"^(?!\.)a$", "maxLength": 3}, '"xyz"', '"wxyz"', ["pattern at #"]),
        (
            {"properties": {"a": {"pattern": r"\bfoo\b"}}, "required": ["a"]},
            '{"a":"x"}',
            "{}",
            ["pattern at #/properties/a"],
        ),
        ({"items": {"allOf": [{"pattern": r"^(a)\1$"}]}}, '["x"]', "[", ["pattern at #/items/allOf/0"]),
        (
            {"patternProperties": {"(?=a)": {}, "^b": {"type": "null"}}},
            '{"b":null}',
            '{"b":1}',
            ["patternProperties at #"],
        ),
        (
            {"type": "object", "patternProperties": {"(?=a)": {}, "(?=b)": {}}, "additionalProperties": False},
            '{"c":1}',
            "[",
            ["patternProperties at #", "additionalProperties at #"],
        ),
        (
            {"type": "object", "patternProperties": {"a": {"type": "null"}, "^a": {}}, "additionalProperties": {}},
            '{"c":1}',
            "[",
            ["patternProperties at #"],
        ),
        (
            {"type": "object", "patternProperties": {"(?=a)": {}}, "unevaluatedProperties": False},
            '{"c":1}',
            "[",
            ["patternProperties at #", "unevaluatedProperties at #"],
        ),
        (
            {"type": "object", "allOf": [{"patternProperties": {"(?=a)": {}}}], "unevaluatedProperties": False},
            '{"c":1}',
            "[",
            ["patternProperties at #/allOf/0", "unevaluatedProperties at #"],
        ),
        ({"type": "string", "format": "regex", "minLength": 1}, '"x"', '""', ["format at #"]),
        (
            {"type": "array", "contains": {"pattern": "a"}, "maxContains": 1, "maxItems": 1},
            "[2]",
            "[1,1]",
            ["contains at #", "maxContains at #"],
        ),
        (
            {"items": {"minProperties": 3, "type": "object"}},
            '[{"a":1,"b":1,"c":1}]',
            "[1]",
            ["minProperties at #/items"],
        ),
        (
            {"type": "array", "contains": {"const": 1}, "items": {"not": {"multipleOf": 2}}},
            "[1,2]",
            "[]",
            ["not at #/items"],
        ),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "1", '"1"', ["oneOf at #"]),
        (
            {"type": "object", "patternProperties": {"a": {"type": "null"}, "^a": {}}, "minProperties": 1},
            '{"a":1}',
            "{}",
            ["patternProperties at #"],
        ),
        (
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "not": {"multipleOf": 2}},
            "0.25",
            "0",
            ["not at #"],
        ),
        ({"type": "string", "pattern": "^([a-z][0-9])+$", "minLength": 10_000}, '"x"', "1", None),
        ({"type": "string", "pattern": "^a+$"}, '"aa"', '"b"', []),
    ],
    ids=str,
)
def test_what_is_not_strict_relaxes_single_keywords_and_names_them(content, taken, not_taken, named):
    constraint = schema(content, strict=False)
    assert takes(constraint, taken)
    assert not takes(constraint, not_taken)
    relaxed: list[str] = []
    parse_grammar(constraint, relaxed)
    assert named is None or relaxed == named


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "a{1000}{1000}", "p"),
        Constraint("regex", "x|(ab){1000}{500}", "p"),
        Constraint("regex", "((a{1,100}){1,100}){1,100}", "p"),
        Constraint("choice", ["ab" * 9000], "p"),
        Constraint("grammar", 'start: "x" ("a"{1000}){1000}', "p"),
        Constraint("grammar", f'root ::= {" ".join(["item"] * 600)}\nitem ::= "{"a" * 30}"', "p"),
        schema({"type": "array", "items": {"const": "a" * 500}, "minItems": 100}),
    ],
    ids=str,
)
def test_what_takes_too_much_to_follow_is_refused(constraint):
    with pytest.raises(GrammarFault, match=r"Send a simpler one\.$"):
        parse_grammar(constraint)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "[ab]{1000}{1000}", "p"),
        Constraint("choice", ["ab" * 8000], "p"),
        Constraint("choice", [f"item {number}" for number in range(2000)], "p"),
        schema({"type": "string", "maxLength": 60_000}),
        schema({"properties": {f"p{number}": {"format": "date-time"} for number in range(200)}}),
    ],
    ids=lambda constraint: constraint.form,
)
def test_what_is_large_is_taken_if_each_step_is_small(constraint):
    assert parse_grammar(constraint).text


@pytest.mark.parametrize("token", [0, 4095, 1023, 1022, 200_000])
def test_tokens_may_be_named_by_their_ids(token):
    for grammar in (
        f'start: "a" | <[{token}]> "b"',
        f'start: <[{token}]> "b"',
        f'start: <[0-{token}]> "b"',
        f'start: <[^0-{token}]> "b"',
        f'start: <[0,{token}]> "b"',
    ):
        assert parse_grammar(Constraint("lark", grammar, "p")).text == grammar


def test_what_is_nested_too_deeply_is_refused():
    nested: dict[str, object] = {}
    for _ in range(5000):
        nested = {"items": nested}
    with pytest.raises(GrammarFault, match="nested too deeply"):
        parse_grammar(schema(nested))


def test_words_of_our_own_in_a_schema_mean_nothing():
    assert not takes(schema({"type": "integer", "not": {}, "x-guidance": {"lenient": True}}, strict=False), "x")
    with pytest.raises(GrammarFault, match="`not`"):
        parse_grammar(schema({"type": "integer", "not": {}, "x-guidance": {"lenient": True}}))


@pytest.mark.parametrize(
    ("name", "taken", "not_taken"),
    [
        ("json-pointer", ["", "/a/b", "/a~0b/~1"], ["a", "/~2", "/~"]),
        ("relative-json-pointer", ["0", "1/a", "0#"], ["01", "a", "-1", "0##"]),
        ("uri-reference", ["a/b", "/a", "http://a/b", "a?b=c#d"], ["a b", "#a#b", "\\", " "]),
        ("iri-reference", ["a/b", "http://a/b"], ["a b"]),
        ("idn-email", ["a.b@c.de"], ["a", "@", "b", "a..b@c", "a@b..c"]),
        ("idn-hostname", ["a-b.c"], ["-a", "a..b"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        ("ipv4", ["0.0.0.0", "255.1.2.3"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
        ("email", ["a.b+c@example.com"], ["a", "a@", "@b"]),
        ("uri", ["http://a.b/c?d=e#f", "urn:isbn:1"], ["a/b", "//a", "http://a b"]),
        ("date-time", ["2024-02-29T12:00:00.5+05:30"], ["2023-02-29T12:00:00Z", "2024-01-01 12:00:00Z", "2024-01-01"]),
    ],
)
def test_formats_are_those_of_the_standards(name, taken, not_taken):
    content = schema({"type": "string", "format": name})
    assert [text for text in taken if not takes(content, json.dumps(text))] == []
    assert [text for text in not_taken if takes(content, json.dumps(text))] == []
