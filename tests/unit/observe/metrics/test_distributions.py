import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, Summary
from prometheus_client.exposition import generate_latest

from maitred.observe.metrics.distributions import LabelledHistograms, LabelledSummaries

BOUNDS = (0.002, 0.5, 1, 4, 16384)
VALUES = st.lists(st.one_of(st.sampled_from(BOUNDS), st.integers(0, 20_000), st.sampled_from((0.001, 3.5))))


@given(st.dictionaries(st.sampled_from(["small", "large"]), st.lists(VALUES, min_size=1)), st.sampled_from([1, 150]))
def test_it_shows_what_the_library_would(brought, times):
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("seconds", "How long.", ["model"], buckets=BOUNDS, registry=theirs)
    distributions = LabelledHistograms({"seconds": ("How long.", BOUNDS)}, "model")
    ours.register(distributions)
    for model, batches in brought.items():
        for values in (batch * times for batch in batches):
            distributions.series("seconds", model).add(values)
            series = histogram.labels(model)
            for value in values:
                series.observe(value)
    # The library adds up in another order, which shows in the last bits of a sum.
    assert _shown(ours) == pytest.approx(_shown(theirs))


@given(st.dictionaries(st.sampled_from(["small", "large"]), st.lists(VALUES, min_size=1)))
def test_a_summary_shows_what_the_library_would(brought):
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    summary = Summary("seconds", "How long.", ["model"], registry=theirs)
    summaries = LabelledSummaries({"seconds": "How long."}, "model")
    ours.register(summaries)
    for model, batches in brought.items():
        for values in batches:
            summaries.add("seconds", model, values)
            series = summary.labels(model)
            for value in values:
                series.observe(value)
    assert _shown(ours) == pytest.approx(_shown(theirs))


def test_a_metric_without_series_is_named():
    ours = CollectorRegistry()
    ours.register(LabelledHistograms({"seconds": ("How long.", BOUNDS)}, "model"))
    assert [metric.name for metric in ours.collect()] == ["seconds"]


def _shown(registry):
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs if "_created" not in name}
