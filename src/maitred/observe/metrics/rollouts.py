"""Metrics of rollouts, read at each scrape, and of the feedback that compares their arms.

Metrics of feedback count the opinions *sent* to this gateway: a changed opinion counts again with its new value, and a
repeated one does not. The usage has the final opinions: there, only the last opinion of each request counts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Summary
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.usage import FeedbackReceipt


@dataclass(frozen=True, slots=True)
class RolloutMetricsState:
    """State of all rollouts, as this gateway sees them."""

    weight: Mapping[str, float] = field(default_factory=dict)
    """Weight of the canary by name."""
    requests: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Ended requests on trial by name and version."""
    evidence: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Evidence by name and fault."""
    copies: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Shadow copies by name and end."""
    decisions: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Decisions by name and phase."""


class RolloutMetrics(Collector):
    """Metrics of all rollouts, read at each scrape."""

    def __init__(self, state: Callable[[], RolloutMetricsState]) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Collects the state of all rollouts for Prometheus."""
        state = self._state()
        weight = GaugeMetricFamily(
            "maitred_rollout_weight", "Share of the keys that the canary serves.", labels=["rollout"]
        )
        for name, share in state.weight.items():
            weight.add_metric([name], share)
        evidence = GaugeMetricFamily(
            "maitred_rollout_evidence",
            "How strongly a fault of the canary is suspected; 1 is enough for an abort.",
            labels=["rollout", "fault"],
        )
        for names, share in state.evidence.items():
            evidence.add_metric(names, share)
        yield weight
        yield evidence
        for metric, text, label, counts in (
            ("maitred_rollout_requests", "Requests on trial that have ended.", "version", state.requests),
            ("maitred_rollout_copies", "Copies for the canary that have ended, or were not made.", "end", state.copies),
            ("maitred_rollout_decisions", "Decisions on this gateway, by what came of them.", "phase", state.decisions),
        ):
            counter = CounterMetricFamily(metric, text, labels=["rollout", label])
            for names, count in counts.items():
                counter.add_metric(names, count)
            yield counter


class FeedbackMetrics:
    """Metrics of feedback on responses, by model and by the arm of a rollout.

    Args:
        registry: Registry of the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        arm = ["model", "rollout", "version"]
        self._opinions = Counter(
            "maitred_feedback", "Opinions that were given of answers.", [*arm, "verdict"], registry=registry
        )
        self._scores = Summary(
            "maitred_feedback_score", "Their scores, from 0, bad, to 1, good.", arm, registry=registry
        )

    def on_feedback(self, receipt: FeedbackReceipt) -> None:
        """Counts one opinion, unless it repeats the last one."""
        if receipt.feedback == receipt.before:
            return
        rollout, _, version = receipt.rollout.rpartition("=")
        arm = (receipt.model, rollout, version)
        self._opinions.labels(*arm, receipt.feedback.verdict).inc()
        self._scores.labels(*arm).observe(receipt.feedback.score)
