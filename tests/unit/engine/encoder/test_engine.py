"""Which texts are computed together, and what becomes of the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.flow import Flow, FlowLevel
from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.encoder.engine import BLOCK_TOKENS, EncoderEngine
from maitred.fairness.fair_queue import QueueOrderConfig
from tests.support.clock import FakeClock

NOTHING = SamplingParams(max_tokens=0, seed=0)


class Encoding:
    """Gives each text its own first token as a vector, and takes a millisecond per token."""

    def __init__(self, clock):
        self.clock = clock
        self.batches = []

    def __call__(self, texts):
        self.batches.append([len(text) for text in texts])
        self.clock.now_s += 0.001 * sum(map(len, texts))
        return [bytes(text[:1]) for text in texts]


class Bench:
    def __init__(self, *, step_tokens=10, max_sequences=8, policy="fair"):
        self.clock = FakeClock()
        self.encoding = Encoding(self.clock)
        self.engine = EncoderEngine(
            self.encoding,
            self.clock,
            line=QueueOrderConfig(policy=policy),
            vocab_size=200,
            context_tokens=64,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
        )

    def submit(self, name, length=3, *, owner="gateway", token=5, flow=None, **fields):
        extra = {} if flow is None else {"flow": Flow((FlowLevel(flow),))}
        self.engine.submit(owner, EngineRequest(name, [token] * length, NOTHING, **extra, **fields))

    def step(self, owner="gateway"):
        return {output.request_id: output.delta for output in self.engine.step().get(owner, [])}


def test_texts_come_back_as_vectors_in_one_delta():
    bench = Bench()
    bench.submit("a", token=7)
    bench.submit("b", token=9)
    assert bench.engine.max_idle_s() == 0
    deltas = bench.step()
    assert {name: (delta.embedding, delta.finish, delta.tokens) for name, delta in deltas.items()} == {
        "a": (b"\x07", FinishReason.STOP, []),
        "b": (b"\x09", FinishReason.STOP, []),
    }
    assert bench.engine.max_idle_s() is None
    assert not bench.engine.occupied


def test_a_batch_ends_before_it_has_too_many_tokens_and_a_long_text_has_one_for_itself():
    bench = Bench(step_tokens=10)
    for name, length in (("a", 6), ("b", 4), ("c", 40), ("d", 1)):
        bench.submit(name, length)
    while bench.engine.occupied:
        bench.step()
    assert bench.encoding.batches == [[6, 4], [40], [1]]


def test_who_floods_does_not_delay_others():
    bench = Bench(step_tokens=10)
    for index in range(20):
        bench.submit(f"flood-{index}", 5, flow="flood")
    bench.submit("guest", 5, flow="guest")
    assert "guest" in {**bench.step(), **bench.step()}


def test_what_is_cancelled_is_not_computed():
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.submit(name)
    bench.engine.cancel("gateway", "b", None)
    bench.engine.cancel("gateway", "unknown", 0)
    assert set(bench.step()) == {"a", "c"}
    assert bench.engine.load().cancelled == 1


def test_an_owner_that_leaves_takes_its_texts_along():
    bench = Bench()
    bench.submit("a", owner="one")
    bench.submit("a", owner="two", token=8)
    bench.engine.cancel_owner("one")
    assert bench.step("two")["a"].embedding == b"\x08"
    assert bench.encoding.batches == [[3]]


def test_what_is_out_of_time_ends_without_being_computed():
    bench = Bench()
    bench.submit("late", deadline_in_s=0.5)
    bench.submit("patient")
    bench.clock.now_s += 0.5
    deltas = bench.step()
    assert (deltas["late"].finish, deltas["late"].embedding) == (FinishReason.DEADLINE, None)
    assert deltas["patient"].embedding is not None
    assert bench.encoding.batches == [[3]]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (EngineRequest("taken", [5], NOTHING), "already running"),
        (EngineRequest("r", [5], SamplingParams(max_tokens=1, seed=0)), "generates nothing"),
        (EngineRequest("r", [], NOTHING), "at least one token"),
        (EngineRequest("r", [5] * 65, NOTHING), "at most 64"),
        (EngineRequest("r", [200], NOTHING), "vocabulary's size, 200"),
    ],
)
def test_what_can_never_be_computed_is_refused(request_, reason):
    bench = Bench()
    bench.submit("taken")
    with pytest.raises(ValueError, match=reason):
        bench.engine.submit("gateway", request_)
    assert set(bench.step()) == {"taken"}


def test_the_report_says_what_capacity_is_left():
    bench = Bench(step_tokens=32, max_sequences=3)
    empty = bench.engine.load()
    assert (empty.free_sequences, empty.free_blocks, empty.total_blocks) == (3, 4, 4)
    bench.submit("a", BLOCK_TOKENS + 1)
    bench.submit("b", 1)
    held = bench.engine.load()
    assert (held.waiting, held.waiting_prompt_tokens, held.free_sequences, held.free_blocks) == (2, 18, 1, 1)
    bench.step()
    after = bench.engine.load()
    assert (after.free_blocks, after.free_sequences, after.finished, after.prompt_tokens) == (4, 3, 2, 18)


def test_it_learns_what_tokens_take():
    bench = Bench(step_tokens=64)
    for index in range(60):
        bench.submit(f"{index}", 1 + index % 50)
        bench.step()
    assert bench.engine.load().times.chunk(0, 40) == pytest.approx(0.040, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 64), st.booleans()), max_size=30), st.integers(1, 80))
def test_every_request_ends_once_and_all_capacity_is_freed(texts, step_tokens):
    bench = Bench(step_tokens=step_tokens)
    whole = bench.engine.load().free_blocks
    for index, (length, _) in enumerate(texts):
        bench.submit(str(index), length)
    for index, (_, leaves) in enumerate(texts):
        if leaves:
            bench.engine.cancel("gateway", str(index), None)
    ended = []
    while bench.engine.occupied:
        ended += bench.step()
    assert sorted(ended) == sorted(str(index) for index, (_, leaves) in enumerate(texts) if not leaves)
    load = bench.engine.load()
    assert (load.free_blocks, load.waiting, load.waiting_prompt_tokens) == (whole, 0, 0)
    assert all(sum(batch) <= step_tokens or len(batch) == 1 for batch in bench.encoding.batches)
