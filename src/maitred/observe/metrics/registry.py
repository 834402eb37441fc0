"""Registry of all Prometheus metrics of a gateway, which ``docs/metrics.md`` describes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from maitred.core.clock import Clock, SystemClock
from maitred.core.context import RequestObserver
from maitred.observe.config import MetricsConfig, SloConfig
from maitred.observe.growth import GrowthWatch
from maitred.observe.metrics.budgets import BudgetMetrics
from maitred.observe.metrics.dispatch import DispatchMetrics, DispatchState
from maitred.observe.metrics.engines import EngineMetrics, EngineStates
from maitred.observe.metrics.process import CpuWaitMetrics, WorkerMetrics, process_resources
from maitred.observe.metrics.requests import RequestMetrics, TenantMetrics
from maitred.observe.metrics.rollouts import FeedbackMetrics
from maitred.observe.metrics.steps import StepMetrics
from maitred.observe.metrics.vllm_names import vllm_families
from maitred.observe.observer_batch import ObserverBatch
from maitred.observe.samples import MetricSamples, parse_series
from maitred.observe.slos import SloMetrics

_TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format."""


class Metrics:
    """Metrics of one gateway, in a registry of their own.

    Args:
        in_flight: Requests that are being answered.
        engines, queues: States of the engines and of the models' queues, read at each scrape.
        collectors: Collectors of the gateway's other state, such as `AccountMetrics` of its stores.
        tasks: Tasks of the event loop.
        websockets: WebSockets that are open.
        workers: Numbers and process ids of API workers.
        config: Settings of the metrics.
        slos: Service level objectives by name.
        clock: Clock for the windows of the objectives.
        batch: Batch that delivers ended requests to the `observers`; None: they are delivered directly.

    Attributes:
        observers: Observers that count ended requests.
        requests: The observer that also counts skipped steps of the degradation ladder.
        steps: Metrics of engine steps, fed by the engines' reports.
        feedback: Metrics of feedback, fed by callers' opinions.
        budgets: Metrics of budgets; `budgets.run` keeps them fresh.
        growth: Leak detection; `growth.run` samples the processes.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        engines: Callable[[], EngineStates],
        queues: Callable[[], Mapping[str, DispatchState]] = dict,
        collectors: Iterable[Collector] = (),
        *,
        tasks: Callable[[], int] = lambda: 0,
        websockets: Callable[[], int] = lambda: 0,
        workers: Callable[[], Sequence[tuple[int, int]]] = tuple,
        config: MetricsConfig = MetricsConfig(),  # noqa: B008 - frozen
        slos: Mapping[str, SloConfig] = MappingProxyType({}),
        clock: Clock = SystemClock(),  # noqa: B008 - stateless
        batch: ObserverBatch | None = None,
    ) -> None:
        self._show_vllm_names = config.vllm_names
        # A creation time for every series would double the scrape, and it is never read.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.requests = RequestMetrics(self._registry)
        self.steps = StepMetrics(self._registry)
        self.feedback = FeedbackMetrics(self._registry)
        self._slo_metrics = slo_metrics = SloMetrics(slos, clock)
        self._registry.register(slo_metrics)
        self._batch = batch or ObserverBatch()
        self.budgets = BudgetMetrics(config.tenants, self._batch)
        self._registry.register(self.budgets)
        self._tenants = TenantMetrics(self._registry, config.tenants)
        self.observers: list[RequestObserver] = [self.requests, self._tenants, self.budgets, slo_metrics]
        self._batch.add_observers(*self.observers)
        self._registry.register(EngineMetrics(in_flight, engines, tasks, websockets))
        self._registry.register(DispatchMetrics(queues))
        for collector in collectors:
            self._registry.register(collector)
        self.growth = GrowthWatch(in_flight, engines, clock, lambda: {**process_resources(), "tasks": tasks()})
        self._registry.register(self.growth)
        self._registry.register(CpuWaitMetrics())
        self._registry.register(WorkerMetrics(workers))
        # CPU, memory, open files and start time of this process, under `maitred_process_`.
        ProcessCollector(namespace="maitred", registry=self._registry)

    def reconfigure(self, config: MetricsConfig, slos: Mapping[str, SloConfig]) -> None:
        """Applies new settings and objectives."""
        self._show_vllm_names = config.vllm_names
        self.budgets.tenant_labels.reconfigure(config.tenants)
        self._tenants.tenant_labels.reconfigure(config.tenants)
        self._slo_metrics.reconfigure(slos)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Renders all metrics with their content type: OpenMetrics if accepted, else Prometheus' text format.

        Args:
            accept: The header `Accept` of the scrape.
        """
        self._batch.flush_pending()
        families = list(self._registry.collect())
        if self._show_vllm_names:
            families += vllm_families(families)
        registry: Any = _FamilyRegistry(families)
        if "application/openmetrics-text" in accept:
            # Its default escaping would replace the colon in vLLM's names, which is valid in a name.
            text = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return exposition.generate_latest(registry), _TEXT_CONTENT_TYPE

    def samples(self) -> MetricSamples:
        """Returns the samples that a scrape would read."""
        self._batch.flush_pending()
        return MetricSamples(parse_series(self._registry.collect()))


class _FamilyRegistry:
    """Stand-in for a registry, with families that are collected already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
