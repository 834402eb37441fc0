"""Histograms and summaries of many values that one thread brings at once.

The library's take a lock and run through their buckets for every value. A request that ends brings a dozen values and
one for each gap between its tokens; here they are put aside, and some hundred of them are put in order at once. One
search for each bound then tells how many are no larger, and none is needed for each value.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.metrics_core import HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_MOST_NEW = 512
"""Values that are put aside."""


class HistogramSeries:
    """One series.

    Args:
        bounds: Of its buckets, rising; each holds what is no larger.
    """

    __slots__ = ("_bounds", "_count", "_new", "_sum", "_within")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._within = [0] * len(bounds)
        """For each bound, how many values are no larger."""
        self._count = 0
        self._sum = 0.0
        self._new: list[float] = []
        """Values that none of these numbers has."""

    def add(self, values: Sequence[float]) -> None:
        """More values."""
        self._new += values
        if len(self._new) >= _MOST_NEW:
            self._count_new()

    def shown(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as Prometheus has them, each with all that is no larger than its bound, and the sum of all values."""
        self._count_new()
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        within = [*self._within, self._count]
        return [(bound, float(count)) for bound, count in zip(bounds, within, strict=True)], self._sum

    def _count_new(self) -> None:
        new, self._new = self._new, []
        self._count += len(new)
        self._sum += sum(new)
        new.sort()
        self._within = [n + bisect_right(new, bound) for n, bound in zip(self._within, self._bounds, strict=True)]


class LabelledHistograms(Collector):
    """Histograms with one label. What is asked for first is shown from then on.

    Args:
        metrics: Name -> its text, and the bounds of its buckets.
        label: Of all of them.
    """

    def __init__(self, metrics: Mapping[str, tuple[str, Sequence[float]]], label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._series: dict[tuple[str, str], HistogramSeries] = {}

    def series(self, name: str, value: str) -> HistogramSeries:
        """The series of a metric for a value of the label."""
        series = self._series.get((name, value))
        if series is None:
            series = self._series[name, value] = HistogramSeries(self._metrics[name][1])
        return series

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See `Collector`."""
        for name, (text, _) in self._metrics.items():
            family = HistogramMetricFamily(name, text, labels=[self._label])
            for (of, value), series in self._series.items():
                if of == name:
                    family.add_metric([value], *series.shown())
            yield family


class LabelledSummaries(Collector):
    """How many values there were and what they come to together, with one label.

    Args:
        metrics: Name -> its text.
        label: Of all of them.
    """

    def __init__(self, metrics: Mapping[str, str], label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._series: dict[str, dict[str, tuple[int, float]]] = {name: {} for name in metrics}

    def add(self, name: str, value: str, numbers: Sequence[float]) -> None:
        """More numbers of a metric, for a value of the label."""
        series = self._series[name]
        count, total = series.get(value, (0, 0.0))
        series[value] = (count + len(numbers), total + sum(numbers))

    def collect(self) -> Iterator[SummaryMetricFamily]:
        """See `Collector`."""
        for name, series in self._series.items():
            family = SummaryMetricFamily(name, self._metrics[name], labels=[self._label])
            for value, (count, total) in series.items():
                family.add_metric([value], count, total)
            yield family
