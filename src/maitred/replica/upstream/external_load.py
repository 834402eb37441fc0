"""External load: load that a server reports for callers other than this gateway, and the age of the report.

A page of metrics counts this gateway's requests too, as they were when the page was read, and the gateway knows better
how many of them are left now. So only the load of other callers is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from maitred.core.replica import ExternalLoad
from maitred.replica.upstream.dialects import LoadGauges

_NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Last load that a server has reported of itself; None where it reports none."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Usage of its KV cache, from 0 to 1."""


class ExternalLoadTracker:
    """Tracker of the load that other callers have on one server.

    A page that stays the same while this gateway's own load there changes is ignored: the process that serves it has
    stopped updating it.

    Args:
        interval_s: Time between two probes; no report is late before that.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._reported_s = _NEVER_S
        self._last_reported: tuple[float | None, float | None] = (None, None)
        self._own_requests = 0
        self._external_requests = self._external_waiting = 0.0

    def on_report(self, load: ServerLoad, own_requests: int, now_s: float) -> None:
        """Notes a load that was read.

        Args:
            load: The reported load; a load without numbers is ignored.
            own_requests: Requests of this gateway that were open there.
            now_s: Now.
        """
        reported = (load.running, load.waiting)
        if reported == (None, None) or (reported == self._last_reported and own_requests != self._own_requests):
            return
        self._reported_s, self._last_reported, self._own_requests = now_s, reported, own_requests
        waiting = load.waiting or 0.0
        self._external_requests = max(0.0, (load.running or 0.0) + waiting - own_requests)
        self._external_waiting = min(waiting, self._external_requests)

    def estimate(self, now_s: float) -> ExternalLoad:
        """Returns the load of other callers as it is known at this time."""
        return ExternalLoad(
            self._external_requests, self._external_waiting, max(0.0, now_s - self._reported_s - self._interval_s)
        )


def parse_load(text: str, gauges: LoadGauges) -> ServerLoad:
    """Parses the load in a page of metrics.

    A gauge can occur several times, once for each engine in the server: requests are added up, and of caches the
    fullest counts.
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
    return ServerLoad(
        _sum(values_by_name, gauges.running),
        _sum(values_by_name, gauges.waiting),
        next((max(values_by_name[name]) for name in gauges.kv_usage if name in values_by_name), None),
    )


def _sum(values_by_name: Mapping[str, list[float]], name: str) -> float | None:
    return sum(values_by_name[name]) if name in values_by_name else None
