"""What is learnt of steps before the first one: on a made-up runner with a made-up clock, and on a real model."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.replica import StepTimes, pairs_of
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.scheduler.step_times import StepMeter, StepWork, TimedStep
from maitred.engine.trials import first_steps
from maitred.engine.trials.cache import StepTimeCache
from maitred.engine.trials.first_steps import TRIALS, StepBounds, StepTrial, known_steps, steps_key, try_steps
from maitred.engine.weights_cache.config import WeightsCacheConfig

LAYERS = 24
OUTSIDE = StepTimes(fixed_s=2e-3, decode_s=1e-4)
"""What the head and the sampler take."""
LAYER = StepTimes(1e-3, 4e-5, 2e-7, 1e-5, 3e-5, 2e-8)
BOUNDS = StepBounds(sequences=64, step_tokens=512, context_tokens=2048, blocks=2000, block_tokens=16)


class Machine:
    """Computes with any number of layers, and takes as long as it says."""

    def __init__(self, layer=LAYER, outside=OUTSIDE):
        self.layer, self.outside = layer, outside
        self.now_s = 0.0
        self.depths = []
        self.held = set()
        self.plans = []

    def of(self, depth):
        self.depths.append(depth)
        return Runner(self, depth)

    def takes_s(self, work, depth):
        return work.seconds(self.outside) + depth * work.seconds(self.layer)


class Runner:
    def __init__(self, machine, depth):
        self.machine, self.depth = machine, depth

    def execute(self, plan):
        self.machine.now_s += self.machine.takes_s(StepWork.of(plan), self.depth)
        self.machine.held |= {chunk.sequence for chunk in plan.chunks}
        self.machine.plans.append(plan)
        assert plan.sampling == plan.chunks
        return [[0]] * len(plan.sampling), [None] * len(plan.sampling)

    def forget(self, sequence):
        self.machine.held.remove(sequence)


def tried(machine, bounds=BOUNDS, layers=LAYERS, most_s=1.0):
    return try_steps(machine.of, layers, bounds, most_s=most_s, now_s=lambda: machine.now_s)


def known(notes, machine, key="key", share=1.0):
    clocks = {"now_s": lambda: machine.now_s, "used_s": lambda: share * machine.now_s}
    return known_steps(notes, key, machine.of, LAYERS, BOUNDS, **clocks)


def predicted(steps):
    return StepMeter(steps).times


WORKS = [StepWork(1, 100), StepWork(20, 4000), StepWork(0, 0, 1, 300, pairs_of(0, 300)), StepWork(4, 500, 2, 90, 9000)]


@pytest.mark.parametrize("speed", [0.02, 1.0])
def test_steps_that_nobody_has_run_are_predicted(speed):
    """Through all layers where they are quick, and otherwise from what a few of them take."""
    layer = StepTimes(*[speed * getattr(LAYER, name) for name in StepTimes.__struct_fields__])
    machine = Machine(layer)
    times = predicted(tried(machine, most_s=10.0))
    for work in WORKS:
        assert work.seconds(times) == pytest.approx(machine.takes_s(work, LAYERS), rel=0.1)
    assert machine.depths[-1] == (LAYERS if speed < 1 else 3)


def test_a_model_of_few_layers_is_tried_as_it_is():
    machine = Machine()
    tried(machine, layers=2)
    assert machine.depths == [2]


@pytest.mark.parametrize("slowness", [1, 5, 25])
def test_it_comes_to_an_end_in_time(slowness):
    layer = StepTimes(*[slowness * getattr(LAYER, name) for name in StepTimes.__struct_fields__])
    machine = Machine(layer)
    steps = tried(machine)
    assert steps, "the first few are always tried"
    warming = sum(machine.takes_s(StepWork(1, 32), depth) for depth in (1, 3, 1, 3))
    assert machine.now_s - warming < 1.3
    times = predicted(steps)
    assert StepWork(1, 32).seconds(times) == pytest.approx(machine.takes_s(StepWork(1, 32), LAYERS), rel=0.05)


def test_nothing_is_left_behind_and_no_block_is_used_twice_in_a_step():
    machine = Machine()
    tried(machine)
    assert not machine.held
    for plan in machine.plans:
        blocks = [block for chunk in plan.chunks for block in chunk.sequence.table.blocks]
        assert len(set(blocks)) == len(blocks)
        assert max(blocks) < BOUNDS.tried_blocks
        for chunk in plan.chunks:
            assert len(chunk.sequence.table.blocks) == -(-chunk.end // 16)


@pytest.mark.parametrize(
    ("bounds", "most"),
    [
        (replace(BOUNDS, sequences=8), lambda trial: trial.decodes + (trial.chunk > 0) <= 8),
        (replace(BOUNDS, sequences=1), lambda trial: trial.decodes + (trial.chunk > 0) <= 1),
        (replace(BOUNDS, step_tokens=64), lambda trial: trial.tokens <= 64),
        (replace(BOUNDS, context_tokens=100), lambda trial: max(trial.context, trial.before + trial.chunk) <= 100),
        (replace(BOUNDS, blocks=50), lambda trial: BOUNDS.blocks_of(trial) <= 50),
    ],
)
def test_only_steps_that_can_be_are_tried(bounds, most):
    machine = Machine(layer=StepTimes(1e-6), outside=StepTimes())
    steps = tried(machine, bounds)
    assert len(steps) == sum(BOUNDS.allow(trial) and most(trial) for trial in TRIALS) < len(tried(machine))
    assert tried(machine, replace(BOUNDS, context_tokens=8)) == []


def test_blocks_of_a_trial():
    assert BOUNDS.blocks_of(StepTrial(3, 17)) == 6
    assert BOUNDS.blocks_of(StepTrial(3, 16, chunk=10, before=7)) == 5


def test_what_was_noted_is_not_tried_again(tmp_path, caplog):
    notes, machine = StepTimeCache(tmp_path, list[TimedStep]), Machine()
    with caplog.at_level(logging.INFO):
        steps = known(notes, machine)
    assert "made-up steps were timed" in caplog.text
    ran = len(machine.plans)
    assert known(notes, machine) == steps
    assert len(machine.plans) == ran
    known(notes, machine, "another")
    assert len(machine.plans) > ran


def test_what_was_measured_beside_other_work_is_used_and_not_kept(tmp_path, caplog):
    notes, machine = StepTimeCache(tmp_path, list[TimedStep]), Machine()
    with caplog.at_level(logging.INFO):
        assert known(notes, machine, share=0.4)
    assert "the next start tries again" in caplog.text
    assert notes.read("key") is None
    assert known(notes, machine, share=0.6) == notes.read("key")


@pytest.mark.parametrize("content", [b"[[{}", b'[[{"decodes":1,"context_tokens":32},0.0]]'])
def test_notes_that_make_no_sense_are_replaced(tmp_path, content):
    notes, machine = StepTimeCache(tmp_path, list[TimedStep]), Machine()
    (tmp_path / "key.json").write_bytes(content)
    steps = known(notes, machine)
    assert machine.plans
    assert notes.read("key") == steps


def test_the_key_holds_for_one_model_one_precision_and_one_size(monkeypatch):
    key = steps_key(BUNDLED_MODEL, "fp32", "cpu", BOUNDS)
    assert steps_key(BUNDLED_MODEL, "fp32", "cpu", replace(BOUNDS)) == key
    others = {
        steps_key(BUNDLED_MODEL, "fp32, int8 weights", "cpu", BOUNDS),
        steps_key(BUNDLED_MODEL, "fp32", "NVIDIA H100", BOUNDS),
        steps_key(BUNDLED_MODEL, "fp32", "cpu", replace(BOUNDS, sequences=1)),
    }
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    others.add(steps_key(BUNDLED_MODEL, "fp32", "cpu", BOUNDS))
    assert key not in others
    assert len(others) == 4


def test_an_engine_knows_its_times_before_the_first_request(tmp_path, monkeypatch):
    monkeypatch.setattr(first_steps, "_UNDISTURBED_SHARE", 0.0)  # tests run beside others

    def built(bake_off):
        cache = WeightsCacheConfig(folder=str(tmp_path))
        config = EngineConfig(device="cpu", threads=1, kv_memory_bytes=1 << 24, bake_off=bake_off, weights_cache=cache)
        return build(BUNDLED_MODEL, config)[0]

    assert built("off").load().times == StepTimes()
    assert not Path(tmp_path, "steps").exists()
    load = built("auto").load()
    assert load.times.decoding(1, 100) > 0
    assert load.times.chunk(0, 100) > 0
    assert load.free_blocks == load.total_blocks
    assert load.prompt_tokens == load.steps == load.finished == 0
    (note,) = Path(tmp_path, "steps").iterdir()
    written = note.stat().st_mtime_ns
    assert built("auto").load().times == load.times
    assert note.stat().st_mtime_ns == written
