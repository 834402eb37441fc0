"""Metrics of upstream servers: whether they answer, and their load. Read at each scrape."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class UpstreamState:
    """State of one server at the moment of a scrape; None where it does not report a value."""

    up: bool
    open_requests: int
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    breaker: str = "closed"
    weight: float = 1.0
    account_refused: bool = False


_GAUGES: Mapping[str, tuple[str, Callable[[UpstreamState], float | None]]] = {
    "maitred_upstream_up": ("1 while the server is there.", lambda state: state.up),
    "maitred_upstream_open_requests": ("Our requests that it has not finished.", lambda state: state.open_requests),
    "maitred_upstream_running": ("Requests that it computes, by its own word.", lambda state: state.running),
    "maitred_upstream_waiting": ("Requests that wait in it, by its own word.", lambda state: state.waiting),
    "maitred_upstream_breaker_open": (
        "1 while requests are kept from it because they failed there, one half while one finds out.",
        lambda state: {"closed": 0.0, "half_open": 0.5}.get(state.breaker, 1.0),
    ),
    "maitred_upstream_weight": (
        "The part of its load that it gets; less while it comes back.",
        lambda state: state.weight,
    ),
    "maitred_upstream_account_refused": (
        "1 while it refuses the account or the credential of this gateway.",
        lambda state: state.account_refused,
    ),
    "maitred_upstream_kv_usage": ("How full its KV cache is, from 0 to 1.", lambda state: state.kv_usage),
}

UpstreamStates = Callable[[], Mapping[tuple[str, str], UpstreamState]]
"""(model, server) -> its state now."""


class UpstreamMetrics(Collector):
    """Metrics of all upstream servers.

    Args:
        states: Returns their states.
    """

    def __init__(self, states: UpstreamStates) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Collects the state of all servers for Prometheus."""
        states = self._states()
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model", "upstream"])
            for (model, server), state in states.items():
                if (value := read(state)) is not None:
                    gauge.add_metric([model, server], value)
            yield gauge
