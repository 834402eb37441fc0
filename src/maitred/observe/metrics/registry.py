"""All Prometheus metrics of a gateway, in one registry. Each is described for people in ``docs/metrics.md``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from maitred.core.answer import RequestObserver
from maitred.core.clock import Clock, SystemClock
from maitred.observe.config import MetricsConfig, SloConfig
from maitred.observe.growth import GrowthWatch
from maitred.observe.metrics.budgets import BudgetMetrics
from maitred.observe.metrics.dispatch import DispatchMetrics, DispatchState
from maitred.observe.metrics.engines import EngineMetrics, Engines
from maitred.observe.metrics.feedback import FeedbackMetrics
from maitred.observe.metrics.process import CpuWaits, WorkerMetrics, resources
from maitred.observe.metrics.reloads import ReloadMetrics, ReloadState
from maitred.observe.metrics.replicas import ReplicaMetrics, ReplicaStates
from maitred.observe.metrics.requests import RequestMetrics
from maitred.observe.metrics.residency import ResidencyMetrics, ResidencyState
from maitred.observe.metrics.rollouts import RolloutMetrics, RolloutsState
from maitred.observe.metrics.steps import StepMetrics
from maitred.observe.metrics.stores import AccountMetrics, AccountsState
from maitred.observe.metrics.tenants import TenantMetrics
from maitred.observe.metrics.upstreams import UpstreamMetrics, UpstreamStates
from maitred.observe.metrics.vllm_names import vllm_names
from maitred.observe.observer_batch import ObserverBatch
from maitred.observe.samples import MetricSamples, parse_series
from maitred.observe.slos import SloMetrics

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""


class Metrics:
    """All metrics of one gateway, in a registry of their own.

    Args:
        in_flight: Requests that are being answered.
        engines, accounts, queues, upstreams, residency, replicas, rollouts, reloads: Where things stand; asked at each
            scrape.
        tasks: Tasks of the event loop.
        workers: Numbers and process ids of API workers.
        config: What is shown.
        slos: What is promised, by name.
        clock: For the windows of these.
        digest: Tells of ended requests; None: somebody tells the `observers` at once.

    Attributes:
        observers: What counts ended requests.
        requests: The one of them that is also told of steps of the degradation ladder.
        steps: Is told of engines' reports.
        feedback: Is told what callers think of answers.
        budgets: Looks at those of tenants that came while it runs.
        growth: Looks for leaks while it runs.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        engines: Callable[[], Engines],
        accounts: Callable[[], AccountsState] = AccountsState,
        queues: Callable[[], Mapping[str, DispatchState]] = dict,
        upstreams: UpstreamStates = dict,
        residency: Callable[[], ResidencyState] = ResidencyState,
        replicas: ReplicaStates = tuple,
        rollouts: Callable[[], RolloutsState] = RolloutsState,
        reloads: Callable[[], ReloadState] = ReloadState,
        *,
        tasks: Callable[[], int] = lambda: 0,
        workers: Callable[[], Sequence[tuple[int, int]]] = tuple,
        config: MetricsConfig = MetricsConfig(),  # noqa: B008 - frozen
        slos: Mapping[str, SloConfig] = MappingProxyType({}),
        clock: Clock = SystemClock(),  # noqa: B008 - stateless
        digest: ObserverBatch | None = None,
    ) -> None:
        self._vllm = config.vllm_names
        # A creation time for every series would double the scrape, and nobody reads it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.requests = RequestMetrics(self._registry)
        self.steps = StepMetrics(self._registry)
        self.feedback = FeedbackMetrics(self._registry)
        self._slos = kept = SloMetrics(slos, clock)
        self._registry.register(kept)
        self.budgets = BudgetMetrics(config.tenants)
        self._registry.register(self.budgets)
        self._tenants = TenantMetrics(self._registry, config.tenants)
        self.observers: list[RequestObserver] = [self.requests, self._tenants, self.budgets, kept]
        self._digest = digest or ObserverBatch()
        self._digest.add_observers(*self.observers)
        self._registry.register(EngineMetrics(in_flight, engines, tasks))
        self._registry.register(DispatchMetrics(queues))
        self._registry.register(UpstreamMetrics(upstreams))
        self._registry.register(ResidencyMetrics(residency))
        self._registry.register(ReplicaMetrics(replicas))
        self._registry.register(RolloutMetrics(rollouts))
        self._registry.register(ReloadMetrics(reloads))
        self._registry.register(AccountMetrics(accounts))
        self.growth = GrowthWatch(in_flight, engines, clock, lambda: {**resources(), "tasks": tasks()})
        self._registry.register(self.growth)
        self._registry.register(CpuWaits())
        self._registry.register(WorkerMetrics(workers))
        # CPU, memory, open files and start time of this process, under `maitred_process_`.
        ProcessCollector(namespace="maitred", registry=self._registry)

    def reconfigure(self, config: MetricsConfig, slos: Mapping[str, SloConfig]) -> None:
        """Shows and promises this from now on."""
        self._vllm = config.vllm_names
        self.budgets.named.reconfigure(config.tenants)
        self._tenants.named.reconfigure(config.tenants)
        self._slos.reconfigure(slos)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Everything, and its content type: OpenMetrics for whoever accepts it, else Prometheus' text format.

        Args:
            accept: The header of that name.
        """
        self._digest.fold()
        families = list(self._registry.collect())
        if self._vllm:
            families += vllm_names(families)
        scraped: Any = _Scraped(families)
        if "application/openmetrics-text" in accept:
            # Its way to make names safe would take the colon out of vLLM's, which is as safe as any letter.
            text = openmetrics.generate_latest(scraped, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return exposition.generate_latest(scraped), _TEXT

    def samples(self) -> MetricSamples:
        """Everything, as whoever scrapes it reads it."""
        self._digest.fold()
        return MetricSamples(parse_series(self._registry.collect()))

    def names(self) -> set[str]:
        """The name of every metric of ours, without the endings that Prometheus adds."""
        return {metric.name for metric in self._registry.collect()}


class _Scraped:
    """What the exposition formats take for a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
