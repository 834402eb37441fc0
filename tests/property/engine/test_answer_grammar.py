"""Whatever a model writes that is held to the grammar of its answers, it calls tools as they are declared."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema
import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.app.request.output import OutputProcessor
from maitred.app.request.tokenized import make_answer_parser
from maitred.core.grammar import Grammar
from maitred.core.inference import InferenceRequest
from maitred.core.request import FinishReason, SamplingParams, TokenDelta
from maitred.core.tools import Tool, ToolRules
from maitred.text.answer_format import AnswerFormat
from maitred.text.answer_grammar import answer_grammar
from tests.support.tool_models import TEMPLATES, save_tool_tokenizer

END = 4
GUIDANCE = {"x-guidance": {"whitespace_pattern": " ?"}}
SCHEMAS = {
    "look": {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}, "times": {"type": "integer", "minimum": 0, "maximum": 20}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["sky", 'the "sea"', "空", "a/b\\c"]}},
    },
    "look.up": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "go": {"type": "object", "properties": {}, "additionalProperties": False},
}
ARGUMENTS = {name: Grammar("json_schema", json.dumps(schema | GUIDANCE)) for name, schema in SCHEMAS.items()}
TOOLS = tuple(Tool(name, "tools", {}, schema) for name, schema in SCHEMAS.items())
OBJECT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORM = Grammar("json_schema", json.dumps({**OBJECT, **GUIDANCE}))


@cache
def family(name):
    with TemporaryDirectory() as folder:
        tokenizer = save_tool_tokenizer(Path(folder), name)
        source = (Path(folder) / "tokenizer.json").read_text()
    return tokenizer, AnswerFormat.of(tokenizer), llguidance.LLTokenizer(source, eos_token=END)


def matcher(name, rules, answer_text, inside):
    _, answers, _ = family(name)
    return compiled(name, answer_grammar(answers, inside=inside, said=answer_text, tools=rules, arguments=ARGUMENTS))


@cache
def compiled(name, grammar):
    _, _, vocabulary = family(name)
    made = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar.text))
    assert not made.is_error(), made.get_error()
    return made


def walk(machine, chance, most):
    """Tokens drawn from those that the grammar allows, and whether it let them end."""
    machine = machine.deep_copy()
    tokens = []
    while len(tokens) < most and not machine.is_stopped():
        mask = machine.compute_bitmask()
        allowed = [number for number in range(len(mask) * 8) if mask[number // 8] >> number % 8 & 1]
        # Among thousands of words, what structures an answer would hardly ever be drawn.
        special = [number for number in allowed if number >= 4096 or number == END]
        token = chance.choice(special if special and chance.random() < 0.5 else allowed)
        if token == END:
            return tokens, True
        assert machine.consume_token(token)
        tokens.append(token)
    return tokens, machine.is_accepting()


def read(name, tokens, rules, prompt):
    """The calls, the text and the thought that a caller gets."""
    tokenizer, answers, _ = family(name)
    reader = make_answer_parser(answers, tokenizer, prompt, rules)
    ask = InferenceRequest("m", [], SamplingParams(max_tokens=1, seed=0))
    choice = OutputProcessor(
        tokenizer, prompt, ask, eos_token_ids=[END], special_token_text=answers.marks.bytes_of, parser=reader
    )
    choice.process(TokenDelta(0, [*tokens, END], FinishReason.STOP))
    parts = choice.deltas(0)
    pieces = [piece for part in parts for piece in (part.extra or {}).get("tool_calls", ())]
    calls = [
        (first["function"]["name"], "".join(p["function"]["arguments"] for p in pieces if p["index"] == first["index"]))
        for first in pieces
        if "id" in first
    ]
    return calls, "".join(part.text for part in parts), parts[-1].finish


def check(calls):
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def prompt_of(name):
    tokenizer, _, _ = family(name)
    return tokenizer.encode(
        "<|assistant|><think>\n" if name == "thinking" else "<|assistant|>", add_special_tokens=False
    )


@given(st.sampled_from(sorted(TEMPLATES)), st.booleans(), st.sampled_from([None, *SCHEMAS]), st.integers(0, 2**32))
def test_an_answer_that_must_call_calls(name, parallel, only, seed):
    rules = ToolRules(TOOLS, must=True, only=only, parallel=parallel and only is None)
    tokens, ended = walk(matcher(name, rules, None, name == "thinking"), random.Random(seed), 400)
    calls, text, finish = read(name, tokens, rules, prompt_of(name))
    if ended:
        assert calls
        assert not text.strip()
        assert finish is FinishReason.TOOL_CALLS
        check(calls)
        assert only is None or [called for called, _ in calls] == [only]
        assert rules.parallel or len(calls) == 1


@given(st.sampled_from(sorted(TEMPLATES)), st.integers(0, 2**32), st.booleans())
def test_an_answer_that_may_call_calls_as_it_must(name, seed, formed):
    rules = ToolRules(TOOLS)
    machine = matcher(name, rules, FORM if formed else None, name == "thinking")
    tokens, ended = walk(machine, random.Random(seed), 200)
    calls, text, _ = read(name, tokens, rules, prompt_of(name))
    if ended:
        check(calls)
        assert not formed or calls or json.loads(text)["a"] in (1, 2)


WRITTEN = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>',
    "thinking": 'Hm. {"no": </think>\n\n<tool_call>\n{"name": "look.up", "arguments": {"name": "a"}}\n</tool_call>',
    "llama": '{"name": "go", "parameters": {}}; {"name": "look", "parameters": {"at": "sky", "times": 3}}',
    "mistral": 'Let me see.[TOOL_CALLS]look[ARGS]{"at": "sky"}[TOOL_CALLS]go[ARGS]{}',
    "old_mistral": '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "空"}}, {"name": "go", "arguments": {}}]',
}
REFUSED = {
    "hermes": [
        '<tool_call>\n{"name": "fly"',
        '<tool_call>\n{"name": "look", "arguments": {"at": "moon"',
        "<tool_call>So",
    ],
    "thinking": ['Hm.</think><tool_call>\n{"name": "fly"'],
    "llama": ['{"name": "look", "parameters": {"at": "moon"', "<|python_tag|>print(", '{"name": "go"}'],
    "mistral": ["[TOOL_CALLS]fly", "[TOOL_CALLS]go[ARGS]x"],
    "old_mistral": ['[TOOL_CALLS] [{"name": "fly"', "[TOOL_CALLS] []"],
}
PLAIN = ["A bird.", 'So: {"name": "go"}', '{"name": "Bob", "parameters": 5}', "a <tool_ca", "{", " \n{}", "/\\"]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_what_a_model_was_trained_to_write_passes(name):
    tokenizer, _, _ = family(name)
    machine = matcher(name, ToolRules(TOOLS), None, name == "thinking")

    def taken(text):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        one = machine.deep_copy()
        return one.try_consume_tokens(tokens) == len(tokens), one.is_accepting()

    assert taken(WRITTEN[name]) == (True, True)
    for text in REFUSED[name]:
        assert taken(text) == (False, False), text
    for text in PLAIN:
        assert taken(("</think>" if name == "thinking" else "") + text) == (True, True), text


def test_a_form_is_due_only_behind_the_thought():
    tokenizer, answers, _ = family("thinking")
    for answer_text, text in (
        (FORM, '{"a": 1}'),
        (Grammar("regex", r"[0-9]+/[0-9]+"), "12/3"),
        (Grammar("lark", 'start: "a" B+\nB: /b|c/\n'), "abcb"),
    ):
        machine = matcher("thinking", None, answer_text, True)
        for answer, taken in ((f"Well </think>\n\n{text}", True), (text, False), (f"</think>{text}no", False)):
            tokens = tokenizer.encode(answer, add_special_tokens=False)
            one = machine.deep_copy()
            assert (one.try_consume_tokens(tokens) == len(tokens) and one.is_accepting()) is taken
    assert answer_grammar(family("hermes")[1], inside=False, said=FORM) is FORM, "without thoughts nothing comes before"
    assert answer_grammar(answers, inside=True) is None
