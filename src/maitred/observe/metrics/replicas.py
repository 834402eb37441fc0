"""Metrics of what an operator has said that replicas are to do. Read at a scrape."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.admin_state import AdminStatus


class ReplicaState(Protocol):
    """One replica at the moment of a scrape."""

    @property
    def model(self) -> str:
        """Which it runs."""
        ...

    @property
    def replica(self) -> str:
        """Its name."""
        ...

    @property
    def state(self) -> AdminStatus:
        """What it is to do."""
        ...

    @property
    def requests(self) -> int:
        """That it was given and has not ended."""
        ...


ReplicaStates = Callable[[], Sequence[ReplicaState]]


class ReplicaMetrics(Collector):
    """Reads all replicas.

    Args:
        states: Their states.
    """

    def __init__(self, states: ReplicaStates) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Prometheus asks."""
        states = self._states()
        duty = GaugeMetricFamily(
            "maitred_replica_duty", "1 for what the replica is to do.", labels=["model", "replica", "state"]
        )
        requests = GaugeMetricFamily(
            "maitred_replica_requests", "Requests that it was given and has not ended.", labels=["model", "replica"]
        )
        for state in states:
            for name in AdminStatus:
                duty.add_metric([state.model, state.replica, name.value], float(state.state is name))
            requests.add_metric([state.model, state.replica], state.requests)
        yield duty
        yield requests
