"""Which batch size is tried next, and which is taken."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.tune.growth import BatchGrowth, DecodeSample

Machine = Callable[[int], float]
"""The time of a step by its sequences."""


def busy_from(sequences: int, step_s: float = 0.010) -> Machine:
    """A step takes the same time until so many sequences, and grows with them from there."""
    return lambda batch: step_s * max(1.0, batch / sequences)


def sample(batch: int, step_s: float) -> DecodeSample:
    return DecodeSample(sequences=batch, tokens_per_s=batch / step_s, itl_p50_s=step_s, itl_p95_s=step_s * 1.1)


def run(growth: BatchGrowth, machine: Machine, most: int = 100) -> list[int]:
    """Plays the search to its end; the sizes in the order in which they were tried."""
    tried = []
    while (size := growth.next_size()) is not None:
        tried.append(size)
        growth.record(size, [sample(size, machine(size))] * 3)
        assert len(tried) < most
    return tried


def test_it_stops_where_more_sequences_give_no_more() -> None:
    growth = BatchGrowth(objective_s=10.0, highest=1024)
    assert run(growth, busy_from(16)) == [1, 2, 4, 8, 16, 32, 64, 64]
    assert growth.reason == "plateau"
    assert growth.best is not None
    assert growth.best.sequences == 16


def test_it_closes_in_on_the_objective() -> None:
    growth = BatchGrowth(objective_s=0.05, highest=1024)
    tried = run(growth, lambda batch: 0.010 + 0.001 * batch)  # 1.1 ms * (10 + n) <= 50 ms: up to 35
    assert tried == [1, 2, 4, 8, 16, 32, 64, 64, 45, 45, 38, 38]
    assert growth.reason == "objective"
    assert growth.best is not None
    assert growth.best.sequences == 32


def test_it_stops_at_the_highest_size() -> None:
    growth = BatchGrowth(objective_s=10.0, highest=12)
    assert run(growth, busy_from(1000)) == [1, 2, 4, 8, 12]
    assert growth.reason == "highest"
    assert growth.best is not None
    assert growth.best.sequences == 12


def test_a_machine_too_slow_for_one_sequence_is_reported() -> None:
    growth = BatchGrowth(objective_s=0.005, highest=64)
    assert run(growth, busy_from(16)) == [1, 1]
    assert growth.reason == "objective"
    assert growth.best is None


def test_a_size_that_is_slow_once_is_asked_again() -> None:
    """Something else ran for a moment at 4; the second trial, and then the median, put it right."""
    growth = BatchGrowth(objective_s=0.05, highest=16)
    disturbed = iter([0.2])
    tried = []
    while (size := growth.next_size()) is not None:
        tried.append(size)
        steps = [next(disturbed, 0.01) if size == 4 else 0.01 for _ in range(3)]
        growth.record(size, [sample(size, step_s) for step_s in steps])
    assert tried == [1, 2, 4, 8, 16], "one of three samples does not matter"

    growth = BatchGrowth(objective_s=0.05, highest=16)
    disturbed = iter([0.2, 0.2])
    tried = []
    while (size := growth.next_size()) is not None:
        tried.append(size)
        growth.record(size, [sample(size, next(disturbed, 0.01) if size == 4 else 0.01) for _ in range(3)])
    assert tried == [1, 2, 4, 4, 8, 16], "two of three do, until it is asked again"


def test_one_doubling_without_gain_does_not_end_it() -> None:
    """Kernels change with the size: 4 is no better than 2 here, and 32 is much better."""
    growth = BatchGrowth(objective_s=10.0, highest=32)
    run(growth, lambda batch: 0.02 if batch == 4 else 0.01)
    assert growth.best is not None
    assert growth.best.sequences == 32


def test_nothing_is_chosen_from_nothing() -> None:
    growth = BatchGrowth(objective_s=1.0, highest=4)
    assert growth.best is None
    assert growth.reason == "budget"
    with pytest.raises(ValueError, match="at least one"):
        BatchGrowth(objective_s=1.0, highest=0)


def test_what_was_measured_decides_when_the_time_is_up() -> None:
    growth = BatchGrowth(objective_s=1.0, highest=64)
    for size in (1, 2, 4):
        growth.record(size, [sample(size, 0.01)])
    assert growth.reason == "budget"
    assert growth.best is not None
    assert growth.best.sequences == 4


@given(
    st.integers(0, 2**32),
    st.floats(0, 1.0),
    st.floats(0.001, 1.0),
    st.integers(1, 300),
    st.integers(1, 500),
)
def test_it_ends_and_keeps_the_objective_whatever_the_noise(
    seed: int, noise: float, objective_s: float, knee: int, highest: int
) -> None:
    draw = random.Random(seed)
    growth = BatchGrowth(objective_s=objective_s, highest=highest)
    machine = busy_from(knee, 0.02)
    tried = run(growth, lambda batch: machine(batch) * (1 + noise * draw.random()), most=60)
    assert max(tried) <= highest
    chosen = growth.best
    assert chosen is None or chosen.itl_s <= objective_s
    if noise == 0 and objective_s > 0.0221:
        assert chosen is not None
