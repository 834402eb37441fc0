"""What a gateway knows of an engine's prefix cache is what the engine would find there, at every step."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.prefix import shared_scope
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.engine import Engine
from maitred.engine.kv import blocks
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable
from maitred.routing.prefix import PrefixCacheBalancer
from tests.support.clock import FakeClock
from tests.support.schedulers import make_scheduler

BLOCK_TOKENS, BLOCKS = 4, 24
SYSTEMS = [[1] * 12, [1] * 8 + [2] * 12, [3] * 9]
prompts = st.tuples(st.sampled_from(SYSTEMS), st.lists(st.integers(1, 3), min_size=1, max_size=20)).map(
    lambda drawn: drawn[0] + drawn[1]
)
requests = st.lists(
    st.tuples(prompts, st.sampled_from(["acme", "umbrella"]), st.integers(1, 12)), min_size=1, max_size=20
)


class Succession:
    """The next token is one of three."""

    def execute(self, plan):
        tokens = [[1 + len(chunk.sequence.tokens) % 3] for chunk in plan.sampling]
        return tokens, [None] * len(tokens)

    def forget(self, sequence):
        pass


def engine(*, blocks=BLOCKS):
    scheduler = make_scheduler(
        BlockPool(blocks),
        block_tokens=BLOCK_TOKENS,
        max_sequences=4,
        step_tokens=16,
        context_tokens=64,
        eos_token_ids=(0,),
    )
    return Engine(scheduler, Succession(), FakeClock(), vocab_size=8, max_choices=4), scheduler.pool


def placement():
    return PrefixCacheBalancer(SimpleNamespace(choose=None))


def found(pool, scope, prompt):
    return BlockTable(pool, BLOCK_TOKENS, shared_scope(scope)).cached_tokens(prompt)


@settings(max_examples=40, deadline=None)
@given(asked=requests, every=st.integers(1, 3), joins_at=st.integers(0, 10))
def test_every_prompt_is_found_as_the_engine_finds_it(asked, every, joins_at):
    runs, pool = engine()
    followers = {"first": placement()}
    followers["first"].on_block_update("e", runs.block_update(whole=True))
    for number, (prompt, scope, output) in enumerate(asked):
        sampling = SamplingParams(max_tokens=output, seed=0, ignore_eos=True)
        runs.submit("owner", EngineRequest(str(number), prompt, sampling, cache_scope=scope))
    step = 0
    while runs.occupied:
        runs.step()
        step += 1
        if step == joins_at:
            followers["late"] = placement()
            followers["late"].on_block_update("e", runs.block_update(whole=True))
        if step % every and runs.occupied:
            continue
        news = runs.block_update()
        for name, follower in followers.items():
            if news is not None:
                follower.on_block_update("e", news)
            for prompt, scope, _ in asked:
                assert follower.cached_tokens(scope, [prompt])["e"] == found(pool, scope, prompt), (name, step)
    assert pool.idle == pool.total


def test_what_is_expected_is_found_until_the_engine_says_what_came_of_it():
    runs, pool = engine()
    follower = placement()
    follower.on_block_update("e", runs.block_update(whole=True))
    follower.on_dispatch("e", 0, "acme", [[1] * 20])
    assert follower.cached_tokens("acme", [[1] * 20, [1] * 9]) == {"e": 16 + 8}
    assert follower.cached_tokens("umbrella", [[1] * 20]) == {"e": 0}
    for seed in range(30):  # nobody computes these; what is expected does not pile up
        follower.on_dispatch("e", 0, "acme", [[2, seed] * 12])
    assert follower.cached_tokens("acme", [[1] * 20]) == {"e": 0}
    follower.on_dispatch("e", 0, "acme", [[1] * 20])
    runs.submit("owner", EngineRequest("r", [1] * 20, SamplingParams(max_tokens=1, seed=0), cache_scope="acme"))
    while runs.occupied:
        runs.step()
    follower.on_block_update("e", runs.block_update())
    assert follower.cached_tokens("acme", [[1] * 20]) == {"e": found(pool, "acme", [1] * 20)} == {"e": 16}
    follower.on_block_update("e", engine()[0].block_update(whole=True))
    assert follower.cached_tokens("acme", [[1] * 20]) == {"e": 0}, "it has started anew"


def test_more_changes_than_an_update_holds_skip_a_sequence_number(monkeypatch):
    monkeypatch.setattr(blocks, "MOST_CHANGES", 3)
    runs, _ = engine()
    assert runs.block_update() is None
    runs.submit("owner", EngineRequest("r", [1] * 20, SamplingParams(max_tokens=1, seed=0)))
    while runs.occupied:
        runs.step()
    assert runs.block_update() is None, "five blocks are more than three"
    runs.submit("owner", EngineRequest("s", [2] * 4 + [1] * 5, SamplingParams(max_tokens=1, seed=0)))
    while runs.occupied:
        runs.step()
    news = runs.block_update()
    assert news.sequence == 2
    assert len(news.stored) == 2 * 16
    assert runs.block_update(whole=True).sequence == 2


@pytest.mark.parametrize("name", ["reported", "guessed"])
def test_an_emptied_engine_is_forgotten_unless_it_reports_its_blocks(name):
    follower, (runs, _) = placement(), engine()
    if name == "reported":
        follower.on_block_update("e", runs.block_update(whole=True))
    follower.on_dispatch("e", 10_000, "acme", [[1] * 200])
    before = follower.cached_tokens("acme", [[1] * 200])["e"]
    assert before > 0
    follower.on_restart("e")
    assert follower.cached_tokens("acme", [[1] * 200])["e"] == (before if name == "reported" else 0)


def test_news_before_the_whole_are_passed_over():
    follower, (runs, _) = placement(), engine()
    runs.submit("owner", EngineRequest("r", [1] * 20, SamplingParams(max_tokens=1, seed=0)))
    runs.step()
    runs.step()
    follower.on_block_update("e", runs.block_update())
    assert follower.cached_tokens("", [[1] * 20]) == {}
