"""Prometheus metrics: what requests did, from their tallies; what engines do, from their load reports.

Counters of requests are fed when a request ends. The engine's numbers are not copied step by step: they are read
from its last load report when somebody scrapes. Every metric is described for people in ``docs/metrics.md``.

Labels have bounded values: routes and models as *resolved* here, never as the client wrote them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.answer import Outcome, Tally
from maitred.core.ports import LoadReport, ModelCard
from maitred.core.request import Usage
from maitred.observe.accounts import Accounts, AccountsState
from maitred.observe.dispatch import DispatchMetrics, DispatchState
from maitred.observe.replicas import ReplicaMetrics, ReplicaStates
from maitred.observe.residency import ResidencyMetrics, ResidencyState
from maitred.observe.rollouts import RolloutMetrics, RolloutsState
from maitred.observe.upstreams import UpstreamMetrics, UpstreamStates

_REQUEST_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_STEPS: Mapping[str, str] = {"max_tokens": "shorten"}
"""What was taken from a request -> the step of the degradation ladder that took it, where the two differ."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine at the moment of a scrape."""

    up: bool
    restarts: int
    load: LoadReport
    card: ModelCard | None
    """None before the engine has been ready."""


Engines = Mapping[tuple[str, str], EngineState]
"""By model and replica."""


class RequestMetrics:
    """Counts ended requests. Implements `maitred.core.answer.Observer`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "maitred_requests", "Requests that ended.", ["route", "outcome", "status"], registry=registry
        )
        self._refused = Counter(
            "maitred_limit_refusals", "Requests that a limit had no room for.", ["limit"], registry=registry
        )
        self._clamped = Counter(
            "maitred_clamped_requests", "Requests whose max_tokens a limit lowered.", registry=registry
        )
        self._degraded = Counter(
            "maitred_degraded_requests", "Requests that got less, so as not to be refused.", ["step"], registry=registry
        )
        self._unhelpful = Counter(
            "maitred_degradation_skips",
            "Steps of a degradation ladder that were no help.",
            ["step", "reason"],
            registry=registry,
        )
        self._stalled = Counter(
            "maitred_stalled_requests",
            "Requests that were ended because their clients had stopped reading.",
            registry=registry,
        )
        self._chosen = Counter(
            "maitred_chosen",
            "Requests whose model was chosen by what their prompts look like.",
            ["name", "model", "reason"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "maitred_fallbacks",
            "Times that a request went on to another model because one had failed it.",
            ["chain", "model"],
            registry=registry,
        )
        self._escalations = Counter(
            "maitred_escalations",
            "Whole answers that failed a check, and whether a larger model's was given instead.",
            ["model", "reason", "result"],
            registry=registry,
        )
        self._hedges = Counter(
            "maitred_hedges",
            "Requests that were sent to a second replica because the first was late, and who answered.",
            ["model", "answered"],
            registry=registry,
        )
        self._recoveries = Counter(
            "maitred_recoveries",
            "Times that a request went on at another replica because its own had failed.",
            ["model"],
            registry=registry,
        )
        self._continued = Counter(
            "maitred_continued",
            "Times that a stream went on at another server by its text.",
            ["model"],
            registry=registry,
        )
        self._duration = Histogram(
            "maitred_request_seconds",
            "From the head of the request to the end of the answer.",
            ["route"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._ttft = Histogram(
            "maitred_ttft_seconds",
            "From the head of the request to its first token.",
            ["model"],
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._itl = Histogram(
            "maitred_itl_seconds",
            "Between two deliveries of tokens of one choice.",
            ["model"],
            buckets=_ITL_BUCKETS_S,
            registry=registry,
        )
        self._prompt = Counter(
            "maitred_prompt_tokens", "Prompt tokens of requests that ran.", ["model"], registry=registry
        )
        self._cached = Counter(
            "maitred_cached_tokens", "Of these, tokens found in the prefix cache.", ["model"], registry=registry
        )
        self._output = Counter("maitred_output_tokens", "Tokens generated for clients.", ["model"], registry=registry)

    def ended(self, tally: Tally) -> None:
        """Counts one."""
        self._requests.labels(tally.route, tally.outcome or Outcome.FAILED, tally.status).inc()
        self._duration.labels(tally.route).observe(tally.ended_s - tally.started_s)
        if tally.refused_by:
            self._refused.labels(tally.refused_by).inc()
        if tally.stalled:
            self._stalled.inc()
        if tally.clamped_max_tokens is not None:
            self._clamped.inc()
        if (chosen := tally.chosen) is not None:
            self._chosen.labels(chosen.name, chosen.model, chosen.reason).inc()
        for fallback in tally.fallbacks:
            self._fallbacks.labels(*fallback.split("=", 1)).inc()
        for failed in tally.failed:
            self._escalations.labels(failed.model, failed.reason, "replaced" if failed.replaced else "given").inc()
            if failed.replaced:
                self._count_tokens(failed.model, failed.usage)
        if tally.hedged:
            self._hedges.labels(tally.model, tally.hedged).inc()
        if tally.recoveries:
            self._recoveries.labels(tally.model).inc(tally.recoveries)
        if tally.continued:
            self._continued.labels(tally.model).inc(tally.continued)
        if tally.first_token_s is None:
            return
        self._ttft.labels(tally.model).observe(tally.first_token_s - tally.started_s)
        itl = self._itl.labels(tally.model)
        for gap_s in tally.gaps_s:
            itl.observe(gap_s)
        self._count_tokens(tally.model, tally.usage)
        for taken in tally.degraded:
            what = taken.partition("=")[0]
            self._degraded.labels(_STEPS.get(what, what)).inc()

    def _count_tokens(self, model: str, usage: Usage) -> None:
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._cached.labels(model).inc(usage.cached_tokens)
        self._output.labels(model).inc(usage.completion_tokens)

    def degradation_skipped(self, step: str, reason: str) -> None:
        """Counts a step of a degradation ladder that was no help, and why."""
        self._unhelpful.labels(step, reason).inc()


_GAUGES: Mapping[str, tuple[str, Callable[[EngineState], float]]] = {
    "maitred_engine_up": ("1 while the engine is connected.", lambda state: state.up),
    "maitred_engine_asleep": ("1 while the engine sleeps.", lambda state: state.up and state.load.asleep),
    "maitred_engine_running": ("Sequences in the batch.", lambda state: state.load.running),
    "maitred_engine_waiting": ("Sequences that wait for a place in the batch.", lambda state: state.load.waiting),
    "maitred_engine_paused": (
        "Sequences that are not computed because their readers have fallen behind.",
        lambda state: state.load.paused,
    ),
    "maitred_engine_guests": (
        "Sequences that run beyond the places, because their tenants held fewer of them than others.",
        lambda state: state.load.guests,
    ),
    "maitred_engine_free_sequences": (
        "Sequences that the batch would take now, beside those that run and wait.",
        lambda state: state.load.free_sequences,
    ),
    "maitred_engine_step_tokens": ("Tokens that a step may compute now.", lambda state: state.load.step_tokens),
    "maitred_engine_waiting_prompt_tokens": (
        "Prompt tokens of what runs and waits that are still to be computed.",
        lambda state: state.load.waiting_prompt_tokens,
    ),
    "maitred_engine_kv_blocks_promised": (
        "KV blocks that what runs and waits is still expected to take.",
        lambda state: state.load.promised_blocks,
    ),
    "maitred_engine_kv_blocks_free": (
        "KV blocks that can be allocated now, cached ones that nobody uses included.",
        lambda state: state.load.free_blocks,
    ),
    "maitred_engine_kv_blocks_total": ("KV blocks in all.", lambda state: state.load.total_blocks),
    "maitred_engine_kv_capacity_tokens": (
        "Tokens that the KV cache can hold.",
        lambda state: state.card.kv_capacity_tokens if state.card else 0,
    ),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[EngineState], float]]] = {
    "maitred_engine_restarts": ("Times that the engine was started again.", lambda state: state.restarts),
    "maitred_engine_steps": ("Model steps.", lambda state: state.load.steps),
    "maitred_engine_step_seconds": ("Time spent in model steps.", lambda state: state.load.step_s),
    "maitred_engine_prompt_tokens": (
        "Prompt tokens of admitted sequences, cached ones included.",
        lambda state: state.load.prompt_tokens,
    ),
    "maitred_engine_cached_tokens": (
        "Of these, tokens found in the prefix cache.",
        lambda state: state.load.cached_tokens,
    ),
    "maitred_engine_output_tokens": ("Tokens sampled.", lambda state: state.load.output_tokens),
    "maitred_engine_preemptions": (
        "Sequences that lost their KV blocks to others for a while.",
        lambda state: state.load.preemptions,
    ),
    "maitred_engine_recomputed_tokens": (
        "Tokens computed again after a preemption, or after another replica that was lost; never billed.",
        lambda state: state.load.recomputed_tokens,
    ),
    "maitred_engine_finished": ("Sequences that came to their end.", lambda state: state.load.finished),
    "maitred_engine_cancelled": ("Sequences that nobody wanted any more.", lambda state: state.load.cancelled),
    "maitred_engine_wasted_tokens": (
        "Tokens sampled for readers that left, or whose deadline passed with no use for a part.",
        lambda state: state.load.wasted_tokens,
    ),
}


class LiveState(Collector):
    """Reads gateway and engines when somebody scrapes.

    Args:
        in_flight: Requests that are being answered.
        engines: Each engine by the names of its model and of its replica.
    """

    def __init__(self, in_flight: Callable[[], int], engines: Callable[[], Engines]) -> None:
        self._in_flight = in_flight
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """Prometheus asks."""
        yield GaugeMetricFamily("maitred_in_flight", "Requests that are being answered.", self._in_flight())
        engines = self._engines()
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model", "replica"])
            for names, state in engines.items():
                gauge.add_metric(names, read(state))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model", "replica"])
            for names, state in engines.items():
                counter.add_metric(names, read(state))
            yield counter


class Metrics:
    """All metrics of one gateway, in a registry of their own.

    Attributes:
        requests: The observer that counts ended requests.
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
    ) -> None:
        # A creation time for every series would double the scrape, and nobody reads it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.requests = RequestMetrics(self._registry)
        self._registry.register(LiveState(in_flight, engines))
        self._registry.register(DispatchMetrics(queues))
        self._registry.register(UpstreamMetrics(upstreams))
        self._registry.register(ResidencyMetrics(residency))
        self._registry.register(ReplicaMetrics(replicas))
        self._registry.register(RolloutMetrics(rollouts))
        self._registry.register(Accounts(accounts))
        # CPU, memory, open files and start time of this process, under `maitred_process_`.
        ProcessCollector(namespace="maitred", registry=self._registry)

    def render(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def names(self) -> set[str]:
        """The name of every metric, without the endings that Prometheus adds."""
        return {metric.name for metric in self._registry.collect()}
