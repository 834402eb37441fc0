"""The search for the knee ends, stays in its bounds and brackets what is there, whatever the server does."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.load.analysis.sweep import MOST_TRIALS, KneeSearch, SweepTrial


def trial(rate: float, met: int, growth: float = 0.0) -> SweepTrial:
    return SweepTrial(
        rate_per_s=rate, objective=0.95, judged=200, met=met, due=100, growth=growth, growth_deviation=3.0
    )  # fmt: skip


@given(st.floats(0.06, 900), st.floats(0.05, 1000), st.floats(0.01, 0.5))
def test_a_clear_knee_is_bracketed(knee: float, start: float, tolerance: float) -> None:
    search = KneeSearch(start_rate=start, lowest=0.05, highest=1000, tolerance=tolerance)
    while (rate := search.next_rate()) is not None:
        search.record(rate, trial(rate, 200 if rate <= knee else 20))
    assert search.passes is not None
    assert search.passes <= knee
    if search.reason == "found":
        assert search.fails is not None
        assert knee < search.fails <= search.passes * (1 + tolerance)
    else:
        assert search.reason in ("at_highest", "trials")


@given(st.data())
def test_any_server_is_done_with_in_bounded_trials(data: st.DataObject) -> None:
    search = KneeSearch(start_rate=1, lowest=0.1, highest=100)
    while (rate := search.next_rate()) is not None:
        assert 0.1 <= rate <= 100
        search.record(rate, trial(rate, data.draw(st.integers(0, 200)), data.draw(st.floats(-50, 50))))
    assert len(search.trials) <= MOST_TRIALS
    assert search.reason in ("found", "at_highest", "below_lowest", "trials")
    if search.passes is not None and search.fails is not None:
        assert search.passes < search.fails
