"""Whatever the logits, an answer that ends is one that its schema allows; and where it was cut, it goes on the same."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.grammar import Constraint
from maitred.core.request import SamplingParams
from maitred.engine.grammar.compiler import GrammarCompiler, load_vocabulary
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.sampling.sampler import Sampler
from maitred.text.grammar.reading import parse_grammar
from maitred.text.tokenizer import Tokenizer

VOCABULARY, EOS = 4096, 4
MOST_TOKENS = 600
TOKENIZER = Tokenizer.load(BUNDLED_MODEL)

names = st.text("abcxyz_é", min_size=1, max_size=5)
small = st.integers(0, 3)


def bounds(least, most):
    return lambda low, further: {least: low, most: low + further}


leaves = st.one_of(
    st.builds(lambda b: {"type": "string", **b}, st.builds(bounds("minLength", "maxLength"), small, small)),
    st.builds(lambda b: {"type": "integer", **b}, st.builds(bounds("minimum", "maximum"), small, st.integers(0, 400))),
    st.just({"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.25}),
    st.just({"type": "string", "pattern": "^[a-c]{1,4}$"}),
    st.sampled_from(["date", "time", "date-time", "ipv4", "uuid"]).map(lambda name: {"type": "string", "format": name}),
    st.lists(st.one_of(names, st.integers(-9, 9), st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1]}}]),
)


def objects(inner):
    return st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.lists(
            st.sampled_from(sorted(properties)) if properties else st.nothing(), unique=True
        ).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        )
    )


def composites(inner):
    return st.one_of(
        objects(inner),
        st.builds(
            lambda items, counts: {"type": "array", "items": items, **counts},
            inner,
            st.builds(bounds("minItems", "maxItems"), small, small),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    )


schemas = st.recursive(leaves, composites, max_leaves=6)


class Row:
    """One constrained sequence, and what draws its tokens."""

    compiler = GrammarCompiler(lambda: load_vocabulary(BUNDLED_MODEL, VOCABULARY, (EOS,)))
    sampler = Sampler(VOCABULARY, torch.device("cpu"))

    def __init__(self, schema, seed, output=(), **sampling):
        grammar = parse_grammar(Constraint("json_schema", schema, "guided_json"))
        self.compiler.hold(grammar)
        assert self.compiler.fault(grammar) is None  # waits until it is compiled
        self.params = SamplingParams(max_tokens=MOST_TOKENS, seed=seed, temperature=0.9, grammar=grammar, **sampling)
        self.constraints = Constraints(self.compiler, VOCABULARY, (EOS,))
        self.constraints.add(1, self.params, output)
        self.sampler.add(1, self.params, 0, [1], output, (EOS,))
        self.output = [*output]

    def step(self):
        """One step on logits that depend on seed and position alone, as a model's depend on what came before."""
        forced = self.constraints.opening(1)
        if forced:
            self.output += forced
            return
        position = len(self.output)
        logits = np.random.default_rng([self.params.seed, position]).normal(0, 3, (1, VOCABULARY)).astype(np.float32)
        masks = self.constraints.start([1], [position]).result()
        (token,) = self.sampler.sample(torch.from_numpy(logits), [1], [position], masks).tokens
        self.output += [token, *self.constraints.advance(1, token)]
        assert not self.constraints.faults

    def run(self):
        while self.output[-1:] != [EOS] and len(self.output) < MOST_TOKENS:
            self.step()
        return self.output


@settings(max_examples=60)
@given(schemas, st.integers(0, 2**32), st.booleans())
def test_every_answer_is_valid(schema, seed, scored):
    try:
        row = Row(schema, seed, top_logprobs=0 if scored else None)
    except ValueError:
        return  # refused: nothing is promised
    output = row.run()
    if output[-1] == EOS:
        answer = json.loads(TOKENIZER.decode(output))
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(answer)
    if scored:
        assert row.constraints.forced_tokens == 0


@settings(max_examples=30)
@given(schemas, st.integers(0, 2**32), st.data())
def test_an_answer_goes_on_elsewhere_as_if_it_had_not_been_cut(schema, seed, data):
    row, cuts = Row(schema, seed), []
    while row.output[-1:] != [EOS] and len(row.output) < MOST_TOKENS:
        row.step()
        cuts.append(len(row.output))
    cut = data.draw(st.sampled_from(cuts[:-1] or [0]))
    assert Row(schema, seed, row.output[:cut]).run() == row.output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_come_without_a_step(temperature):
    schema = {"const": {"a rather long name": "and a rather long value"}}
    row = Row(schema, 1)
    row.step()
    assert row.output == row.run()
    assert TOKENIZER.decode(row.output) == json.dumps(schema["const"], separators=(",", ":"))
    assert row.constraints.forced_tokens == len(row.output) - 1
