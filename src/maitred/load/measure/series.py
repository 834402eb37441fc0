"""Time series of a run, in columns, for plots and for other tools."""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from maitred.load.measure.record import RunData, UserOutcome
from maitred.load.measure.times import Floats, RequestTimes
from maitred.load.spec import ObjectivesSpec

MOST_POINTS = 600
"""Most points of a series: more are not visible on a page."""


class TimeSeries(msgspec.Struct, frozen=True, kw_only=True):
    """Lists with one value per step; step ``i`` is the time from ``i * step_s`` to ``(i + 1) * step_s``.

    Attributes:
        step_s: Length of a step: one second, or longer so that there are at most `MOST_POINTS` steps.
        due, sent: Number of requests that were due, and number that were first written to the socket.
        ended: Outcome -> number of requests that ended so; only outcomes that occur.
        open: Requests that were due and had not ended at the end of the step.
        output_tokens_per_s: Tokens that arrived, per second.
        ttft_p50_s, ttft_p95_s: Time to first token of the requests that were *due* in the step. None: there were none.
        itl_p50_s, itl_p99_s: Time between pieces for the pieces that *arrived* in the step. None: there were none.
        goodput_per_s: Requests that ended in the step and met all objectives, per second.
        cpu_share, lag_s: Highest values of the tester in the step. None: there was no sample.
    """

    step_s: float
    due: list[int]
    sent: list[int]
    ended: dict[str, list[int]]
    open: list[int]
    output_tokens_per_s: list[float]
    ttft_p50_s: list[float | None]
    ttft_p95_s: list[float | None]
    itl_p50_s: list[float | None]
    itl_p99_s: list[float | None]
    goodput_per_s: list[float]
    cpu_share: list[float | None]
    lag_s: list[float | None]


def series(times: RequestTimes, data: RunData, objectives: ObjectivesSpec) -> TimeSeries:
    """Makes the series of a run step by step; `times` are those of its requests."""
    step_s = float(max(1, math.ceil(data.seconds / MOST_POINTS)))
    steps = max(1, math.ceil(data.seconds / step_s))

    def step(at_s: Floats) -> NDArray[np.int64]:
        # Events at the very end, or just after it, belong to the last step.
        return np.minimum((at_s / step_s).astype(np.int64), steps - 1)

    def count(at_s: Floats, weights: Floats | None = None) -> Floats:
        known = ~np.isnan(at_s)
        weights = np.ones(len(at_s)) if weights is None else weights
        return np.bincount(step(at_s[known]), weights=weights[known], minlength=steps).astype(np.float64)

    def quantile(share: float, at_s: Floats, values: Floats) -> list[float | None]:
        return quantile_by_step(share, step(at_s), values, steps)

    requests = times.requests
    due, ended = count(times.intended_s), count(times.ended_s)
    by_outcome = {
        outcome.value: times.ended_s[np.array([it is outcome for it in requests.outcome], dtype=np.bool_)]
        for outcome in UserOutcome
        if outcome in requests.outcome
    }
    first = np.flatnonzero(~np.isnan(times.ttft_s))
    sampled_s = np.array([sample.at_s for sample in data.samples])
    # A sample describes the interval before it.
    sampled_s = np.maximum(sampled_s - 1e-9, 0)
    return TimeSeries(
        step_s=step_s,
        due=_integers(due),
        sent=_integers(count(requests.array("sent_s"))),
        ended={outcome: _integers(count(at_s)) for outcome, at_s in by_outcome.items()},
        open=_integers(np.cumsum(due) - np.cumsum(ended)),
        output_tokens_per_s=_rates(count(times.delivered.at_s, times.delivered.tokens), step_s),
        ttft_p50_s=quantile(0.5, times.intended_s[first], times.ttft_s[first]),
        ttft_p95_s=quantile(0.95, times.intended_s[first], times.ttft_s[first]),
        itl_p50_s=quantile(0.5, times.itl_arrival_s, times.itl_s),
        itl_p99_s=quantile(0.99, times.itl_arrival_s, times.itl_s),
        goodput_per_s=_rates(count(times.ended_s[times.met_flags(objectives)]), step_s),
        cpu_share=quantile(1, sampled_s, np.array([sample.cpu_share for sample in data.samples])),
        lag_s=quantile(1, sampled_s, np.array([sample.lag_s for sample in data.samples])),
    )


def quantile_by_step(share: float, step: NDArray[np.int64], values: Floats, steps: int) -> list[float | None]:
    """Returns a quantile of the values of each step; None: the step has no values."""
    order = np.argsort(step, kind="stable")
    ends = np.cumsum(np.bincount(step, minlength=steps))
    groups = np.split(values[order], ends[:-1])
    return [round(float(np.quantile(group, share)), 6) if len(group) else None for group in groups]


def _integers(counts: NDArray[np.float64]) -> list[int]:
    return [int(count) for count in counts]


def _rates(amounts: NDArray[np.float64], step_s: float) -> list[float]:
    return [round(float(amount) / step_s, 3) for amount in amounts]
