"""What became of reloads of the configuration, for Prometheus."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class ReloadState:
    """As of now."""

    ends: Mapping[str, int] = field(default_factory=dict)
    """`applied` and `refused` -> how often."""
    successful: bool = True
    """Whether the last one was applied, if there was one."""
    since_s: float = 0.0
    """Wall time since when this configuration is in force."""
    took_s: float = 0.0
    """The last one that was applied."""
    pending: int = 0
    """Settings that have changed and wait for a restart."""


class ReloadMetrics(Collector):
    """Shows it.

    Args:
        state: Asked at each scrape.
    """

    def __init__(self, state: Callable[[], ReloadState]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Prometheus asks."""
        state = self._state()
        ends = CounterMetricFamily(
            "maitred_config_reloads", "Reloads of the configuration, by what became of them.", labels=["end"]
        )
        for end, count in state.ends.items():
            ends.add_metric([end], count)
        yield ends
        for name, text, value in (
            (
                "reload_successful",
                "Whether the last reload was applied, if there was one.",
                float(state.successful),
            ),
            ("since_timestamp_seconds", "When the configuration in force was read.", state.since_s),
            ("reload_seconds", "How long the last reload took that was applied.", state.took_s),
            ("pending_settings", "Settings that have changed and wait for a restart.", float(state.pending)),
        ):
            yield GaugeMetricFamily(f"maitred_config_{name}", text, value=value)
