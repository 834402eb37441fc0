"""A change is found if there is one, in its direction."""

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.scaling.change_detector import ChangeDetector


def play(detector: ChangeDetector, totals: list[float], rate: float, seconds: int, expected: float):
    for second in range(1, seconds + 1):
        totals.append(totals[-1] + rate)
        change = detector.change(totals[-100:], expected, 1_200.0)
        if change is not None:
            return second, change
    return None


@given(rate=st.floats(0.0, 500.0), seconds=st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_an_even_load_has_no_change(rate, seconds):
    assert play(ChangeDetector(), [0.0], rate, seconds, rate) is None


@given(rate=st.floats(4.0, 200.0), times=st.floats(2.5, 20.0), before=st.integers(20, 200))
@settings(max_examples=100, deadline=None)
def test_a_step_is_found_soon_and_its_rate_lies_within_it(rate, times, before):
    detector, totals = ChangeDetector(), [0.0]
    assert play(detector, totals, rate, before, rate) is None
    second, (found, span_s) = play(detector, totals, times * rate, 15, rate)
    assert rate < found <= times * rate * (1 + 1e-9)
    assert span_s <= before + second


@given(rate=st.floats(4.0, 200.0), before=st.integers(30, 200))
@settings(max_examples=50, deadline=None)
def test_an_end_is_found(rate, before):
    detector, totals = ChangeDetector(), [0.0]
    play(detector, totals, rate, before, rate)
    _, (found, _) = play(detector, totals, 0.0, 20, rate)
    assert 0 <= found < rate
