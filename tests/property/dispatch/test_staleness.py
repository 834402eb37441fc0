"""An old report, whatever it says and however old, neither excludes a replica nor makes it look idle."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.dispatch.policy.staleness import AgedLoad, estimate_loads, trust

REPORTS = st.lists(
    st.builds(AgedLoad, value=st.floats(0, 1e6), age_s=st.floats(0, 1e6), known=st.floats(0, 1e6)),
    min_size=1,
    max_size=6,
)


@given(REPORTS, st.floats(0, 10), st.floats(0.1, 100))
def test_an_old_report_neither_shuts_out_nor_looks_idle(reports, fresh_s, half_s):
    loads = estimate_loads(reports, fresh_s, half_s)
    least, most = min(report.value for report in reports), max(report.value for report in reports)
    for report, load in zip(reports, loads, strict=True):
        assert load >= report.known
        assert load == report.known or least - 1e-6 <= load <= most + 1e-6
        if report.age_s <= fresh_s:
            assert load == max(report.known, report.value)


@given(value=st.floats(0, 1e3), peer=st.floats(0, 1e3), ages_s=st.lists(st.floats(0, 1e4), min_size=2))
def test_it_goes_towards_the_others_and_never_back(value, peer, ages_s):
    distances = [
        abs(estimate_loads([AgedLoad(value, age_s), AgedLoad(peer, 0.0)], 2.0, 10.0)[0] - peer)
        for age_s in sorted(ages_s)
    ]
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(distances))


def test_reports_lose_weight_by_halves():
    assert [trust(age_s, 2.0, 10.0) for age_s in (0, 2, 12, 22)] == [1, 1, 0.5, 0.25]
    assert estimate_loads([], 2.0, 10.0) == []
    assert estimate_loads([AgedLoad(0.0, 1e9), AgedLoad(80.0, 0.0)], 2.0, 10.0)[0] > 79, "silent is not idle"
    assert estimate_loads([AgedLoad(512.0, 1e9)], 2.0, 10.0) == pytest.approx([512.0]), (
        "with no other there is nothing better"
    )
