"""Summary of a run in a few figures, overall and per tenant."""

from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np

from maitred.load.measure.record import UserOutcome
from maitred.load.measure.times import Flags, Floats, RequestTimes
from maitred.load.spec import ObjectivesSpec, StopCondition


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of times in seconds, linearly interpolated; all are None when `count` is 0."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Floats) -> "Quantiles":
        """Returns the quantiles of the values that are not NaN."""
        values = values[~np.isnan(values)]
        if not len(values):
            return cls(count=0)
        p50, p90, p95, p99, most = (round(float(v), 7) for v in np.quantile(values, (0.5, 0.9, 0.95, 0.99, 1)))
        mean = round(float(values.mean()), 7)
        return cls(count=len(values), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=most)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run or of one tenant.

    Counts and latencies cover the *counted* requests: those that were due after the warm-up. Rates cover the *window*
    (see `rate_window`): everything that happened in it per second, for all requests.

    Attributes:
        requests: Counted requests.
        outcomes: Outcome -> number of requests; only outcomes that occur.
        seconds: Length of the window.
        requests_per_s: Requests that became complete in the window, per second.
        output_tokens, prompt_tokens, cached_tokens: Tokens of the counted requests.
        output_tokens_per_s: Tokens that arrived in the window, per second.
        prompt_tokens_per_s: Tokens of the prompts whose answers began in the window, per second.
        ttft, itl, tpot, e2e: Times in seconds, as `RequestTimes` defines them.
        goodput_per_s: Requests that became complete in the window and met all objectives, per second.
        attainment: Share of the counted requests that are complete and met all objectives. Requests that their users
            cancelled are excluded from both counts. None: there are no other requests.
    """

    requests: int
    outcomes: dict[str, int]
    seconds: float
    requests_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    prompt_tokens: int
    prompt_tokens_per_s: float
    cached_tokens: int
    ttft: Quantiles
    itl: Quantiles
    tpot: Quantiles
    e2e: Quantiles
    goodput_per_s: float
    attainment: float | None


class MeasuringWindow(NamedTuple):
    """Window of a run that rates are computed from, in seconds since the start of the run."""

    from_s: float
    until_s: float

    @property
    def seconds(self) -> float:
        """Length of the window in seconds."""
        return self.until_s - self.from_s

    def holds(self, at_s: Floats) -> Flags:
        """Returns which of the times lie in the window; NaN does not."""
        return (at_s >= self.from_s) & (at_s <= self.until_s)


def rate_window(times: RequestTimes, bounds: StopCondition, *, has_trace: bool, seconds: float) -> MeasuringWindow:
    """Returns the window: from the end of the warm-up to the end of the load, not to the last answer.

    When no more requests come, the last ones run on a server that becomes emptier and emptier. If this tail counted as
    time, every throughput would be too low, most of all in short runs. So the window ends with the load: at
    `duration_s` if that ended the run, else when the last request was due. If this is less than half of the time from
    the warm-up to the last answer, no part of the run is steady, and the window goes to the last answer. An example is
    a burst of requests that are all due at once.

    Args:
        times: Times of all requests.
        bounds: Stop condition of the run.
        has_trace: Whether the workload may have ended by itself.
        seconds: Length of the run, to the last answer.
    """
    from_s = min(bounds.warmup_s, seconds)
    reached_requests = bounds.requests is not None and len(times.intended_s) >= bounds.requests
    duration_s = bounds.duration_s if bounds.duration_s is not None or bounds.requests is not None else 60.0
    if duration_s is not None and not reached_requests and not has_trace:
        return MeasuringWindow(from_s, max(min(duration_s, seconds), from_s))
    last_due_s = float(times.intended_s.max(initial=from_s))
    if last_due_s - from_s < (seconds - from_s) / 2:
        return MeasuringWindow(from_s, seconds)
    return MeasuringWindow(from_s, last_due_s)


def summarise(
    times: RequestTimes,
    window: MeasuringWindow,
    objectives: ObjectivesSpec,
    *,
    warmup_s: float,
    tenant: str | None = None,
) -> Summary:
    """Summarises all requests, or those of one tenant."""
    requests = times.requests
    chosen = np.ones(len(requests), dtype=np.bool_)
    if tenant is not None:
        chosen = np.array([name == tenant for name in requests.tenant], dtype=np.bool_)
    counted = chosen & (times.intended_s >= warmup_s)
    ended_inside = chosen & times.complete & window.holds(times.ended_s)
    began_inside = chosen & window.holds(times.begun_s)
    delivered = times.delivered
    arrived_inside = chosen[delivered.request] & window.holds(delivered.at_s)
    met = times.met_flags(objectives)
    judged = counted & ~times.cancelled
    prompt_tokens = requests.array("prompt_tokens")
    outcomes = Counter(outcome for outcome, it in zip(requests.outcome, counted, strict=True) if it)

    def per_s(amount: float) -> float:
        return round(float(amount) / window.seconds, 6) if window.seconds > 0 else 0.0

    return Summary(
        requests=int(counted.sum()),
        outcomes={outcome.value: outcomes[outcome] for outcome in UserOutcome if outcomes[outcome]},
        seconds=round(window.seconds, 6),
        requests_per_s=per_s(ended_inside.sum()),
        output_tokens=int(times.tokens[counted].sum()),
        output_tokens_per_s=per_s(delivered.tokens[arrived_inside].sum()),
        prompt_tokens=int(prompt_tokens[counted].sum()),
        prompt_tokens_per_s=per_s(prompt_tokens[began_inside].sum()),
        cached_tokens=int(requests.array("cached_tokens")[counted].sum()),
        ttft=Quantiles.of(times.ttft_s[counted]),
        itl=Quantiles.of(times.itl_s[counted[times.itl_request]]),
        tpot=Quantiles.of(times.tpot_s[counted]),
        e2e=Quantiles.of(times.e2e_s[counted]),
        goodput_per_s=per_s((met & ended_inside).sum()),
        attainment=round(float(met[judged].mean()), 6) if judged.any() else None,
    )
