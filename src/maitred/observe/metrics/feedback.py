"""Metrics of what callers think of answers, by model and by the side of a rollout.

They count what was *said* at this gateway: an opinion that is changed counts again, as it is then, and one that is
repeated does not. What holds in the end is in the usage, where the last opinion of each request counts alone.
"""

from prometheus_client import CollectorRegistry, Counter, Summary

from maitred.core.feedback import FeedbackReceipt


class FeedbackMetrics:
    """Counts opinions.

    Args:
        registry: Where the metrics are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        arm = ["model", "rollout", "version"]
        self._verdicts = Counter(
            "maitred_feedback", "Opinions that were given of answers.", [*arm, "verdict"], registry=registry
        )
        self._scores = Summary(
            "maitred_feedback_score", "Their scores, from 0, bad, to 1, good.", arm, registry=registry
        )

    def given(self, kept: FeedbackReceipt) -> None:
        """Counts one, unless it says what was said before."""
        if kept.feedback == kept.before:
            return
        rollout, _, version = kept.rollout.rpartition("=")
        arm = (kept.model, rollout, version)
        self._verdicts.labels(*arm, kept.feedback.verdict).inc()
        self._scores.labels(*arm).observe(kept.feedback.score)
