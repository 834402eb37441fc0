"""Histograms and summaries that take many values at once from one thread.

The library's types take a lock and search their buckets for every value. A request that ends has a dozen values and one
for each gap between its tokens; here values are kept pending, and some hundred of them are sorted at once. One search
for each bound then counts the values up to it, instead of one search for each value.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.metrics_core import HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_MAX_PENDING = 512
"""Most values that are pending."""


class HistogramSeries:
    """Series of a histogram.

    Args:
        bounds: Ascending upper bounds of its buckets, inclusive.
    """

    __slots__ = ("_bounds", "_count", "_cumulative", "_pending", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._cumulative = [0] * len(bounds)
        """Number of values up to each bound."""
        self._count = 0
        self._sum = 0.0
        self._pending: list[float] = []
        """Values that are not in the counts yet."""

    def add(self, values: Sequence[float]) -> None:
        """Adds values to the series."""
        self._pending += values
        if len(self._pending) >= _MAX_PENDING:
            self._count_pending()

    def buckets_and_sum(self) -> tuple[list[tuple[str, float]], float]:
        """Returns the cumulative buckets in Prometheus' form, and the sum of all values."""
        self._count_pending()
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        cumulative = [*self._cumulative, self._count]
        return [(bound, float(count)) for bound, count in zip(bounds, cumulative, strict=True)], self._sum

    def _count_pending(self) -> None:
        values, self._pending = self._pending, []
        self._count += len(values)
        self._sum += sum(values)
        values.sort()
        self._cumulative = [
            n + bisect_right(values, bound) for n, bound in zip(self._cumulative, self._bounds, strict=True)
        ]


class LabelledHistograms(Collector):
    """Histograms with one label. A series is shown from its first use on.

    Args:
        metrics: Name -> its text, and the bounds of its buckets.
        label: Label of all of them.
    """

    def __init__(self, metrics: Mapping[str, tuple[str, Sequence[float]]], label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._series: dict[tuple[str, str], HistogramSeries] = {}

    def series(self, name: str, value: str) -> HistogramSeries:
        """Returns the series of a metric for a value of the label."""
        series = self._series.get((name, value))
        if series is None:
            series = self._series[name, value] = HistogramSeries(self._metrics[name][1])
        return series

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Collects all histograms for Prometheus."""
        for name, (text, _) in self._metrics.items():
            family = HistogramMetricFamily(name, text, labels=[self._label])
            for (metric, value), series in self._series.items():
                if metric == name:
                    family.add_metric([value], *series.buckets_and_sum())
            yield family


class LabelledSummaries(Collector):
    """Summaries with one label: how many values there were, and their sum.

    Args:
        metrics: Name -> its text.
        label: Label of all of them.
    """

    def __init__(self, metrics: Mapping[str, str], label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._series: dict[str, dict[str, tuple[int, float]]] = {name: {} for name in metrics}

    def add(self, name: str, value: str, numbers: Sequence[float]) -> None:
        """Adds values to a metric, for a value of the label."""
        series = self._series[name]
        count, total = series.get(value, (0, 0.0))
        series[value] = (count + len(numbers), total + sum(numbers))

    def collect(self) -> Iterator[SummaryMetricFamily]:
        """Collects all summaries for Prometheus."""
        for name, series in self._series.items():
            family = SummaryMetricFamily(name, self._metrics[name], labels=[self._label])
            for value, (count, total) in series.items():
                family.add_metric([value], count, total)
            yield family
