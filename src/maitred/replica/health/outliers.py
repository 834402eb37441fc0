"""Outlier detection: finds the replicas of a pool that are worse than the others.

The terms (ejection, interval, base ejection time, panic mode) are those of Envoy's outlier detection. It differs from
Envoy in two points:

- Each replica is compared with the median of the *other* replicas. Envoy compares a host's success rate with the mean
  of all hosts less 1.9 standard deviations. Of `n` hosts none can differ from their mean by more than ``sqrt(n - 1)``
  deviations, so with four hosts Envoy never finds an outlier, and pools here are small.
- Latencies are compared as well as error rates, because no other check finds a replica that is only slow (an overheated
  GPU, a noisy neighbour).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from maitred.replica.health.config import OutlierConfig
from maitred.replica.health.window import WindowStats


@dataclass(frozen=True, slots=True)
class OutlierReplica:
    """A replica that is worse than its peers."""

    name: str
    severity: float
    """Ratio of its deviation to the allowed deviation; at least 1."""
    reason: str
    """Reason, as the text after "because"."""


def find_outliers(stats_by_replica: Mapping[str, WindowStats], config: OutlierConfig) -> list[OutlierReplica]:
    """Returns the outliers among the replicas, worst first.

    Args:
        stats_by_replica: Window statistics of each replica that is in use, by name.
        config: The settings.
    """
    outliers = []
    error_rates = {
        name: stats.error_rate for name, stats in stats_by_replica.items() if stats.ended >= config.least_requests
    }
    for name, error_rate in error_rates.items():
        if len(error_rates) > 1:
            others_median = median(value for other, value in error_rates.items() if other != name)
            if error_rate >= others_median + config.error_margin:
                severity = (error_rate - others_median) / config.error_margin
                outliers.append(
                    OutlierReplica(
                        name, severity, f"{error_rate:.0%} of its requests fail, and {others_median:.0%} of the others'"
                    )
                )
    latencies_s = {
        name: stats.mean_latency_s
        for name, stats in stats_by_replica.items()
        if stats.latency_count >= config.least_requests
    }
    for name, latency_s in latencies_s.items():
        if len(latencies_s) > 1:
            others_median = median(value for other, value in latencies_s.items() if other != name)
            if latency_s >= config.latency_factor * others_median:
                ratio = latency_s / others_median
                outliers.append(
                    OutlierReplica(name, ratio / config.latency_factor, f"it is {ratio:.1f} times slower than others")
                )
    worst_by_name: dict[str, OutlierReplica] = {}
    for outlier in sorted(outliers, key=lambda item: -item.severity):
        worst_by_name.setdefault(outlier.name, outlier)
    return list(worst_by_name.values())
