"""Metrics of the administrative states of replicas, read at each scrape."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.replica import AdminStatus


class ReplicaState(Protocol):
    """State of one replica at the moment of a scrape."""

    @property
    def model(self) -> str:
        """Model that the replica runs."""
        ...

    @property
    def replica(self) -> str:
        """Name of the replica."""
        ...

    @property
    def state(self) -> AdminStatus:
        """Administrative state, which an operator has set."""
        ...

    @property
    def requests(self) -> int:
        """Requests that were sent to the replica and have not ended."""
        ...


ReplicaStates = Callable[[], Sequence[ReplicaState]]


class ReplicaMetrics(Collector):
    """Metrics of all replicas.

    Args:
        states: Returns their states.
    """

    def __init__(self, states: ReplicaStates) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Collects the state of all replicas for Prometheus."""
        states = self._states()
        admin_state = GaugeMetricFamily(
            "maitred_replica_duty", "1 for what the replica is to do.", labels=["model", "replica", "state"]
        )
        requests = GaugeMetricFamily(
            "maitred_replica_requests", "Requests that it was given and has not ended.", labels=["model", "replica"]
        )
        for state in states:
            for status in AdminStatus:
                admin_state.add_metric([state.model, state.replica, status.value], float(state.state is status))
            requests.add_metric([state.model, state.replica], state.requests)
        yield admin_state
        yield requests
