"""Metrics of accounting: leases, the ledger, its difference from engines' counts, the stores; and of cached answers.

The state is read at each scrape.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.request import Usage
from maitred.wire.admin.cache import CacheStoreBody


@dataclass(frozen=True, slots=True)
class AccountsState:
    """State of the accounting at the moment of a scrape."""

    leases_held: int = 0
    """Requests that hold a reservation."""
    leases_late: int = 0
    """Leases of ended requests that the counters have not settled yet."""
    backlog: int = 0
    """Lines of the ledger that are in the journal only."""
    backlog_age_s: float = 0.0
    directory_age_s: float = 0.0
    """Greatest age of the known keys and limits."""
    stores_up: Mapping[str, bool] = field(default_factory=dict)
    """Store, ``database`` or ``counters`` -> whether it answers."""
    recorded: Mapping[str, Usage] = field(default_factory=dict)
    """Model -> tokens in the ledger since this gateway started."""
    costs_usd: Mapping[str, float] = field(default_factory=dict)
    """Model -> cost of its tokens in the ledger."""
    soft_budgets_passed: int = 0
    """Soft budgets that were exceeded since this gateway started."""
    drift_tokens: Mapping[str, int] = field(default_factory=dict)
    """Model -> output tokens that its engine has counted and the ledger has not."""


class AccountMetrics(Collector):
    """Metrics of leases, ledger and stores, read at each scrape."""

    def __init__(self, state: Callable[[], AccountsState]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Collects the state of the accounting for Prometheus."""
        state = self._state()
        leases = GaugeMetricFamily("maitred_leases", "Reservations of requests.", labels=["state"])
        leases.add_metric(["held"], state.leases_held)
        leases.add_metric(["late"], state.leases_late)
        yield leases
        yield GaugeMetricFamily("maitred_ledger_backlog", "Lines that are in the journal only.", state.backlog)
        yield GaugeMetricFamily(
            "maitred_ledger_backlog_age_seconds", "How long the oldest of them waits.", state.backlog_age_s
        )
        yield GaugeMetricFamily(
            "maitred_directory_age_seconds", "How old what is known of keys and limits may be.", state.directory_age_s
        )
        stores = GaugeMetricFamily("maitred_store_up", "1 while the store answers.", labels=["store"])
        for store, up in state.stores_up.items():
            stores.add_metric([store], up)
        yield stores
        yield CounterMetricFamily(
            "maitred_soft_budgets_passed", "Soft budgets that were passed.", state.soft_budgets_passed
        )
        prompt = CounterMetricFamily("maitred_ledger_prompt_tokens", "Prompt tokens in the ledger.", labels=["model"])
        output = CounterMetricFamily("maitred_ledger_output_tokens", "Output tokens in the ledger.", labels=["model"])
        for model, usage in state.recorded.items():
            prompt.add_metric([model], usage.prompt_tokens)
            output.add_metric([model], usage.completion_tokens)
        cost = CounterMetricFamily("maitred_ledger_cost_usd", "What these cost.", labels=["model"])
        for model, usd in state.costs_usd.items():
            cost.add_metric([model], usd)
        yield prompt
        yield output
        yield cost
        drift = GaugeMetricFamily(
            "maitred_ledger_drift_tokens",
            "Output tokens that the engine has counted and the ledger has not.",
            labels=["model"],
        )
        for model, tokens in state.drift_tokens.items():
            drift.add_metric([model], tokens)
        yield drift


class CacheMetrics(Collector):
    """Metrics of the store of cached answers, read at each scrape."""

    def __init__(self, state: Callable[[], CacheStoreBody]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Collects the state of the store for Prometheus; what only a listing of a Redis would tell is left out."""
        state = self._state()
        if state.bytes is not None:
            yield GaugeMetricFamily("maitred_cache_bytes", "What the cache of answers takes.", state.bytes)
        if state.answers is not None:
            yield GaugeMetricFamily("maitred_cache_answers", "Answers that are in the cache.", state.answers)
        yield CounterMetricFamily("maitred_cache_stores", "Answers that were put into the cache.", state.stores)
        yield CounterMetricFamily("maitred_cache_evictions", "Answers that made room for others.", state.evictions)
