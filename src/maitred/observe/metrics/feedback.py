"""Metrics of feedback on responses, by model and by the arm of a rollout.

They count the opinions *sent* to this gateway: a changed opinion counts again with its new value, and a repeated one
does not. The usage has the final opinions: there, only the last opinion of each request counts.
"""

from prometheus_client import CollectorRegistry, Counter, Summary

from maitred.core.feedback import FeedbackReceipt


class FeedbackMetrics:
    """Metrics of feedback on responses.

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
