"""Metrics of dispatch: waiting requests and their causes, free credits of replicas, and errors of predictions.

The state is read at each scrape.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class QueueTimes(Protocol):
    """Histogram of waiting times in seconds.

    A Protocol, because `observe` does not import `dispatch`.
    """

    @property
    def counts(self) -> Sequence[int]:
        """Counts for each bound, and one more for longer times; not cumulative."""
        ...

    @property
    def sum_s(self) -> float:
        """Sum of all times."""
        ...


class CreditState(Protocol):
    """Credits of one replica for one resource."""

    @property
    def free(self) -> int:
        """Credits that can be given out now; below zero when the engine needs more than was predicted."""
        ...

    @property
    def total(self) -> int:
        """Total credits of the replica."""
        ...


class DispatchState(Protocol):
    """State of one model's dispatch queue at the moment of a scrape; classes are given by their names.

    A Protocol, because `observe` does not import `dispatch`.
    """

    @property
    def waiting(self) -> Mapping[str, int]:
        """Class -> requests that wait."""
        ...

    @property
    def predicted_wait_s(self) -> Mapping[str, float]:
        """Class -> predicted wait of a tenant that has no requests here."""
        ...

    @property
    def queue_bounds_s(self) -> Sequence[float]:
        """Upper bounds of the buckets of `queue_s`."""
        ...

    @property
    def queue_s(self) -> Mapping[tuple[str, str], QueueTimes]:
        """Class and cause -> how long dispatched requests had waited for it."""
        ...

    @property
    def running(self) -> int:
        """Requests that were dispatched and have not left."""
        ...

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens and predicted output tokens of running requests."""
        ...

    @property
    def credits(self) -> Mapping[tuple[str, str], CreditState]:
        """Replica and resource -> its credits."""
        ...

    @property
    def trust(self) -> Mapping[str, float]:
        """Replica -> weight of its last load report, from 0 to 1; without replicas that never report."""
        ...

    @property
    def refusals(self) -> Mapping[str, int]:
        """Reason -> requests that were rejected."""
        ...

    @property
    def left_waiting(self) -> int:
        """Requests that were cancelled while they waited."""
        ...

    @property
    def moved(self) -> int:
        """Requests that were sent to another model while they waited."""
        ...

    @property
    def region(self) -> str:
        """Region of the gateway; empty: it has no name."""
        ...

    @property
    def spills(self) -> Mapping[tuple[str, str], int]:
        """Region and reason -> requests that ran in another region than the gateway's."""
        ...

    @property
    def round_trip_s(self) -> Mapping[str, float]:
        """Replica -> its measured round-trip time."""
        ...

    @property
    def wasted_tokens(self) -> int:
        """Output of requests that did not come to their end."""
        ...

    @property
    def service_per_s(self) -> float:
        """Service rate of all replicas together when they are full; 0 while it is not known."""
        ...

    @property
    def predictions(self) -> int:
        """Number of predicted times to first token whose token came."""
        ...

    @property
    def ttft_ratio(self) -> Mapping[str, float]:
        """Quantile -> predicted over actual time to first token."""
        ...

    @property
    def ttft_error(self) -> Mapping[str, float]:
        """Quantile -> relative error of the predicted time to first token."""
        ...


_GAUGES: Mapping[str, tuple[str, Callable[[DispatchState], float]]] = {
    "maitred_dispatch_running": ("Requests at replicas.", lambda state: state.running),
    "maitred_dispatch_outstanding_tokens": (
        "Their prompts and predicted answers.",
        lambda state: state.outstanding_tokens,
    ),
    "maitred_dispatch_service_per_second": (
        "What the replicas do together when they are full.",
        lambda state: state.service_per_s,
    ),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[DispatchState], float]]] = {
    "maitred_dispatch_moved": (
        "Requests that were sent to another model while they waited.",
        lambda state: state.moved,
    ),
    "maitred_dispatch_left_waiting": (
        "Requests whose callers left while they waited.",
        lambda state: state.left_waiting,
    ),
    "maitred_dispatch_wasted_tokens": (
        "Output tokens of requests that did not come to their end.",
        lambda state: state.wasted_tokens,
    ),
    "maitred_dispatch_predictions": (
        "Times to first token that were predicted and came.",
        lambda state: state.predictions,
    ),
}
_BY_CLASS: Mapping[str, tuple[str, Callable[[DispatchState], Mapping[str, float]]]] = {
    "maitred_dispatch_waiting": ("Requests that wait.", lambda state: state.waiting),
    "maitred_dispatch_predicted_wait_seconds": (
        "How long a newcomer would wait.",
        lambda state: state.predicted_wait_s,
    ),
}
_BY_QUANTILE: Mapping[str, tuple[str, Callable[[DispatchState], Mapping[str, float]]]] = {
    "maitred_dispatch_ttft_ratio": (
        "Predicted time to first token over what came, of the last ones.",
        lambda state: state.ttft_ratio,
    ),
    "maitred_dispatch_ttft_error": (
        "Relative error of the predicted time to first token, of the last ones.",
        lambda state: state.ttft_error,
    ),
}

_BY_REPLICA: Mapping[str, tuple[str, Callable[[DispatchState], Mapping[str, float]]]] = {
    "maitred_dispatch_report_trust": (
        "How much the last word of a replica on its load counts: 1 while it is fresh.",
        lambda state: state.trust,
    ),
    "maitred_dispatch_round_trip_seconds": (
        "The shortest of the last measured round trips to an engine.",
        lambda state: state.round_trip_s,
    ),
}


class DispatchMetrics(Collector):
    """Metrics of all dispatch queues.

    Args:
        states: Returns the state of each queue by its model's name.
    """

    def __init__(self, states: Callable[[], Mapping[str, DispatchState]]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Collects the state of all queues for Prometheus."""
        states = self._states()
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for model, state in states.items():
                gauge.add_metric([model], read(state))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model"])
            for model, state in states.items():
                counter.add_metric([model], read(state))
            yield counter
        for label, families in (("class", _BY_CLASS), ("quantile", _BY_QUANTILE), ("replica", _BY_REPLICA)):
            for name, (text, values) in families.items():
                gauge = GaugeMetricFamily(name, text, labels=["model", label])
                for model, state in states.items():
                    for value_of, value in values(state).items():
                        gauge.add_metric([model, value_of], value)
                yield gauge
        yield _refusals(states)
        yield _spills(states)
        yield _credits(states)
        yield _queue_times(states)


def _refusals(states: Mapping[str, DispatchState]) -> Metric:
    refusals = CounterMetricFamily(
        "maitred_dispatch_refusals",
        "Requests that were refused, before or while they waited.",
        labels=["model", "reason"],
    )
    for model, state in states.items():
        for reason, count in state.refusals.items():
            refusals.add_metric([model, reason], count)
    return refusals


def _spills(states: Mapping[str, DispatchState]) -> Metric:
    spills = CounterMetricFamily(
        "maitred_dispatch_spills",
        "Requests that ran in another region than the gateway's, and why.",
        labels=["model", "from", "to", "reason"],
    )
    for model, state in states.items():
        for (region, reason), count in state.spills.items():
            spills.add_metric([model, state.region, region, reason], count)
    return spills


def _credits(states: Mapping[str, DispatchState]) -> Metric:
    left = GaugeMetricFamily(
        "maitred_dispatch_credits",
        "What replicas can be given, and what they have in all.",
        labels=["model", "replica", "resource", "state"],
    )
    for model, state in states.items():
        for (replica, resource), credit in state.credits.items():
            left.add_metric([model, replica, resource, "free"], credit.free)
            left.add_metric([model, replica, resource, "total"], credit.total)
    return left


def _queue_times(states: Mapping[str, DispatchState]) -> Metric:
    times = HistogramMetricFamily(
        "maitred_dispatch_queue_seconds",
        "How long requests waited before they were released, by cause.",
        labels=["model", "class", "cause"],
    )
    for model, state in states.items():
        bounds = [*map(str, state.queue_bounds_s), "+Inf"]
        for (priority, cause), waited in state.queue_s.items():
            total = 0
            buckets = []
            for bound, count in zip(bounds, waited.counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            times.add_metric([model, priority, cause], buckets, waited.sum_s)
    return times
