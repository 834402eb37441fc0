"""A scrape of `/metrics`, read back: for whoever follows a server from outside, with nothing but its address.

A gateway reads its own registry as others read the scrape.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class MetricSeries(NamedTuple):
    """One line of metrics over time: a name with one set of labels."""

    name: str
    labels: frozenset[tuple[str, str]] = frozenset()


def parse_metrics(text: str) -> dict[MetricSeries, float]:
    """Prometheus' text format, each label set by itself.

    Raises:
        ValueError: It is not of that format.
    """
    return parse_series(text_string_to_metric_families(text))


def parse_series(families: Iterable[Metric]) -> dict[MetricSeries, float]:
    """Each label set of each metric by itself."""
    return {
        MetricSeries(sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


class MetricSamples:
    """One scrape, asked by names and labels."""

    def __init__(self, series: Mapping[MetricSeries, float]) -> None:
        self._by_name: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for (name, labels), value in series.items():
            self._by_name[name].append((dict(labels), value))

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The values of these labels -> the sum over all others. Without labels, the one key is empty."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for has, value in self._by_name.get(name, ()):
            sums[tuple(has.get(label, "") for label in labels)] += value
        return dict(sums)
