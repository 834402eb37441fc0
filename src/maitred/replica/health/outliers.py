"""Which replicas of a pool do worse than the others.

The terms are Envoy's (outlier detection: ejection, interval, base ejection time, maximum share, panic). What differs:

- Envoy compares each host's success rate with the mean of all less 1.9 standard deviations. Among `n` hosts none can be
  further than ``sqrt(n - 1)`` deviations from a mean that it is part of, so among four none is ever found. Pools here
  are small, so each replica is compared with the median of the *others*.
- Times are compared, too, not only errors: a replica that is slow and correct (a hot card, a neighbour) passes every
  other check.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from maitred.replica.health.config import OutlierConfig
from maitred.replica.health.window import WindowSums


@dataclass(frozen=True, slots=True)
class OutlierReplica:
    """One that does worse."""

    name: str
    badness: float
    """How far it is beyond what is allowed; at least 1."""
    why: str
    """As the end of a sentence that begins with "because"."""


def find_outliers(peers: Mapping[str, WindowSums], config: OutlierConfig) -> list[OutlierReplica]:
    """The outliers, worst first.

    Args:
        peers: What happened lately at each replica that is in use.
        config: The settings.
    """
    found = []
    failing = {name: each.error_rate for name, each in peers.items() if each.ended >= config.least_requests}
    for name, rate in failing.items():
        if len(failing) > 1:
            others = median(value for other, value in failing.items() if other != name)
            if rate >= others + config.error_margin:
                badness = (rate - others) / config.error_margin
                found.append(
                    OutlierReplica(name, badness, f"{rate:.0%} of its requests fail, and {others:.0%} of the others'")
                )
    timed = {name: each.typical_s for name, each in peers.items() if each.timed >= config.least_requests}
    for name, typical_s in timed.items():
        if len(timed) > 1:
            others = median(value for other, value in timed.items() if other != name)
            if typical_s >= config.latency_factor * others:
                ratio = typical_s / others
                found.append(
                    OutlierReplica(name, ratio / config.latency_factor, f"it is {ratio:.1f} times slower than others")
                )
    worst: dict[str, OutlierReplica] = {}
    for outlier in sorted(found, key=lambda each: -each.badness):
        worst.setdefault(outlier.name, outlier)
    return list(worst.values())
