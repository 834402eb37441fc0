"""What the engine measures of its steps, with a runner that only lets time pass."""

import pytest

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.engine import Engine
from maitred.engine.kv.blocks import BlockPool
from tests.support.clock import FakeClock
from tests.support.schedulers import make_scheduler

STEP_S = 0.01


class SleepingRunner:
    def __init__(self, clock):
        self.clock = clock

    def execute(self, plan):
        self.clock.now_s += STEP_S
        tokens = [[1] for chunk in plan.sampling]
        return tokens, [None] * len(tokens)

    def forget(self, sequence):
        pass


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def engine(clock):
    scheduler = make_scheduler(
        BlockPool(64), block_tokens=4, max_sequences=8, step_tokens=64, context_tokens=256, eos_token_ids=()
    )
    return Engine(scheduler, SleepingRunner(clock), clock, vocab_size=100, max_choices=8)


def request(name):
    return EngineRequest(name, [1, 2, 3], SamplingParams(max_tokens=50, seed=0, ignore_eos=True))


def test_a_step_takes_until_the_next_one_with_what_readers_wait_for_besides(engine, clock):
    engine.submit("gateway", request("a"))
    for _ in range(20):
        engine.step()
        clock.now_s += 0.005
    assert engine.load().times.of(1, 10, decodes=1) == pytest.approx(0.015, rel=0.05)


@pytest.mark.parametrize("leave", ["cancel", "pause", "disown"])
def test_time_without_work_is_no_part_of_a_step(engine, clock, leave):
    for turn in range(20):
        engine.submit("gateway", request(str(turn)))
        engine.step()
        engine.step()
        match leave:
            case "cancel":
                engine.cancel("gateway", str(turn), None)
            case "pause":
                engine.pause("gateway", str(turn), paused=True)
            case "disown":
                engine.cancel_owner("gateway")
        assert engine.max_idle_s() is None
        clock.now_s += 60.0
    assert engine.load().times.of(1, 5, decodes=1) == pytest.approx(STEP_S, rel=0.05)
