"""Answers that follow a grammar, or are penalised, are the same token by token, whatever was guessed, and by whom."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.grammar import Constraint
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig, SpeculationConfig
from maitred.engine.grammar.state import SpeculativeGrammarState
from maitred.engine.speculate.speculator import Speculator
from maitred.text.grammar.reading import parse_grammar
from maitred.text.tokenizer import Tokenizer
from tests.support.clock import FakeClock
from tests.support.drafters import Always, Rumour

TOKENIZER = Tokenizer.load(BUNDLED_MODEL)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["rabbit", "raven", "river"]},
        "years": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 4},
    },
    "required": ["name", "kind", "years"],
    "additionalProperties": False,
}
FIELDS = [
    {},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "top_p": 0.95},
    {"top_logprobs": 2, "min_p": 0.02},
    {"min_tokens": 9, "logit_bias": {300: 2.0}},
    {"temperature": 0.0},
]


def make_engine(*, kv_bytes=16 << 20, **fields):
    config = EngineConfig(device="cpu", dtype="fp32", threads=1, kv_memory_bytes=kv_bytes, **fields)
    return build(BUNDLED_MODEL, config)[0]


@pytest.fixture(scope="module")
def plain():
    return make_engine(block_tokens=32)


@pytest.fixture(scope="module")
def rumour():
    return Rumour(4096)


@pytest.fixture(scope="module")
def guessing(rumour):
    engine = make_engine(block_tokens=32)
    engine._speculator = Speculator(rumour, 12, FakeClock(), worth=Always(), constraints=engine._constraints)
    return engine


def requests(schema, fields):
    grammar = None if schema is None else parse_grammar(Constraint("json_schema", schema, "guided_json"))
    prompt = TOKENIZER.encode("Once upon a time there was a little rabbit", add_special_tokens=False)
    return [
        EngineRequest(
            id=str(number),
            prompt=prompt[: 3 + number],
            sampling=SamplingParams(
                **{"max_tokens": 60, "seed": number, "temperature": 0.9, "n": 2, **fields}, grammar=grammar
            ),
        )
        for number in range(5)
    ]


def answers(engine, asked):
    tokens, scores, finishes = {}, {}, {}
    for request in asked:
        engine.submit("owner", request)
    while engine.occupied:
        for output in engine.step().get("owner", []):
            key = output.request_id, output.delta.index
            tokens.setdefault(key, []).extend(output.delta.tokens)
            scores.setdefault(key, []).extend(entry.logprob for entry in output.delta.logprobs or [])
            if output.delta.finish:
                finishes[key] = output.delta.finish
    assert not engine.rejections()
    return tokens, scores, finishes


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("schema", [SCHEMA, None], ids=["schema", "free"])
def test_answers_are_the_same(plain, guessing, rumour, schema, fields):
    expected = answers(plain, requests(schema, fields))
    rumour.answers = expected[0]
    before = guessing.load()
    assert answers(guessing, requests(schema, fields)) == expected
    after = guessing.load()
    drafted, right = after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens
    assert 0.2 * drafted < right < drafted
    assert after.free_blocks == after.total_blocks


@pytest.fixture(scope="module")
def fewer_layers(tmp_path_factory):
    """The bundled model without its last two layers: a draft model that is often wrong."""
    folder = tmp_path_factory.mktemp("models") / "fewer-layers"
    shutil.copytree(BUNDLED_MODEL, folder)
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 3}))
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".3." not in n and ".4." not in n}, folder / "model.safetensors")
    return folder


def drafted_by(**speculation):
    """An engine whose drafts always pay."""
    engine = make_engine(block_tokens=32, speculation=SpeculationConfig(**speculation))
    engine._speculator._benefit = Always()
    return engine


@pytest.mark.parametrize("fields", [{"temperature": 0.0, "n": 1}, {}], ids=str)
def test_a_draft_model_under_a_grammar_changes_no_token(plain, fewer_layers, fields):
    expected = answers(plain, requests(SCHEMA, fields))
    for draft_model in (BUNDLED_MODEL, fewer_layers):
        engine = drafted_by(method="draft_model", draft_model=str(draft_model))
        assert answers(engine, requests(SCHEMA, fields)) == expected
        load = engine.load()
        assert load.drafted_tokens > 20
        assert 0 < load.accepted_tokens <= load.drafted_tokens
        assert load.free_blocks == load.total_blocks


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_grammars_drafts_shared_prefixes_and_preemption_at_once_change_no_token(plain, fewer_layers, method):
    """The KV cache is too small for all of them, and what was preempted finds its prefix in it again, or not."""
    text = TOKENIZER.encode("There was a rabbit named Ruby, 7 years old, and a raven. " * 4, add_special_tokens=False)
    grammar = parse_grammar(Constraint("json_schema", SCHEMA, "guided_json"))
    asked = [
        EngineRequest(
            id=str(number),
            prompt=text[: 30 + 3 * (number % 4)],
            sampling=SamplingParams(
                max_tokens=60, seed=number, temperature=0.8 * (number % 2), grammar=grammar if number % 3 else None
            ),
        )
        for number in range(24)
    ]
    expected = answers(plain, asked)
    draft_model = str(fewer_layers) if method == "draft_model" else None
    engine = make_engine(
        block_tokens=16,
        kv_bytes=3 << 20,
        step_tokens=70,
        max_sequences=16,
        speculation=SpeculationConfig(method=method, draft_model=draft_model),
    )
    engine._speculator._benefit = Always()
    assert answers(engine, asked) == expected
    load = engine.load()
    assert load.preemptions
    assert load.cached_tokens
    assert load.drafted_tokens
    assert load.accepted_tokens or method == "ngram", "of guesses by look-up none need be right here"
    assert load.free_blocks == load.total_blocks


class Letters:
    """A place in a grammar of small numbers: 9 may not come, 1 forces 2 and 3, and 0 ends the answer."""

    def __init__(self):
        self.ended = False
        self.last = None

    def copy(self):
        return Letters()

    def take(self, token):
        self.last = token
        self.ended = token == 0
        return "no" if token == 9 else None

    def forced_tokens(self):
        return [2, 3] if self.last == 1 else []


def test_a_supposition_has_what_is_forced_and_says_where_the_model_chooses():
    supposition = SpeculativeGrammarState(Letters())
    supposition.follow((1, 2, 3, 5, 1), 12)
    assert supposition.tokens == [1, 2, 3, 5, 1, 2, 3]
    assert supposition.draws == [0, 3, 4, 7]
    assert len(supposition.words) == 4


def test_a_guess_that_disagrees_with_what_is_forced_ends_there():
    supposition = SpeculativeGrammarState(Letters())
    supposition.follow((5, 1, 2, 7, 7), 12)
    assert supposition.tokens == [5, 1, 2, 3]


def test_nothing_is_drafted_after_an_impossible_token_or_the_end_or_beyond_the_budget():
    impossible, ending, full = (SpeculativeGrammarState(Letters()) for _ in range(3))
    impossible.follow((5, 9, 5), 12)
    assert (impossible.tokens, impossible.draws) == ([5], [0, 1])
    ending.follow((5, 0, 5), 12)
    assert (ending.tokens, ending.draws) == ([5, 0], [0, 1])
    full.follow((5, 1, 2, 3), 3)
    assert (full.tokens, full.draws) == ([5, 1, 2], [0, 1])


def test_where_a_guess_was_right_its_place_is_known():
    word = Letters()
    supposition = SpeculativeGrammarState(word)
    supposition.follow((5, 1), 12)
    assert supposition.after(word, 7) is None
    first, forced = supposition.after(word, 5)
    assert forced == []
    assert supposition.after(first, 1) == (supposition.words[2], [2, 3])
    assert supposition.after(Letters(), 5) is None


def test_without_a_grammar_every_guess_is_chosen():
    supposition = SpeculativeGrammarState()
    supposition.follow((9, 1, 0), 2)
    assert (supposition.tokens, supposition.draws) == ([9, 1], [0, 1, 2])
