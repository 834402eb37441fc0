"""The load of others at an upstream, and which metrics pages say nothing of it."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from maitred.replica.upstream.external_load import ExternalLoadTracker, ScrapedLoad


def test_our_own_requests_are_not_counted_twice():
    server = ExternalLoadTracker(interval_s=5.0)
    assert server.estimate(0.0) == (0.0, 0.0, inf), "it has never reported"
    server.on_report(ScrapedLoad(running=10, waiting=4), 8, 100.0)
    assert server.estimate(104.0) == (6.0, 4.0, 0.0)
    server.on_report(ScrapedLoad(running=10, waiting=4), 13, 105.0)
    assert server.estimate(112.0) == (6.0, 4.0, 7.0), "what we have there has changed, and the page has not"
    server.on_report(ScrapedLoad(running=11, waiting=4), 13, 110.0)
    assert server.estimate(112.0) == (2.0, 2.0, 0.0)


def test_a_page_without_load_is_no_report():
    server = ExternalLoadTracker(interval_s=1.0)
    server.on_report(ScrapedLoad(kv_usage=0.5), 0, 1.0)
    assert server.estimate(1.0).late_s == inf
    server.on_report(ScrapedLoad(running=3), 1, 2.0)
    server.on_report(ScrapedLoad(), 1, 9.0)
    assert server.estimate(9.0) == (2.0, 0.0, 6.0)


@given(
    pages=st.lists(
        st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9), st.integers(0, 9), st.floats(0, 9))
    )
)
def test_it_is_never_below_nothing_nor_from_the_future(pages):
    server, now_s = ExternalLoadTracker(interval_s=1.0), 0.0
    for running, waiting, ours, passed_s in pages:
        now_s += passed_s
        server.on_report(ScrapedLoad(running, waiting), ours, now_s)
        estimate = server.estimate(now_s + passed_s)
        assert 0 <= estimate.waiting <= estimate.requests <= (running or 0) + (waiting or 0) + 18
        assert estimate.late_s >= 0
