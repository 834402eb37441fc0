"""External load: the load of a server that other callers cause, from its Prometheus metrics.

The metrics include this gateway's own requests at the time of the scrape, but the gateway knows their present number
itself. So the tracker subtracts them and keeps only the load of other callers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from maitred.core.replica import ExternalLoad
from maitred.replica.upstream.dialects import LoadGauges

_NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True)
class ScrapedLoad:
    """Load that a server reports in its metrics; None for values that it does not report."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Usage of the server's KV cache, from 0 to 1."""


class ExternalLoadTracker:
    """Tracker of the load that other callers cause on one server.

    A report that does not change although this gateway's own load changed is ignored, because the server has stopped
    updating its metrics.

    Args:
        interval_s: Interval of the probes; a report counts as overdue after it.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_report_s = _NEVER_S
        self._last_reported: tuple[float | None, float | None] = (None, None)
        self._last_own_requests = 0
        self._external_requests = self._external_waiting = 0.0

    def on_report(self, load: ScrapedLoad, own_requests: int, now_s: float) -> None:
        """Records a load report.

        Args:
            load: The reported load; it is ignored if it has no values.
            own_requests: Number of this gateway's open requests to the server.
            now_s: Now.
        """
        reported = (load.running, load.waiting)
        if reported == (None, None) or (reported == self._last_reported and own_requests != self._last_own_requests):
            return
        self._last_report_s, self._last_reported, self._last_own_requests = now_s, reported, own_requests
        waiting = load.waiting or 0.0
        self._external_requests = max(0.0, (load.running or 0.0) + waiting - own_requests)
        self._external_waiting = min(waiting, self._external_requests)

    def estimate(self, now_s: float) -> ExternalLoad:
        """Returns the last known load of other callers, and how long its next report is overdue."""
        return ExternalLoad(
            self._external_requests, self._external_waiting, max(0.0, now_s - self._last_report_s - self._interval_s)
        )


def parse_load(text: str, gauges: LoadGauges) -> ScrapedLoad:
    """Parses the load from metrics in Prometheus text format.

    A gauge may have several samples, one for each engine in the server: the request counts are added, and the largest
    cache usage is used.
    """
    gauge_names = {gauges.running, gauges.waiting, *gauges.kv_usage}
    values_by_name: dict[str, list[float]] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in gauge_names:
            continue
        try:
            # A timestamp may follow the value.
            value = float(line[len(name) :].rpartition("}")[2].split()[0])
        except (ValueError, IndexError):
            continue
        if 0 <= value < float("inf"):
            values_by_name.setdefault(name, []).append(value)
    return ScrapedLoad(
        _sum_values(values_by_name, gauges.running),
        _sum_values(values_by_name, gauges.waiting),
        next((max(values_by_name[name]) for name in gauges.kv_usage if name in values_by_name), None),
    )


def _sum_values(values_by_name: Mapping[str, list[float]], name: str) -> float | None:
    return sum(values_by_name[name]) if name in values_by_name else None
