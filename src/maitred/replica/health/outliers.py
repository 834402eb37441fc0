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
from statistics import median

from maitred.replica.health.config import OutlierConfig
from maitred.replica.health.window import WindowStats


def find_outliers(stats_by_replica: Mapping[str, WindowStats], config: OutlierConfig) -> list[str]:
    """Returns the names of the outliers among the replicas, worst first.

    Args:
        stats_by_replica: Window statistics of each replica that is in use, by name.
        config: The settings.
    """
    severities: dict[str, float] = {}
    """Ratio of an outlier's deviation to the allowed deviation, by name; at least 1."""
    error_rates = {
        name: stats.error_rate for name, stats in stats_by_replica.items() if stats.ended >= config.least_requests
    }
    for name, error_rate in error_rates.items():
        if len(error_rates) > 1:
            others_median = _median_of_others(error_rates, name)
            if error_rate >= others_median + config.error_margin:
                severities[name] = (error_rate - others_median) / config.error_margin
    latencies_s = {
        name: stats.mean_latency_s
        for name, stats in stats_by_replica.items()
        if stats.latency_count >= config.least_requests
    }
    for name, latency_s in latencies_s.items():
        if len(latencies_s) > 1:
            others_median = _median_of_others(latencies_s, name)
            if latency_s >= config.latency_factor * others_median:
                severity = latency_s / others_median / config.latency_factor
                severities[name] = max(severities.get(name, 0.0), severity)
    return sorted(severities, key=severities.__getitem__, reverse=True)


def _median_of_others(values: Mapping[str, float], name: str) -> float:
    return median(value for other, value in values.items() if other != name)
