"""Metrics of models whose number of replicas follows the demand, read at each scrape."""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ScalingState(Struct, frozen=True, kw_only=True):
    """State of the scaling of one model, at the moment of a scrape."""

    desired: int
    desired_asleep: int
    actual: Mapping[str, int]
    """Phase -> replicas in it."""
    decisions: Mapping[str, int]
    """Reason -> decisions of this gateway."""
    reachable: bool
    """Whether more replicas could meet the objectives."""
    override: bool
    """Whether an operator has set the number."""
    deciding: bool
    """Whether this gateway decides."""
    forecast: tuple[float, float, float] | None
    """Low, mean and high requests per second at the end of the lead time; None: nothing was decided yet."""
    coverage: float | None
    predicted_ttft_s: float | None
    measured_ttft_s: float | None
    """95th percentile of the last minute; None: there was no first token."""
    start_s: Mapping[str, float]
    """Kind of start -> seconds within which nine of ten were complete."""


_PHASES = ("starting", "waking", "serving", "draining", "asleep", "failed", "maintenance")


class ScalingMetrics(Collector):
    """Metrics of scaled models, read at each scrape.

    Args:
        states: Returns the state for each model.
    """

    def __init__(self, states: Callable[[], Mapping[str, ScalingState]]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Collects the states of all models for Prometheus."""
        desired = _gauge("maitred_scaling_desired_replicas", "Replicas that should be there.", "phase")
        actual = _gauge("maitred_scaling_replicas", "Replicas that are there.", "phase")
        decisions = CounterMetricFamily(
            "maitred_scaling_decisions", "Decisions of this gateway.", labels=["model", "reason"]
        )
        forecast = _gauge(
            "maitred_scaling_forecast_requests_per_second",
            "Forecast of requests when another replica would serve: mean, and a band of 90 %.",
            "bound",
        )
        starts = _gauge("maitred_scaling_start_seconds", "Time within which nine of ten starts were complete.", "kind")
        single = {name: (_gauge(f"maitred_scaling_{name}", text), read) for name, (text, read) in _SINGLE.items()}
        for model, state in self._states().items():
            desired.add_metric([model, "serving"], state.desired)
            desired.add_metric([model, "asleep"], state.desired_asleep)
            for phase in _PHASES:
                actual.add_metric([model, phase], state.actual.get(phase, 0))
            for reason, count in state.decisions.items():
                decisions.add_metric([model, reason], count)
            for bound, value in zip(("low", "mean", "high"), state.forecast or (), strict=False):
                forecast.add_metric([model, bound], value)
            for kind, seconds in state.start_s.items():
                starts.add_metric([model, kind], seconds)
            for gauge, read in single.values():
                if (one := read(state)) is not None:
                    gauge.add_metric([model], one)
        yield from (desired, actual, decisions, forecast, starts, *(gauge for gauge, _ in single.values()))


_SINGLE: Mapping[str, tuple[str, Callable[[ScalingState], float | None]]] = {
    "forecast_coverage": (
        "Share of what came that lay in the band of the forecast, 0.9 at best.",
        lambda state: state.coverage,
    ),
    "predicted_ttft_seconds": (
        "Highest predicted time to first token of 95 % of the requests, with the desired replicas.",
        lambda state: state.predicted_ttft_s,
    ),
    "measured_ttft_seconds": (
        "95th percentile of the time to first token in the last whole minute.",
        lambda state: state.measured_ttft_s,
    ),
    "objective_reachable": ("0 while no number of replicas would meet the objectives.", lambda state: state.reachable),
    "override_active": ("1 while an operator has set the number.", lambda state: state.override),
    "deciding": ("1 at the gateway that decides.", lambda state: state.deciding),
}


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=["model", *labels])
