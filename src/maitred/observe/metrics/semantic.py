"""Metrics of the semantic cache, read at each scrape: whether its scopes serve, and what audits have found."""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class SemanticCacheState(Struct, frozen=True, kw_only=True):
    """State of the semantic cache for one model, at the moment of a scrape."""

    scopes: Mapping[str, int]
    """State of a scope, such as ``certified`` -> scopes in it, that this gateway has been asked for."""
    bound: float | None = None
    """Largest upper bound of false hits per look-up in scopes that serve; None: none serves."""
    labels: Mapping[bool, int] = {}
    """Whether compared answers were the same -> pairs that this gateway has compared for training."""
    audits: Mapping[str, int] = {}
    """Result -> audited look-ups of this gateway: ``same``, ``false``, ``none`` (there was no candidate), or
    ``skipped`` (too many wait, or the budget of tokens is used up)."""
    false_hits: int = 0
    """Of these, served answers, or those that would have been, that were wrong."""
    audit_tokens: int = 0
    """Tokens that audits of this gateway have computed."""


class SemanticCacheMetrics(Collector):
    """Metrics of the semantic cache, read at each scrape.

    Args:
        states: Returns the state for each model.
    """

    def __init__(self, states: Callable[[], Mapping[str, SemanticCacheState]]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Collects the states of all models for Prometheus."""
        scopes = GaugeMetricFamily(
            "maitred_cache_semantic_scopes", "Scopes of similar questions.", labels=["model", "state"]
        )
        bound = GaugeMetricFamily(
            "maitred_cache_semantic_bound",
            "Largest upper bound of false hits per look-up in scopes that serve.",
            labels=["model"],
        )
        labels = CounterMetricFamily(
            "maitred_cache_semantic_labels", "Pairs of answers compared for training.", labels=["model", "same"]
        )
        audits = CounterMetricFamily(
            "maitred_cache_semantic_audits", "Audited look-ups of similar questions.", labels=["model", "result"]
        )
        false_hits = CounterMetricFamily(
            "maitred_cache_semantic_false_hits", "Wrong answers that audits have found.", labels=["model"]
        )
        audit_tokens = CounterMetricFamily(
            "maitred_cache_semantic_audit_tokens", "Tokens that audits have computed.", labels=["model"]
        )
        for model, state in self._states().items():
            for name, count in state.scopes.items():
                scopes.add_metric([model, name], count)
            if state.bound is not None:
                bound.add_metric([model], state.bound)
            for same, count in state.labels.items():
                labels.add_metric([model, str(same).lower()], count)
            for result, count in state.audits.items():
                audits.add_metric([model, result], count)
            false_hits.add_metric([model], state.false_hits)
            audit_tokens.add_metric([model], state.audit_tokens)
        yield from (scopes, bound, labels, audits, false_hits, audit_tokens)
