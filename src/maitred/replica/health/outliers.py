"""Outlier detection: which replicas of a pool do worse than the others.

The terms are Envoy's (outlier detection: ejection, interval, base ejection time, maximum share, panic). Two things
differ:

- Envoy compares each host's success rate with the mean of all hosts less 1.9 standard deviations. Among `n` hosts none
  can be further than ``sqrt(n - 1)`` deviations from a mean that it is part of, so among four none is ever found. Pools
  here are small, so each replica is compared with the median of the *others*.
- Latencies are compared, too, not only errors: a replica that is slow and correct (a hot card, a noisy neighbour)
  passes every other check.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from maitred.replica.health.config import OutlierConfig
from maitred.replica.health.window import WindowSums


@dataclass(frozen=True, slots=True)
class OutlierReplica:
    """Replica that does worse than its peers."""

    name: str
    severity: float
    """How far it is beyond what is allowed; at least 1."""
    reason: str
    """Reason, as the end of a sentence that begins with "because"."""


def find_outliers(peers: Mapping[str, WindowSums], config: OutlierConfig) -> list[OutlierReplica]:
    """Returns the outliers among the replicas, worst first.

    Args:
        peers: Recent sums of each replica that is in use.
        config: The settings.
    """
    outliers = []
    error_rates = {name: item.error_rate for name, item in peers.items() if item.ended >= config.least_requests}
    for name, rate in error_rates.items():
        if len(error_rates) > 1:
            others_median = median(value for other, value in error_rates.items() if other != name)
            if rate >= others_median + config.error_margin:
                severity = (rate - others_median) / config.error_margin
                outliers.append(
                    OutlierReplica(
                        name, severity, f"{rate:.0%} of its requests fail, and {others_median:.0%} of the others'"
                    )
                )
    latencies_s = {name: item.mean_latency_s for name, item in peers.items() if item.timed >= config.least_requests}
    for name, typical_s in latencies_s.items():
        if len(latencies_s) > 1:
            others_median = median(value for other, value in latencies_s.items() if other != name)
            if typical_s >= config.latency_factor * others_median:
                ratio = typical_s / others_median
                outliers.append(
                    OutlierReplica(name, ratio / config.latency_factor, f"it is {ratio:.1f} times slower than others")
                )
    worst: dict[str, OutlierReplica] = {}
    for outlier in sorted(outliers, key=lambda item: -item.severity):
        worst.setdefault(outlier.name, outlier)
    return list(worst.values())
