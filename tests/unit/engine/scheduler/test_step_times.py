import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.replica import StepTimes, pairs_of
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable
from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepBudget, StepMeter, StepWork, TimedStep

TRUE = StepTimes(4.4e-3, 1.3e-4, 6e-7, 1e-4, 7e-4, 1.6e-7)
"""The bundled model on one core, roughly."""


def random_work(rng):
    decodes = rng.choice([0, 1, 2, 8, 32])
    chunks = rng.choice([0, 0, 1, 2]) if decodes else 1
    start, length = rng.randrange(500), rng.randrange(1, 256)
    return StepWork(
        decodes, sum(rng.randrange(1, 800) for _ in range(decodes)), chunks, chunks * length,
        chunks * pairs_of(start, length),
    )  # fmt: skip


def learnt(rng, steps, *, times=TRUE, noise=0.1, meter=None):
    meter = meter or StepMeter()
    for _ in range(steps):
        work = random_work(rng)
        meter.record(work, work.seconds(times) * rng.uniform(1 - noise, 1 + noise))
    return meter


def sequence_of(tokens):
    request = EngineRequest(id="r", prompt=list(range(tokens)), sampling=SamplingParams(max_tokens=1, seed=0))
    return Sequence(0, request, 0, BlockTable(BlockPool(1), 4, ""), frozenset())


def test_the_work_of_a_plan():
    plan = StepPlan(
        decodes=[Chunk(sequence_of(10), 9, 1), Chunk(sequence_of(20), 19, 1)],
        prefills=[Chunk(sequence_of(30), 4, 3)],
    )
    assert StepWork.of(plan) == StepWork(2, 30, 1, 3, 5 + 6 + 7)


def test_a_decode_of_several_tokens_is_one_behind_a_piece_of_a_prompt():
    plan = StepPlan(decodes=[Chunk(sequence_of(10), 7, 3), Chunk(sequence_of(20), 19, 1)])
    assert StepWork.of(plan) == StepWork(2, 30, 0, 2, 8 + 9)


def test_what_the_prefill_of_a_step_adds():
    whole, decodes = StepWork(2, 30, 1, 3, 18), StepWork(2, 30)
    assert whole.extra_seconds(TRUE) == pytest.approx(whole.seconds(TRUE) - decodes.seconds(TRUE))


def test_before_anything_was_measured_nothing_is_promised():
    meter = StepMeter()
    assert meter.times == StepTimes()
    assert meter.margin() == 1.0
    assert meter.error() == 0.0


def known(times=TRUE, steps=12):
    rng = random.Random(8)
    works = [random_work(rng) for _ in range(steps)]
    return [TimedStep(work, work.seconds(times)) for work in works]


def test_what_was_measured_before_is_known_from_the_beginning():
    meter = StepMeter(known(steps=40))
    for step in known(steps=60):
        assert step.work.seconds(meter.times) == pytest.approx(step.seconds, rel=0.1)
    most = max(step.work.prefill_tokens for step in known(steps=40))
    assert meter.budget(10.0, 0, 0).take(0, 10_000) > 64
    assert meter.budget(10.0, 0, 0).take(0, 10_000) <= 2 * most
    assert meter.margin() == 1.0, "nothing was predicted and then measured"


def test_what_is_measured_now_outweighs_what_was_measured_before():
    twice = StepTimes(*[2 * getattr(TRUE, name) for name in StepTimes.__struct_fields__])
    rng = random.Random(9)
    errors = {}
    for steps in (0, 30, 300):
        meter = learnt(random.Random(10), steps, times=twice, meter=StepMeter(known(TRUE)))
        works = [random_work(rng) for _ in range(50)]
        errors[steps] = sum(abs(work.seconds(meter.times) / work.seconds(twice) - 1) for work in works) / len(works)
    assert errors[0] > 0.4
    assert errors[30] < 0.25
    assert errors[300] < 0.05


def test_what_was_measured_before_is_believed_where_nothing_is_measured():
    meter = StepMeter(known(steps=40))
    for _ in range(300):
        work = StepWork(2, 300)
        meter.record(work, work.seconds(TRUE))
    chunk = StepWork(0, 0, 1, 200, pairs_of(0, 200))
    assert chunk.seconds(meter.times) == pytest.approx(chunk.seconds(TRUE), rel=0.25)


def test_a_first_step_is_small_and_the_next_ones_grow_by_doubling():
    meter = StepMeter()
    sizes = []
    for _ in range(5):
        length = meter.budget(10.0, 0, 0).take(0, 10_000)
        sizes.append(length)
        work = StepWork(0, 0, 1, length, pairs_of(0, length))
        meter.record(work, work.seconds(TRUE))
    assert sizes[0] == 64
    assert all(before < after <= 2 * before for before, after in pairwise(sizes))


def test_it_predicts_steps_of_every_kind():
    rng = random.Random(0)
    meter = learnt(rng, 1000)
    for _ in range(100):
        work = random_work(rng)
        assert work.seconds(meter.times) == pytest.approx(work.seconds(TRUE), rel=0.1)


def test_it_knows_its_own_error():
    assert learnt(random.Random(1), 1000, noise=0.02).error() < 0.05
    meter = learnt(random.Random(2), 1000, noise=0.3)
    assert 0.2 < meter.error() < 0.6
    assert 1.2 < meter.margin() < 1.4
    assert meter.margin(0.5) < meter.margin(0.9) < meter.margin(0.99)


def test_the_margin_goes_by_steps_with_prefill():
    rng = random.Random(3)
    meter = learnt(rng, 500, noise=0.3)
    for _ in range(1000):
        work = StepWork(4, 400)
        meter.record(work, work.seconds(TRUE))
    assert meter.margin() > 1.2


def test_steps_keep_the_objective_as_often_as_promised():
    rng = random.Random(4)
    meter = learnt(rng, 1000, noise=0.3)
    objective_s, kept = 0.030, 0
    for _ in range(1000):
        length = meter.budget(objective_s, 8, 2000).take(0, 10_000)
        work = StepWork(8, 2000, 1, length, pairs_of(0, length))
        seconds = work.seconds(TRUE) * rng.uniform(0.7, 1.3)
        meter.record(work, seconds)
        kept += seconds <= objective_s
    assert kept > 920


def test_one_stall_does_not_narrow_the_steps():
    rng = random.Random(5)
    meter = learnt(rng, 1000)
    before = meter.tokens_within(0.05, 4, 400)
    meter.record(StepWork(1, 10), 5.0)
    learnt(rng, 16, meter=meter)
    assert meter.tokens_within(0.05, 4, 400) > 0.8 * before


def test_prefill_goes_on_in_small_pieces_when_decodes_alone_take_too_long():
    meter = learnt(random.Random(6), 500)
    budget = meter.budget(0.001, 32, 10_000)
    assert budget.take(0, 10) == 10
    assert budget.take(0, 10) == 6
    assert budget.take(0, 10) == 0


def test_it_tells_how_many_can_decode_together():
    meter = learnt(random.Random(7), 1000, noise=0.0)
    count = meter.decodes_within(0.015, 100)
    assert decoding_s(count) <= 0.0153
    assert decoding_s(count + 2) > 0.0147
    assert meter.decodes_within(0.001, 100) == 0
    assert meter.decodes_within(10.0, 100) == 64, "twice of what was seen"
    assert StepMeter().decodes_within(0.001, 100) == 8


def decoding_s(sequences):
    return TRUE.decoding(sequences, 100 * sequences)


def test_a_budget_says_when_nothing_fits_any_more():
    budget = StepBudget(TRUE, 0.02, 512, 1 << 20)
    assert not budget.spent
    assert budget.take(0, 400) < 400
    assert budget.spent
    assert budget.take(0, 1) == 0
    assert StepBudget(TRUE, 10.0, 8, 1 << 20).take(0, 8) == 8


@given(
    coefficients=st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-9, 1e-2))] * 6),
    seconds=st.floats(0, 1),
    start=st.integers(0, 100_000),
    at_most=st.integers(1, 100_000),
)
def test_the_longest_chunk_is_one_that_fits_and_one_more_would_not(coefficients, seconds, start, at_most):
    times = StepTimes(*coefficients)
    length = times.longest_chunk(seconds, start, at_most)
    assert 0 <= length <= at_most
    if length:
        assert times.chunk(start, length) <= seconds * (1 + 1e-6) + 1e-9
    if length < at_most:
        assert times.chunk(start, length + 1) >= seconds * (1 - 1e-6) - 1e-9


@settings(max_examples=50, deadline=None)  # how fast a fit is says nothing of what it finds
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 300), st.integers(0, 1 << 20), st.integers(0, 8), st.integers(1, 4096),
            st.integers(0, 1 << 24), st.floats(1e-6, 1e3),
        ),
        max_size=60,
    ),
    objective_s=st.floats(1e-4, 10),
)  # fmt: skip
def test_estimates_stay_sane_for_any_measurements(steps, objective_s):
    meter = StepMeter()
    for decodes, context, chunks, prefill, pairs, seconds in steps:
        chunks = chunks or not decodes
        work = StepWork(decodes, context, chunks, prefill if chunks else 0, pairs if chunks else 0)
        meter.record(work, seconds)
    assert all(0 <= value < float("inf") for value in (getattr(meter.times, f) for f in StepTimes.__struct_fields__))
    assert meter.margin() >= 1.0
    budget = meter.budget(objective_s, 4, 100)
    assert budget.take(0, 1) == 1
    assert 0 <= budget.take(1000, 100) <= 100
