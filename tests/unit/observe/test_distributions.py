from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from maitred.observe.distributions import Distributions

BOUNDS = (0.002, 0.5, 1, 4, 16384)
VALUES = st.lists(st.one_of(st.sampled_from(BOUNDS), st.integers(0, 20_000), st.sampled_from((0.001, 3.5))))


@given(st.dictionaries(st.sampled_from(["small", "large"]), st.lists(VALUES, min_size=1)))
def test_it_shows_what_the_library_would(brought):
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("seconds", "How long.", ["model"], buckets=BOUNDS, registry=theirs)
    distributions = Distributions({"seconds": ("How long.", BOUNDS)}, "model")
    ours.register(distributions)
    for model, batches in brought.items():
        for values in batches:
            distributions.of("seconds", model).add(values)
            series = histogram.labels(model)
            for value in values:
                series.observe(value)
    assert _shown(ours) == _shown(theirs)


def test_a_metric_without_series_is_named():
    ours = CollectorRegistry()
    ours.register(Distributions({"seconds": ("How long.", BOUNDS)}, "model"))
    assert [metric.name for metric in ours.collect()] == ["seconds"]


def _shown(registry):
    lines = generate_latest(registry).decode().splitlines()
    # The library shows the sum to the last bit of its own order of additions.
    return [
        f"{name} {float(value):.6f}"
        for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
        if "_created" not in name
    ]
