"""How many tokens a step may have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.tune.prefill import GRAIN, Prefill, step_tokens, token_s


def line(fixed_s: float, token_s: float, *lengths: int) -> list[Prefill]:
    return [Prefill(tokens, fixed_s + token_s * tokens) for tokens in lengths]


def test_the_cost_of_a_token_is_that_of_the_line() -> None:
    assert token_s(line(0.005, 0.0002, 32, 64, 128, 256)) == pytest.approx(0.0002)


def test_one_disturbed_measurement_does_not_move_it() -> None:
    prefills = [*line(0.005, 0.0002, 32, 64, 128, 256, 512), Prefill(1024, 3.0)]
    assert token_s(prefills) == pytest.approx(0.0002, rel=0.5)


@pytest.mark.parametrize("prefills", [[], line(0.1, 0.001, 64), line(0.1, -0.001, 16, 32, 64), line(0.1, 0, 16, 32)])
def test_too_little_is_known(prefills: list[Prefill]) -> None:
    assert token_s(prefills) is None
    assert step_tokens(prefills, sequences=4, decode_s=0.01, objective_s=0.1) is None


def test_the_objective_bounds_the_tokens_of_a_step() -> None:
    prefills = line(0.010, 0.0002, 32, 64, 128, 256, 512, 1024)
    # (60 - 20) ms / 0.2 ms = 200 tokens beside 16 decodes.
    assert step_tokens(prefills, sequences=16, decode_s=0.020, objective_s=0.060) == 208


def test_more_than_keeps_the_processor_busy_is_not_asked_for() -> None:
    prefills = line(0.002, 0.0002, 32, 64, 128, 256, 512, 1024)
    # At 128 tokens the fixed part is below a tenth of the step.
    assert step_tokens(prefills, sequences=16, decode_s=0.020, objective_s=1.0) == 128 + 16


def test_prompts_advance_even_where_decodes_take_all_the_time() -> None:
    prefills = line(0.010, 0.0002, 32, 64)
    assert step_tokens(prefills, sequences=8, decode_s=0.2, objective_s=0.1) == GRAIN


@given(
    st.integers(1, 300),
    st.floats(0.0001, 1),
    st.floats(0.0001, 1),
    st.lists(st.builds(Prefill, st.integers(1, 2000), st.floats(0.0001, 10)), max_size=8),
)
def test_a_step_holds_every_sequence_and_a_token_of_a_prompt(
    sequences: int, decode_s: float, objective_s: float, prefills: list[Prefill]
) -> None:
    tokens = step_tokens(prefills, sequences=sequences, decode_s=decode_s, objective_s=objective_s)
    assert tokens is None or (tokens > sequences - 1 and tokens % GRAIN == 0)
