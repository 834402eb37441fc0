"""Metrics of the administrative states of replicas, and of the agents that own them, read at each scrape."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.replica import AdminStatus
from maitred.wire.admin.responses import AgentBody


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


_AGENT_GAUGES: tuple[tuple[str, str, Callable[[AgentBody], float]], ...] = (
    ("maitred_agent_up", "1 while the agent is connected.", lambda state: state.connected),
    ("maitred_agent_gpus", "GPUs that its engines can use.", lambda state: state.gpus),
    ("maitred_agent_replicas", "Engines that it has, in any phase.", lambda state: state.replicas),
    ("maitred_agent_places", "Most engines that it can have.", lambda state: state.max_replicas),
    ("maitred_agent_orders_pending", "Orders that it has not carried out.", lambda state: state.pending_orders),
)


class AgentMetrics(Collector):
    """Metrics of all agents.

    Args:
        states: Returns their states, at most a few hundred.
    """

    def __init__(self, states: Callable[[], Sequence[AgentBody]]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Collects the state of all agents for Prometheus."""
        states = self._states()
        for name, text, read in _AGENT_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["agent", "region", "zone"])
            for state in states:
                gauge.add_metric([state.agent, state.region, state.zone], float(read(state)))
            yield gauge
