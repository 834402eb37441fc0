from types import SimpleNamespace

import pytest

from maitred.core.replica import pairs_of
from maitred.engine.scheduler.step_size import StepSizer
from maitred.engine.scheduler.step_times import StepWork


def make_pace(objective_s, **options):
    settings = {"step_tokens": 512, "max_sequences": 64, "min_sequences": 1} | options
    return StepSizer(itl_objective_s=objective_s, **settings)


def batch(objective_s, decodes=2, context_tokens=20):
    return SimpleNamespace(
        itl_objective_s=objective_s, decoding=dict.fromkeys(range(decodes)), context_tokens=context_tokens
    )


def learn(pace):
    """A millisecond a step and one a token."""
    for tokens in (1, 20, 60, 100, 40, 10) * 4:
        pace.on_step_time(StepWork(1, 10, 1, tokens, pairs_of(0, tokens)), 0.001 * (2 + tokens), running=2, waiting=0)


def spend(budget):
    return budget.take(0, 10_000)


def test_without_an_objective_steps_are_as_large_as_they_may_be():
    pace = make_pace(None)
    learn(pace)
    assert pace.tokens(batch(None)) == 512
    assert spend(pace.budget(batch(None), 2)) == 510
    assert pace.sequences == 64


def test_an_objective_limits_the_prompts_beside_decodes():
    pace = make_pace(0.05)
    learn(pace)
    budget = pace.budget(batch(0.05), 2)
    assert spend(budget) == pytest.approx(47, abs=4)
    assert pace.tokens(batch(0.05)) == pytest.approx(49, abs=4)


def test_where_nobody_waits_for_tokens_it_does_not():
    pace = make_pace(0.05)
    learn(pace)
    assert spend(pace.budget(batch(0.05, decodes=0), 0)) == 512


def test_prompts_come_to_an_end_though_the_decodes_alone_take_too_long():
    pace = make_pace(0.002)
    learn(pace)
    budget = pace.budget(batch(0.002), 2)
    assert 0 < spend(budget) <= 16
    assert budget.spent


def test_the_batch_shrinks_when_readers_wait_too_long():
    pace = make_pace(0.01, max_sequences=16, min_sequences=4)
    for _ in range(64 * 20):
        pace.on_step_time(StepWork(16, 160), 0.03, running=16, waiting=5)
    assert pace.sequences == 4
