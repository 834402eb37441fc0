"""Parsed scrape of `/metrics`, for tools that watch a server from outside.

A gateway reads its own registry in the same form.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class MetricSeries(NamedTuple):
    """Series of a metric: its name with one set of labels."""

    name: str
    labels: frozenset[tuple[str, str]] = frozenset()


def parse_metrics(text: str) -> dict[MetricSeries, float]:
    """Parses Prometheus' text format into one value for each series.

    Raises:
        ValueError: The text is not of that format.
    """
    return parse_series(text_string_to_metric_families(text))


def parse_series(families: Iterable[Metric]) -> dict[MetricSeries, float]:
    """Returns the value of each series of some metric families."""
    return {
        MetricSeries(sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


class MetricSamples:
    """Samples of one scrape, queried by names and labels."""

    def __init__(self, series: Mapping[MetricSeries, float]) -> None:
        self._by_name: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for (name, labels), value in series.items():
            self._by_name[name].append((dict(labels), value))

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def sum_by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums a metric by some labels over all others. Without labels, the one key is empty."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for sample_labels, value in self._by_name.get(name, ()):
            sums[tuple(sample_labels.get(label, "") for label in labels)] += value
        return dict(sums)
