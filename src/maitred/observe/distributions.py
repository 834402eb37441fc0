"""Histograms of many values that one thread brings at once.

The library's take a lock and run through their buckets for every value. A request that ends brings a dozen values and
one for each gap between its tokens; here each of them costs a search and two additions.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Distribution:
    """One series.

    Args:
        bounds: Of its buckets, rising; each holds what is no larger.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, values: Iterable[float]) -> None:
        """More values."""
        bounds, counts, total = self._bounds, self._counts, self._sum
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self._sum = total

    def shown(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as Prometheus has them, each with all that is no larger than its bound, and the sum of all values."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return [(bound, float(count)) for bound, count in zip(bounds, accumulate(self._counts), strict=True)], self._sum


class Distributions(Collector):
    """Histograms with one label. What is asked for first is shown from then on.

    Args:
        metrics: Name -> its text, and the bounds of its buckets.
        label: Of all of them.
    """

    def __init__(self, metrics: Mapping[str, tuple[str, Sequence[float]]], label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._series: dict[tuple[str, str], Distribution] = {}

    def of(self, name: str, value: str) -> Distribution:
        """The series of a metric for a value of the label."""
        series = self._series.get((name, value))
        if series is None:
            series = self._series[name, value] = Distribution(self._metrics[name][1])
        return series

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See `Collector`."""
        for name, (text, _) in self._metrics.items():
            family = HistogramMetricFamily(name, text, labels=[self._label])
            for (of, value), series in self._series.items():
                if of == name:
                    family.add_metric([value], *series.shown())
            yield family
