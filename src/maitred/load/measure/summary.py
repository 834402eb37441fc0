"""A run in a few figures, overall and per tenant."""

from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np

from maitred.load.measure.record import UserOutcome
from maitred.load.measure.times import Flags, Floats, RequestTimes
from maitred.load.spec import ObjectivesSpec, StopCondition


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of times in seconds. Quantiles are interpolated linearly; all None when `count` is 0."""

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
    """The figures of a run or of one tenant.

    Counts and latencies are of the *counted* requests: those that were due after the warm-up. Rates are of the
    *window* (see `rate_window`): what happened in it per second, whichever request it belongs to.

    Attributes:
        requests: Counted requests.
        outcomes: How they ended; outcomes that none had are left out.
        seconds: Length of the window.
        requests_per_s: Requests that came to be complete in the window.
        output_tokens, prompt_tokens, cached_tokens: Of the counted requests.
        output_tokens_per_s: Tokens that arrived in the window.
        prompt_tokens_per_s: Tokens of the prompts whose answers began in the window.
        ttft, itl, tpot, e2e: As `RequestTimes` defines them, in seconds.
        goodput_per_s: Requests that came to be complete in the window and met all objectives.
        attainment: Share of the counted requests that are complete and met all objectives. Those that their users
            cancelled are left out on both sides. None: there were no others.
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
    """The part of a run that rates are taken from, in seconds since its start."""

    from_s: float
    until_s: float

    @property
    def seconds(self) -> float:
        """Length of the window in seconds."""
        return self.until_s - self.from_s

    def holds(self, at_s: Floats) -> Flags:
        """Which of these times lie in it. NaN does not."""
        return (at_s >= self.from_s) & (at_s <= self.until_s)


def rate_window(times: RequestTimes, bounds: StopCondition, *, has_trace: bool, seconds: float) -> MeasuringWindow:
    """From the end of the warm-up to where the load ended: not to the last answer.

    When no more requests come, the last ones are answered by an ever emptier server. To count that tail as time makes
    every throughput lower, and the lower the shorter the run. So the window ends with the load: at `duration_s` where
    that ended the run, else when the last request was due. Only where that leaves less than half of the time from
    warm-up to last answer, as with a burst of requests that are all due at once, nothing of the run is steady, and the
    window goes to the last answer.

    Args:
        times: Of all requests.
        bounds: Of the run.
        has_trace: Whether the workload can have ended by itself.
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
    """The figures of all requests, or of one tenant's."""
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
