"""A whole tuning, on a machine whose speed is known."""

import pytest
from msgspec.structs import replace

from maitred.core.errors import InvalidRequest, ReplicaLost
from maitred.tune.growth import BatchSizeResult
from maitred.tune.session import TuningRequest, TuningResult, tune
from tests.unit.tune.machine import CARD, Machine

WISHES = TuningRequest(objective_s=0.05, prompt_tokens=100, highest=256, budget_s=60.0)


async def tuned(
    machine: Machine, wishes: TuningRequest = WISHES, watched: list[BatchSizeResult] | None = None
) -> TuningResult:
    return await tune(
        machine,
        wishes,
        machine,
        step_tokens_limit=512,
        watch=(watched if watched is not None else []).append,
        sleep=machine.sleep,
    )


async def test_a_machine_that_is_busy_early() -> None:
    """Steps of 10 ms up to 8 sequences, and then longer: more of them give no more."""
    watched: list[BatchSizeResult] = []
    machine = Machine(lambda decodes, prompt: max(0.010, 0.00125 * decodes) + 0.0002 * prompt)
    tuning = await tuned(machine, watched=watched)
    assert tuning.reason == "plateau"
    assert tuning.chosen is not None
    assert tuning.chosen.sequences == 8
    assert tuning.chosen.tokens_per_s == pytest.approx(800, rel=0.02)
    assert tuning.chosen.itl_s == pytest.approx(0.010)
    assert tuning.limits is not None
    assert tuning.limits.max_sequences == 8
    # (50 - 10) ms / 0.2 ms = 200 prompt tokens beside 8 decodes, in multiples of 16.
    assert tuning.limits.step_tokens == 208
    assert tuning.limits.settings == {
        "engine.max_sequences": 8,
        "engine.step_tokens": 208,
        "engine.itl_objective_s": 0.05,
    }
    assert [size.sequences for size in watched] == [1, 2, 4, 8, 16, 32, 32]


async def test_a_machine_that_gets_too_slow() -> None:
    tuning = await tuned(Machine(lambda decodes, prompt: 0.010 + 0.002 * decodes + 0.0001 * prompt))
    assert tuning.reason == "objective"
    assert tuning.chosen is not None
    assert 14 <= tuning.chosen.sequences <= 20
    assert tuning.chosen.itl_s <= 0.05


async def test_no_more_run_than_the_replica_holds() -> None:
    for card, largest in ((CARD, 64), (replace(CARD, kv_capacity_tokens=2000), 10)):
        machine = Machine(lambda decodes, prompt: 0.001 + 0.00001 * prompt, card)
        tuning = await tuned(machine)
        assert tuning.reason == "highest"
        assert machine.largest == tuning.wishes.highest == largest


async def test_prompts_are_as_long_as_the_window_allows() -> None:
    machine = Machine(lambda decodes, prompt: 0.001 + 0.00001 * prompt, replace(CARD, context_tokens=128))
    tuning = await tuned(machine)
    assert tuning.wishes.prompt_tokens == 64
    assert [prefill.tokens for prefill in tuning.prefills] == [32, 64]
    with pytest.raises(InvalidRequest, match="too small"):
        await tuned(Machine(lambda decodes, prompt: 0.001, replace(CARD, context_tokens=1)))
    with pytest.raises(InvalidRequest, match="--prompt-tokens"):
        await tuned(Machine(lambda decodes, prompt: 0.001, replace(CARD, context_tokens=8)))


async def test_a_machine_too_slow_for_anybody_still_gets_limits() -> None:
    tuning = await tuned(Machine(lambda decodes, prompt: 0.2 + 0.001 * prompt))
    assert tuning.chosen is None
    assert tuning.limits is not None
    assert tuning.limits.max_sequences == 1


async def test_a_replica_that_dies_is_one_error() -> None:
    with pytest.raises(ReplicaLost):
        await tuned(Machine(lambda decodes, prompt: 0.001, dies_at=300))


async def test_a_limit_that_is_not_known_is_left_out() -> None:
    """The window holds no two lengths of prompts to compare."""
    machine = Machine(lambda decodes, prompt: 0.2, replace(CARD, context_tokens=33))
    tuning = await tuned(machine, replace(WISHES, objective_s=1.0, highest=1))
    assert tuning.limits is not None
    assert tuning.limits.step_tokens is None
    assert tuning.limits.settings == {"engine.max_sequences": 1, "engine.itl_objective_s": 1.0}
