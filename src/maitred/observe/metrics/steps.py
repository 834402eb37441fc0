"""Metrics of engine steps: how long they take and how much they compute.

An engine reports the totals of all its steps after every step, and the difference between two reports is one step. An
average hides the one slow step of a long prompt, which delays every client; a histogram shows it.
"""

from functools import cache

from prometheus_client import CollectorRegistry, Histogram

from maitred.core.replica import LoadReport

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LABELS = ("model", "replica")


class StepMetrics:
    """Histograms of steps, as engines report them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._last: dict[tuple[str, str], LoadReport] = {}
        seconds = Histogram(
            "maitred_step_seconds", "What a step takes.", _LABELS, buckets=_STEP_BUCKETS_S, registry=registry
        )
        sequences = Histogram(
            "maitred_step_sequences",
            "Sequences in a step's batch.",
            _LABELS,
            buckets=_SEQUENCE_BUCKETS,
            registry=registry,
        )
        tokens = Histogram(
            "maitred_step_tokens",
            "Tokens that a step computes, of prompts and of answers.",
            _LABELS,
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )

        self._seconds, self._sequences, self._tokens = map(cache, (seconds.labels, sequences.labels, tokens.labels))

    def on_report(self, replica_key: tuple[str, str], report: LoadReport) -> None:
        """Observes the step that a load report of an engine describes.

        Args:
            replica_key: Model and replica of the engine.
            report: The report. If it is not exactly one step after the last report, no step is observed: a gateway that
                has just connected does not know what was before.
        """
        last = self._last.get(replica_key)
        self._last[replica_key] = report
        if last is None or report.steps != last.steps + 1:
            return
        self._seconds(*replica_key).observe(report.step_s - last.step_s)
        self._sequences(*replica_key).observe(report.batched - last.batched)
        tokens = report.prefill_tokens - last.prefill_tokens + report.decode_tokens - last.decode_tokens
        self._tokens(*replica_key).observe(tokens)
