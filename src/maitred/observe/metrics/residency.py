"""Metrics of the models that share one machine's memory, read at each scrape."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class ResidentState:
    """State of one model at the moment of a scrape."""

    resident: bool
    loading: bool
    asleep: bool
    reserved_bytes: int
    measured_bytes: int
    loads: int
    load_s: float
    failures: int
    unloads: int
    sleeps: int
    wakes: int
    predicted_load_s: float


@dataclass(frozen=True, slots=True)
class ResidencyState:
    """State of all models that are loaded on demand."""

    budget_bytes: int | None = None
    """Memory budget; None: no model is loaded on demand."""
    models: Mapping[str, ResidentState] = field(default_factory=dict)


_GAUGES: Mapping[str, tuple[str, Callable[[ResidentState], float]]] = {
    "maitred_model_resident": ("1 while the model is in memory.", lambda state: state.resident),
    "maitred_model_loading": ("1 while it is being loaded.", lambda state: state.loading),
    "maitred_model_asleep": ("1 while it sleeps: out of memory, but for its process.", lambda state: state.asleep),
    "maitred_model_reserved_bytes": ("What it counts against the budget now.", lambda state: state.reserved_bytes),
    "maitred_model_memory_bytes": ("What its process was last measured to take.", lambda state: state.measured_bytes),
    "maitred_model_predicted_load_seconds": (
        "How long its next load is expected to take.",
        lambda state: state.predicted_load_s,
    ),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[ResidentState], float]]] = {
    "maitred_model_loads": ("Times that it was loaded.", lambda state: state.loads),
    "maitred_model_load_seconds": ("Time that these loads took.", lambda state: state.load_s),
    "maitred_model_load_failures": ("Loads that failed.", lambda state: state.failures),
    "maitred_model_unloads": ("Times that it was unloaded.", lambda state: state.unloads),
    "maitred_model_sleeps": ("Times that it fell asleep.", lambda state: state.sleeps),
    "maitred_model_wakes": ("Times that it woke.", lambda state: state.wakes),
}


class ResidencyMetrics(Collector):
    """Metrics of all models that are loaded on demand.

    Args:
        state: Returns their state.
    """

    def __init__(self, state: Callable[[], ResidencyState]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Collects the state of all models for Prometheus."""
        state = self._state()
        budget = GaugeMetricFamily("maitred_residency_budget_bytes", "What all these models may take together.")
        if state.budget_bytes is not None:
            budget.add_metric([], state.budget_bytes)
        yield budget
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for model, model_state in state.models.items():
                gauge.add_metric([model], read(model_state))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model"])
            for model, model_state in state.models.items():
                counter.add_metric([model], read(model_state))
            yield counter
