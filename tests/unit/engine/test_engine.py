"""The engine on a clock of its own, with arithmetic in place of a model."""

import pytest

from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.engine import Engine
from maitred.engine.kv.blocks import BlockPool
from tests.support.clock import FakeClock
from tests.support.schedulers import make_scheduler


class CountingRunner:
    """Follows every token by its successor, in a given time."""

    def __init__(self, clock):
        self.clock = clock
        self.step_s = 0.0
        self.executed = 0
        self.held = set()

    def execute(self, plan):
        self.executed += 1
        self.clock.now_s += self.step_s
        self.held |= {chunk.sequence.key for chunk in plan.chunks}
        tokens = [[chunk.sequence.tokens[-1] + 1] for chunk in plan.sampling]
        return tokens, [None] * len(tokens)

    def forget(self, sequence):
        self.held.discard(sequence.key)


class Bench:
    def __init__(self, *, max_sequences=4, blocks=64, **options):
        self.clock = FakeClock()
        self.runner = CountingRunner(self.clock)
        scheduler = make_scheduler(
            BlockPool(blocks),
            block_tokens=4,
            max_sequences=max_sequences,
            step_tokens=16,
            context_tokens=128,
            eos_token_ids=(0,),
            **options,
        )
        self.engine = Engine(scheduler, self.runner, self.clock, vocab_size=1000, max_choices=8)

    def submit(self, request_id, *, prompt=4, max_tokens=4, n=1, **fields):
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, n=n)
        self.engine.submit("owner", EngineRequest(request_id, list(range(1, prompt + 1)), sampling, **fields))

    def step(self):
        return [(output.request_id, output.delta) for output in self.engine.step().get("owner", [])]

    def check_idle(self):
        load = self.engine.load()
        assert load.running == load.waiting == load.paused == 0
        assert load.free_blocks == load.total_blocks
        assert self.runner.held == set()
        assert not self.engine.occupied


def test_a_deadline_ends_an_answer_with_what_there_is():
    bench = Bench()
    bench.submit("a", max_tokens=50, deadline_in_s=2.0)
    assert [delta.tokens for _, delta in bench.step()] == [[5]]
    bench.clock.now_s += 2.0
    [(_, delta)] = bench.step()
    assert (delta.tokens, delta.finish, delta.begun) == ([], FinishReason.DEADLINE, True)
    assert bench.runner.executed == 1, "there was nothing left to compute"
    bench.check_idle()


def test_a_deadline_before_the_first_token_says_what_was_waited_for():
    bench = Bench(max_sequences=1)
    bench.submit("a", max_tokens=50)
    bench.step()
    bench.submit("b", deadline_in_s=2.0)
    bench.step()
    bench.clock.now_s += 3.0
    (late,) = [delta for name, delta in bench.step() if name == "b"]
    assert (late.finish, late.begun) == (FinishReason.DEADLINE, False)


def test_a_paused_request_meets_its_deadline_though_nothing_else_is_to_do():
    bench = Bench()
    bench.submit("a", max_tokens=50, n=2, deadline_in_s=2.0)
    bench.step()
    bench.engine.pause("owner", "a", paused=True)
    assert bench.engine.max_idle_s() == pytest.approx(2.0)
    bench.clock.now_s += 2.0
    assert bench.engine.max_idle_s() == 0
    assert [(delta.index, delta.finish) for _, delta in bench.step()] == [
        (0, FinishReason.DEADLINE),
        (1, FinishReason.DEADLINE),
    ]
    bench.check_idle()


def test_the_first_delta_tells_what_was_waited_for_and_no_other():
    bench = Bench(max_sequences=1)
    bench.runner.step_s = 0.5
    bench.submit("a", max_tokens=3)
    bench.submit("b", max_tokens=2)
    deltas = {"a": [], "b": []}
    while bench.engine.busy:
        for name, delta in bench.step():
            deltas[name].append(delta)
    assert [delta.waited_ms for delta in deltas["a"]] == [None] * 3
    assert [delta.waited_ms for delta in deltas["b"]] == [{"slots": 1500.0}, None]


@pytest.mark.parametrize("state", ["waiting", "running", "paused", "preempted"])
def test_cancelling_leaves_nothing_whatever_the_state(state):
    bench = Bench(max_sequences=1 if state == "waiting" else 4, blocks=32 if state != "preempted" else 33)
    bench.submit("other", max_tokens=100)
    bench.step()
    bench.submit("a", prompt=20, max_tokens=100)
    if state != "waiting":
        bench.step()
    if state == "paused":
        bench.engine.pause("owner", "a", paused=True)
    if state == "preempted":
        while not bench.engine.load().preemptions:
            bench.step()
    bench.engine.cancel("owner", "a", None)
    bench.engine.cancel("owner", "a", None)
    while bench.engine.busy:
        assert all(name == "other" for name, _ in bench.step())
    bench.engine.cancel("owner", "other", None)
    bench.check_idle()


def test_only_a_whole_request_that_is_left_counts_as_wasted():
    bench = Bench()
    bench.submit("a", max_tokens=50, n=2)
    bench.step()
    bench.engine.cancel("owner", "a", 0)
    assert bench.engine.load().wasted_tokens == 0
    bench.engine.cancel("owner", "a", None)
    assert bench.engine.load().wasted_tokens == 1
    assert bench.engine.load().cancelled == 2


def test_steps_are_measured_from_plan_to_plan():
    bench = Bench()
    bench.runner.step_s = 0.25
    bench.submit("a", max_tokens=20)
    for _ in range(12):
        bench.step()
        bench.clock.now_s += 0.25
    times = bench.engine.load().times
    assert times.decoding(1, 12) == pytest.approx(0.5, rel=0.1)
    assert bench.engine.load().step_s == pytest.approx(3.0)


def test_what_another_engine_had_generated_is_neither_sent_nor_counted_again():
    bench = Bench()
    bench.submit("r", prompt=6, max_tokens=8, n=3, resumes={0: [], 2: [11, 12, 13]})
    deltas = []
    while bench.engine.occupied:
        deltas += [delta for _, delta in bench.step()]
    assert {delta.index for delta in deltas} == {0, 2}
    assert sum(len(delta.tokens) for delta in deltas if delta.index == 2) == 5
    assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.LENGTH] * 2
    load = bench.engine.load()
    assert load.prompt_tokens == 6, "of the choice that had not begun"
    assert load.output_tokens == 8 + 5
    assert load.recomputed_tokens > 0
    bench.check_idle()


@pytest.mark.parametrize("resumes", [{}, {3: []}, {-1: []}, {0: [1] * 8}, {1: [1000]}])
def test_what_cannot_be_resumed_is_refused(resumes):
    bench = Bench()
    with pytest.raises(ValueError, match=r"choice|Token ids"):
        bench.submit("r", max_tokens=8, n=3, resumes=resumes)
    bench.check_idle()
