"""Metrics of reloads of the configuration, read at each scrape."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class ReloadState:
    """State of configuration reloads at the moment of a scrape."""

    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Outcome, `applied` or `refused` -> number of reloads."""
    last_successful: bool = True
    """Whether the last reload was applied, if there was one."""
    since_s: float = 0.0
    """Wall time since when this configuration is in force."""
    last_duration_s: float = 0.0
    """Duration of the last reload that was applied."""
    pending: int = 0
    """Settings that have changed and wait for a restart."""


class ReloadMetrics(Collector):
    """Metrics of configuration reloads.

    Args:
        state: Returns the state; called at each scrape.
    """

    def __init__(self, state: Callable[[], ReloadState]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Collects the reloads for Prometheus."""
        state = self._state()
        reloads = CounterMetricFamily(
            "maitred_config_reloads", "Reloads of the configuration, by what became of them.", labels=["end"]
        )
        for outcome, count in state.outcomes.items():
            reloads.add_metric([outcome], count)
        yield reloads
        for name, text, value in (
            (
                "reload_successful",
                "Whether the last reload was applied, if there was one.",
                float(state.last_successful),
            ),
            ("since_timestamp_seconds", "When the configuration in force was read.", state.since_s),
            ("reload_seconds", "How long the last reload took that was applied.", state.last_duration_s),
            ("pending_settings", "Settings that have changed and wait for a restart.", float(state.pending)),
        ):
            yield GaugeMetricFamily(f"maitred_config_{name}", text, value=value)
