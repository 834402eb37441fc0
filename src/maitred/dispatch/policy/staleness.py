"""Weights of stale load reports.

A late report loses value, but it means neither that the replica is dead (its requests would fail) nor that it is idle.
So its weight falls gradually and moves to the mean of the fresh reports: the best estimate of an unknown replica is the
mean of the others. The gateway's own requests are known without a report; they are the lower bound of the estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_MIN_TRUST = 1e-9
"""Lower bound of the trust: it avoids a division by zero and weighs very old reports equally."""


@dataclass(frozen=True, slots=True)
class AgedLoad:
    """Reported load of one replica in one unit, such as tokens, with the age of the report."""

    value: float
    age_s: float
    known: float = 0.0
    """Part of the load that this gateway sent and that has not ended."""


def trust(age_s: float, fresh_s: float, half_s: float) -> float:
    """Returns the weight of a report: 1 while fresh, then halved every `half_s`."""
    stale_s = age_s - fresh_s
    return 1.0 if stale_s <= 0 else max(_MIN_TRUST, 0.5 ** (stale_s / half_s))


def estimate_loads(reports: Sequence[AgedLoad], fresh_s: float, half_s: float) -> list[float]:
    """Returns the estimated load of each replica.

    Args:
        reports: Last report of each replica.
        fresh_s: Age up to which a report has full weight; at least the interval of reports.
        half_s: Half-life of the weight after `fresh_s`.
    """
    if not reports:
        return []
    trusts = [trust(report.age_s, fresh_s, half_s) for report in reports]
    mean = sum(worth * report.value for worth, report in zip(trusts, reports, strict=True)) / sum(trusts)
    return [
        max(report.known, worth * report.value + (1.0 - worth) * mean)
        for worth, report in zip(trusts, reports, strict=True)
    ]
