"""Requests whose grammars are being compiled hold nothing, and those whose grammars fail are given back."""

import threading

import pytest
from llguidance import LLTokenizer

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.grammar import Grammar
from maitred.core.request import EngineRequest, SamplingParams, WaitCause
from maitred.engine.engine import Engine
from maitred.engine.grammar.compiler import GrammarCompiler
from maitred.engine.grammar.constraints import Constraints
from maitred.engine.kv.blocks import BlockPool
from maitred.text.grammar.language import GrammarFault
from tests.support.clock import FakeClock
from tests.support.schedulers import make_scheduler


class CountingRunner:
    """Follows every token by its successor."""

    def execute(self, plan):
        return [[chunk.sequence.tokens[-1] + 1] for chunk in plan.sampling], [None for _ in plan.sampling]

    def forget(self, sequence):
        pass


class Bench:
    def __init__(self, *, max_unused_bytes=1 << 20):
        self.clock = FakeClock()
        self.gate = threading.Event()
        self.failure = None
        self.compiler = GrammarCompiler(self.vocabulary, max_unused_bytes=max_unused_bytes)
        self.constraints = Constraints(self.compiler, 4096, (4,))
        scheduler = make_scheduler(
            BlockPool(16), block_tokens=4, max_sequences=2, step_tokens=16, context_tokens=64, eos_token_ids=(4,)
        )
        self.engine = Engine(
            *(scheduler, CountingRunner(), self.clock), vocab_size=4096, max_choices=4, constraints=self.constraints
        )

    def vocabulary(self):
        self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        return LLTokenizer((BUNDLED_MODEL / "tokenizer.json").read_text(encoding="utf-8"), eos_token=[4])

    def submit(self, request_id, *, regex=None, **fields):
        grammar = None if regex is None else Grammar("regex", regex)
        sampling = SamplingParams(max_tokens=2, seed=0, grammar=grammar, **fields)
        self.engine.submit("owner", EngineRequest(request_id, [7, 8, 9], sampling))

    def compiled(self, regex):
        self.gate.set()
        self.compiler.fault(Grammar("regex", regex))  # waits

    def step(self):
        return [output.request_id for output in self.engine.step().get("owner", [])]


def test_others_run_while_a_grammar_is_compiled():
    bench = Bench()
    bench.submit("constrained", regex="a", n=2)
    assert 0 < bench.engine.max_idle_s() < 0.1
    bench.submit("free")
    assert bench.engine.max_idle_s() == 0
    assert bench.step() == bench.step() == ["free"]
    load = bench.engine.load()
    assert (load.running, load.waiting, load.paused, load.free_blocks) == (0, 2, 0, load.total_blocks)
    bench.clock.now_s += 1.5
    bench.compiled("a")
    (first, second) = bench.engine.step()["owner"]
    assert {first.request_id, second.request_id} == {"constrained"}
    assert first.delta.waited_ms[WaitCause.GRAMMAR.value] == pytest.approx(1500)
    assert bench.step() == ["constrained"] * 2
    assert not bench.engine.occupied


def test_a_grammar_that_fails_is_reported_to_its_owner():
    bench = Bench()
    bench.submit("one", regex="a", n=2)
    bench.failure = GrammarFault("No tokenizer.")
    bench.compiled("a")
    assert bench.engine.max_idle_s() == 0
    assert bench.step() == []
    [(owner, rejection)] = bench.engine.rejections()
    assert (owner, rejection.request_id, rejection.message) == ("owner", "one", "No tokenizer.")
    assert bench.engine.rejections() == []
    assert not bench.engine.occupied


def test_a_reader_that_falls_behind_meanwhile_is_waited_for():
    bench = Bench()
    bench.submit("one", regex="a")
    bench.engine.pause("owner", "one", paused=True)
    bench.compiled("a")
    assert bench.step() == []
    bench.engine.pause("owner", "one", paused=False)
    assert bench.step() == ["one"]


def test_who_leaves_meanwhile_leaves_nothing():
    bench = Bench()
    bench.submit("one", regex="a", n=2)
    bench.engine.cancel("owner", "one", 0)
    bench.engine.cancel_owner("owner")
    bench.compiled("a") if Grammar("regex", "a") in bench.compiler._compiled else bench.gate.set()
    assert bench.step() == []
    assert not bench.engine.occupied


def test_only_so_many_grammars_that_nobody_uses_are_kept():
    bench = Bench(max_unused_bytes=140_000)
    for letter in "abcd":
        grammar = Grammar("regex", letter)
        bench.compiler.hold(grammar)
        bench.compiled(letter)
        bench.compiler.release(grammar, "one")
    assert [grammar.text for grammar in bench.compiler._compiled] == ["c", "d"]


def test_an_organisation_that_fills_the_cache_drives_out_its_own_grammars():
    bench = Bench(max_unused_bytes=270_000)
    for organisation, letter in (("modest", "a"), *(("greedy", letter) for letter in "bcdefg")):
        grammar = Grammar("regex", letter)
        bench.compiler.hold(grammar)
        bench.compiled(letter)
        bench.compiler.release(grammar, organisation)
    assert [grammar.text for grammar in bench.compiler._compiled] == ["a", "e", "f", "g"]


def test_a_grammar_under_which_much_was_written_counts_for_more():
    bench, grammar = Bench(max_unused_bytes=1 << 20), Grammar("regex", "[ab]*")
    bench.compiler.hold(grammar)
    bench.compiled("[ab]*")
    bench.compiler.add_tokens(grammar, 100)
    bench.compiler.release(grammar, "one")
    assert 100_000 < bench.compiler.unused_bytes < 1 << 20
    bench.compiler.hold(grammar)
    assert bench.compiler.unused_bytes == 0
    bench.compiler.add_tokens(grammar, 10_000)
    bench.compiler.release(grammar, "one")
    assert not bench.compiler._compiled


def test_a_grammar_whose_first_step_takes_long_is_found_when_it_is_compiled():
    bench, regex = Bench(), "a{1000}{1000}"
    bench.submit("poison", regex=regex)
    bench.submit("free")
    bench.compiled(regex)
    assert bench.step() == ["free"]
    ((_, rejection),) = bench.engine.rejections()
    assert rejection.request_id == "poison"
    assert rejection.message.startswith("The grammar cannot be followed: ")


def test_an_engine_without_a_vocabulary_says_so():
    engine = Engine(
        make_scheduler(
            BlockPool(4), block_tokens=4, max_sequences=1, step_tokens=4, context_tokens=8, eos_token_ids=()
        ),
        *(CountingRunner(), FakeClock()),
        vocab_size=10,
        max_choices=1,
    )
    sampling = SamplingParams(max_tokens=2, seed=0, grammar=Grammar("regex", "a"))
    with pytest.raises(ValueError, match="cannot be held to a grammar"):
        engine.submit("owner", EngineRequest("one", [1], sampling))
