"""Metrics by which two runs are compared, computed on resampled requests."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maitred.load.analysis.statistics import BinnedGaps, SortedValues, Weights, block_length
from maitred.load.measure.record import UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.measure.times import Flags, Floats

LEAST_BEYOND = 10
"""Least number of requests beyond a quantile: fewer do not show where the quantile is."""

CAUTION = 2
"""Factor on the block length."""


@dataclass(frozen=True)
class Metric:
    """One row of a comparison.

    Attributes:
        name, label, unit: See `maitred.load.analysis.comparison.ComparisonRow`.
        lower_is_better: Whether a lower value is better.
        scale: Whether a change is a ratio or, for shares, a difference.
        needs: Least number of requests that must have the value.
        margin: Factor on the requested margin; it is below 1 for failures, because 3 % more failed requests are a real
            change.
    """

    name: str
    label: str
    unit: Literal["s", "1/s", "share"]
    lower_is_better: bool
    scale: Literal["ratio", "difference"] = "ratio"
    needs: int = 0
    margin: float = 1.0


def _time(kind: str, label: str, rank: int) -> Metric:
    needs = 0 if kind == "itl" else round(LEAST_BEYOND / (1 - rank / 100))
    return Metric(f"{kind}_p{rank}", f"{label} p{rank}", "s", True, needs=needs)


METRICS = (
    _time("ttft", "TTFT", 50),
    _time("ttft", "TTFT", 95),
    _time("ttft", "TTFT", 99),
    Metric("ttft_mean", "TTFT mean", "s", True),
    _time("itl", "ITL", 50),
    _time("itl", "ITL", 95),
    _time("itl", "ITL", 99),
    _time("tpot", "TPOT", 50),
    _time("e2e", "E2E", 50),
    _time("e2e", "E2E", 95),
    Metric("output_tokens_per_s", "Output tokens/s", "1/s", False),
    Metric("requests_per_s", "Requests/s", "1/s", False),
    Metric("goodput_per_s", "Goodput/s", "1/s", False),
    Metric(name="attainment", label="Attainment", unit="share", lower_is_better=False, scale="difference"),
    Metric(name="failed", label="Failed", unit="share", lower_is_better=True, scale="difference", margin=1 / 3),
)
"""All metrics, in the order of the table."""

METRIC_ROWS = {metric.name: row for row, metric in enumerate(METRICS)}


class RequestFigures:
    """Figures of the counted requests of a run, in order of time, under any weights.

    Args:
        result: Result of the run.
    """

    def __init__(self, result: LoadResult) -> None:
        times = result.times
        counted = np.flatnonzero(result.counted_flags())
        self._of = counted[np.argsort(times.intended_s[counted], kind="stable")]
        self._result = result
        self.keys: NDArray[np.int64] = np.stack(
            [result.column("session")[self._of], result.column("turn")[self._of]], axis=1
        ).astype(np.int64)
        self.ttft_s = times.ttft_s[self._of]
        self._ttft = SortedValues(self.ttft_s)
        self._tpot = SortedValues(times.tpot_s[self._of])
        self._e2e = SortedValues(times.e2e_s[self._of])
        place = np.full(len(times.intended_s), -1, dtype=np.int64)
        place[self._of] = np.arange(len(self._of))
        of_gap = place[times.itl_request]
        self._gaps = BinnedGaps(times.itl_s[of_gap >= 0], of_gap[of_gap >= 0], len(self._of))
        self.has_objectives = any(
            bound is not None for bound in (result.objectives.ttft_s, result.objectives.tpot_s, result.objectives.e2e_s)
        )

    def __len__(self) -> int:
        return len(self._of)

    def lacks(self, metric: Metric) -> int:
        """Returns how many requests the metric needs if this run has fewer; else 0."""
        have = {"ttft": len(self._ttft), "tpot": len(self._tpot), "e2e": len(self._e2e)}
        return metric.needs if have.get(metric.name.split("_")[0], len(self)) < metric.needs else 0

    @cached_property
    def block(self) -> int:
        """Number of neighbours to draw together: twice the most that any of the times needs.

        The block length with the least error of the variance gives a variance that is too low on average. An interval
        that is too narrow is worse than an interval of uncertain width; the degrees of freedom include that
        uncertainty.
        """
        lengths = [1]
        for values in (self.ttft_s, self._result.times.e2e_s[self._of], self._result.times.tpot_s[self._of]):
            known = values[~np.isnan(values) & (values > 0)]
            if len(known):
                lengths.append(block_length(np.log(known)))
        return max(1, min(CAUTION * max(lengths), len(self) // 6))

    def under(self, weights: Weights) -> Floats:
        """Computes every metric for each row of weights, in `METRICS` order; shape ``(metrics, rows)``."""
        drawn = weights.astype(np.float64)
        span_s = drawn @ self._spacing_s
        met, judged = drawn @ self._met, drawn @ self._judged
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = [met / judged, drawn @ self._failed / drawn.sum(axis=1)]
            rates = [drawn @ amount / span_s for amount in (self._tokens, self._complete, self._met)]
        if not self.has_objectives:
            rates[2] = shares[0] = np.full(len(drawn), np.nan)
        return np.stack(
            [
                *self._ttft.quantiles(weights, (0.5, 0.95, 0.99)),
                self._ttft.mean(weights),
                *self._gaps.quantiles(weights, (0.5, 0.95, 0.99)),
                *self._tpot.quantiles(weights, (0.5,)),
                *self._e2e.quantiles(weights, (0.5, 0.95)),
                *rates,
                *shares,
            ]
        )

    @cached_property
    def reported(self) -> Floats:
        """Every metric as in the summary of the run, in the order of `METRICS`; NaN: there is none."""
        summary = self._result.summary
        failed = sum(
            count
            for outcome, count in summary.outcomes.items()
            if outcome not in (UserOutcome.COMPLETE, UserOutcome.CANCELLED)
        )
        values = [
            summary.ttft.p50,
            summary.ttft.p95,
            summary.ttft.p99,
            summary.ttft.mean,
            summary.itl.p50,
            summary.itl.p95,
            summary.itl.p99,
            summary.tpot.p50,
            summary.e2e.p50,
            summary.e2e.p95,
            summary.output_tokens_per_s,
            summary.requests_per_s,
            summary.goodput_per_s if self.has_objectives else None,
            summary.attainment if self.has_objectives else None,
            failed / max(summary.requests, 1),
        ]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    @cached_property
    def chance(self) -> Floats:
        """Least standard error of each metric, independent of the resamples.

        * Shares are computed with one more hit and one more miss. If nothing failed, resamples never fail either, and
          would claim that nothing can ever fail.
        * Rates are computed from what chance does at the edges of the window. Resamples of an open loop complete the
          same requests in the same time, but chance decides which of the last requests still end inside the window.
        """
        least = np.zeros(len(METRICS))
        for row, metric in enumerate(METRICS):
            if metric.unit == "share" and not np.isnan(self.reported[row]):
                share = 1 / (len(self) + 2)
                least[row] = np.sqrt(share * (1 - share) / len(self))
        tokens, complete = self._edge_variances
        for row, metric in enumerate(METRICS):
            if metric.unit == "1/s" and self.reported[row] > 0:
                variance = tokens if metric.name.startswith("output_tokens") else complete
                answers = self.reported[METRIC_ROWS["requests_per_s"]] * self._result.window.seconds
                least[row] = np.sqrt(variance) / max(answers, 1.0)
        return least

    @cached_property
    def _edge_variances(self) -> tuple[float, float]:
        """Returns the variance of the answers' tokens that arrive in the window, and of the ends in it.

        Any request could have taken as long as any other. This changes which requests that are open at an edge of the
        window fall into it, and how much of each.
        """
        times, window = self._result.times, self._result.window
        lasted_s = (times.ended_s - times.intended_s)[times.complete]
        if not len(lasted_s):
            return 0.0, 0.0
        lasts_s = np.maximum(np.quantile(lasted_s, np.linspace(0.005, 0.995, 100)), 1e-9)
        tokens = complete = 0.0
        for edge_s in (window.from_s, window.until_s):
            since_s = edge_s - times.intended_s
            since_s = since_s[(since_s > 0) & (since_s < lasts_s[-1])][:, None]
            tokens += float(np.minimum(1.0, since_s / lasts_s).var(axis=1).sum())
            complete += float((lasts_s <= since_s).var(axis=1).sum())
        return tokens, complete

    @cached_property
    def _spacing_s(self) -> Floats:
        """Time from each request to the next: the length of a resample, which its rates are based on.

        If all requests are due at once, the time between their ends is used instead.
        """
        window = self._result.window
        due_s = self._result.times.intended_s[self._of]
        if due_s[-1] - window.from_s < window.seconds / 2:
            ended_s = np.sort(np.nan_to_num(self._result.times.ended_s[self._of], nan=window.until_s))
            return np.diff(ended_s, prepend=window.from_s)
        return np.diff(due_s, prepend=window.from_s)

    @cached_property
    def _complete(self) -> Floats:
        return self._flags(self._result.times.complete)

    @cached_property
    def _met(self) -> Floats:
        return self._flags(self._result.met_flags())

    @cached_property
    def _judged(self) -> Floats:
        return self._flags(~self._result.times.cancelled)

    @cached_property
    def _failed(self) -> Floats:
        return self._flags(~self._result.times.cancelled & ~self._result.times.complete)

    @cached_property
    def _tokens(self) -> Floats:
        tokens: Floats = self._result.times.tokens[self._of].astype(np.float64)
        return tokens

    def _flags(self, flags: Flags) -> Floats:
        floats: Floats = flags[self._of].astype(np.float64)
        return floats
