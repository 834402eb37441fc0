"""Trust in load reports that have grown old.

A report that is late says less and less, and says neither that its replica is dead (its requests would tell) nor that
it is idle. So its weight falls gradually, and what it loses goes to the mean of the reports that are still good: the
best guess of a replica of which nothing is known is that it is like its peers. What this gateway itself has under way
there is known without any report, and is the least that is believed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_TRUST = 1e-9
"""So that of reports that are all old beyond measure none counts more than another, and there is something to divide
by."""


@dataclass(frozen=True, slots=True)
class AgedLoad:
    """One replica's load in any one unit, such as outstanding tokens."""

    value: float
    age_s: float
    known: float = 0.0
    """Of this, what was sent from here and has not ended."""


def trust(age_s: float, fresh_s: float, half_s: float) -> float:
    """How much a report is worth, in (0, 1]: all while it is fresh, then half of it after every further `half_s`."""
    late_s = age_s - fresh_s
    return 1.0 if late_s <= 0 else max(_LEAST_TRUST, 0.5 ** (late_s / half_s))


def estimate_loads(reports: Sequence[AgedLoad], fresh_s: float, half_s: float) -> list[float]:
    """The load of each replica, as far as one can know.

    Args:
        reports: The last of each replica of a pool.
        fresh_s: So long a report is believed as it is: at least the time between two reports.
        half_s: After so much more, half of what is believed is its own, and half the mean of all.
    """
    if not reports:
        return []
    trusts = [trust(report.age_s, fresh_s, half_s) for report in reports]
    mean = sum(worth * report.value for worth, report in zip(trusts, reports, strict=True)) / sum(trusts)
    return [
        max(report.known, worth * report.value + (1.0 - worth) * mean)
        for worth, report in zip(trusts, reports, strict=True)
    ]
