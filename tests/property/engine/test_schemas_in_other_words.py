"""Schemas with keywords that grammars do not know: whatever is written follows the schema, for a validator."""

import json
import random
from fractions import Fraction
from itertools import product

from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from maitred.core.grammar import Constraint
from maitred.text.grammar.language import LIMITS, GrammarFault, grammar_source
from maitred.text.grammar.reading import parse_grammar

BYTES = LLTokenizer("byte")
ANSWERS, MOST_BYTES = 4, 100
USUAL = frozenset(b'0123456789.abcx"[]{},:-')
VALUES = [
    *(None, True, False, 0, 1, 2, 3, -1, 0.5, 1.5, "", "a", "b", "ab", "abc", "xa", [], [1], ["a"], [1, "a"], [1, 1]),
    *(["a", "b"], [1, 2, 3], [0, 1, "a", 2], [[1], [2]], {}, {"a": 1}, {"b": "a"}, {"a": 1, "b": 2}, {"xa": 1}),
    *({"a": "a", "b": "b", "c": 1}, {"a": 1, "xa": 2}, {"c": 1, "zz": 2}, {"zz": 1, "zy": 2}, {"a": [1]}),
]
names = st.sampled_from(["a", "b", "c", "xa"])
few = st.integers(0, 3)
leaves = st.sampled_from(
    [
        *(
            True,
            False,
            {},
            {"type": "integer"},
            {"type": "string"},
            {"type": "boolean"},
            {"type": "null"},
            {"const": 1},
        ),
        *(
            {"enum": [1, 2, "a"]},
            {"type": "integer", "minimum": 1},
            {"type": "string", "maxLength": 1},
            {"minLength": 1},
        ),
        *({"type": "string", "pattern": "^a"}, {"exclusiveMinimum": 1}, {"type": ["string", "null"]}, {"maximum": 1}),
    ]
)


def some(**keywords):
    return st.fixed_dictionaries({}, optional=keywords)


def deeper(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    closing = st.sampled_from([False, {"type": "integer"}])
    arrays = some(
        type=st.just("array"),
        items=inner,
        prefixItems=several,
        contains=inner,
        minContains=few,
        maxContains=few,
        minItems=few,
        maxItems=few,
        uniqueItems=st.just(True),
        unevaluatedItems=closing,
    )
    objects = some(
        type=st.just("object"),
        properties=st.dictionaries(names, inner, min_size=1, max_size=3),
        required=st.lists(names, max_size=2, unique=True),
        additionalProperties=closing,
        patternProperties=st.dictionaries(st.sampled_from(["^x", "a"]), leaves, min_size=1, max_size=1),
        minProperties=st.integers(0, 4),
        maxProperties=few,
        propertyNames=st.sampled_from([{"pattern": "^[ab]"}, {"enum": ["a", "b"]}, {"maxLength": 1}, {"minLength": 2}]),
        dependentRequired=st.dictionaries(names, st.lists(names, max_size=1), min_size=1, max_size=1),
        dependentSchemas=st.dictionaries(names, inner, min_size=1, max_size=1),
        unevaluatedProperties=closing,
    )
    choices = st.one_of(
        some(anyOf=several), some(oneOf=several), some(allOf=several), inner.map(lambda schema: {"not": schema}),
        some(then=inner, **{"if": inner, "else": inner}),
    )  # fmt: skip
    return st.one_of(arrays, objects, choices, st.builds(lambda one, other: {**one, **other}, objects, choices))


schemas = st.recursive(leaves, deeper, max_leaves=6).filter(lambda schema: isinstance(schema, dict))


def written(start, chance):
    """An answer by chance, or None if it has not ended in time."""
    matcher, text = start.deep_copy(), bytearray()
    while len(text) < MOST_BYTES and not (matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.5)):
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        usual = [byte for byte in allowed if byte in USUAL]
        byte = chance.choice(usual or allowed)
        assert matcher.consume_token(byte)
        text.append(byte)
    return bytes(text) if matcher.is_accepting() else None


def takes(start, text):
    matcher = start.deep_copy()
    return matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting()


def matcher_of(schema):
    grammar = parse_grammar(Constraint("json_schema", schema, "p"))
    return LLMatcher(BYTES, grammar_source(grammar), log_level=0, limits=LIMITS)


@settings(max_examples=125)
@given(schemas, st.integers(0, 2**32))
# What is rewritten can be too narrow, so that what is not in it would be too wide.
@example({"oneOf": [True, {"not": {"type": "integer", "minimum": 1}}]}, 0)
@example({"oneOf": [{"type": "array"}, {"not": {"items": {"not": {"type": "integer"}}}}]}, 0)
@example({"oneOf": [{"items": {}, "minContains": 1, "then": False}, {"not": {"contains": {"type": "null"}}}]}, 0)
@example({"oneOf": [{"type": "number"}, {"oneOf": [True, {"not": {"type": "integer"}}]}]}, 0)
def test_what_is_written_is_valid(schema, seed):
    try:
        start = matcher_of(schema)
    except GrammarFault:
        return
    chance, validator = random.Random(seed), Draft202012Validator(schema)
    answers = [answer for _ in range(ANSWERS) if (answer := written(start, chance)) is not None]
    for value in VALUES:
        text = json.dumps(value, separators=(",", ":")).encode()
        if takes(start, text):
            answers.append(text)
    for answer in answers:
        assert validator.is_valid(json.loads(answer)), answer


edges = st.sampled_from(
    [0, 1, 5, 0.5, 0.1, 1e-7, 3e-9, 99.99, 2**53, 2**53 + 1, 10**18 + 1, 2**63 - 1, 2**64, 1e21, 1e15 + 0.5]
)
numbers = st.builds(
    lambda edge, sign, step: sign * edge + step, edges, st.sampled_from([1, -1]), st.sampled_from([0, 1, 0.25])
)
bounds = some(
    minimum=numbers,
    maximum=numbers,
    exclusiveMinimum=numbers,
    exclusiveMaximum=numbers,
    multipleOf=st.sampled_from([1, 3, 0.5, 0.1, 0.01, 1.5, 100]),
)


def exact(text):
    return json.loads(text, parse_float=lambda digits: whole(Fraction(digits)))


def whole(number):
    return int(number) if number.denominator == 1 else number


def texts_around(bound):
    for step in (Fraction(), Fraction(1), Fraction(1, 10), Fraction(1, 10**9)):
        for number in (exact(json.dumps(bound)) + step, exact(json.dumps(bound)) - step):
            digits = str(abs(int(number * 10**20))).zfill(21)
            text = f"{digits[:-20]}.{digits[-20:]}".rstrip("0").rstrip(".")
            yield from (f"-{text}",) if number < 0 else (text, f"-{text}") if not number else (text, f"{text}.0")


@settings(max_examples=125)
@given(bounds, bounds, st.sampled_from(["number", "integer", ["integer", "null"]]), st.booleans())
def test_numbers_are_within_their_bounds(one, other, kind, apart):
    schema = {"type": kind, "allOf": [one, other]} if apart else {"type": kind, **one, **other}
    try:
        start = matcher_of(schema)
    except GrammarFault:
        return
    validator = Draft202012Validator(exact(json.dumps(schema)))
    for bound in [*one.values(), *other.values()]:
        for text in texts_around(bound):
            if takes(start, text.encode()):
                assert validator.is_valid(exact(text)), text


SMALL_VALUES = [None, False, True, 0, 1, 2, 3, "", "a"]
small_bounds = st.integers(0, 3)


@settings(max_examples=40)
@given(
    st.one_of(
        st.lists(st.sampled_from(SMALL_VALUES), min_size=1, max_size=5).map(lambda values: {"enum": values}),
        st.sampled_from([{"type": "boolean"}, {"const": True}, {"type": ["integer", "null"], "enum": [1, True, None]}]),
        st.fixed_dictionaries(
            {"type": st.just("integer")},
            optional={"minimum": small_bounds, "exclusiveMinimum": small_bounds, "exclusiveMaximum": small_bounds},
        ),
    )
)
def test_arrays_of_unique_items_are_all_and_only_the_valid_ones_where_items_are_few(items):
    schema = {"type": "array", "uniqueItems": True, "items": items, "maxItems": 2}
    try:
        start = matcher_of(schema)
    except GrammarFault:
        assert items.get("type") == "integer"  # unbounded, or none at all
        return
    validator = Draft202012Validator(schema)
    for length in range(4):
        for array in product(SMALL_VALUES, repeat=length):
            valid = validator.is_valid([*array])
            assert takes(start, json.dumps(array, separators=(",", ":")).encode()) == valid, array
