"""Metrics of the agents that own engines on other machines, read at each scrape."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LABELS = ["agent", "region", "zone"]


class AgentState(Protocol):
    """State of one agent at the moment of a scrape."""

    @property
    def agent(self) -> str:
        """Name of the agent."""
        ...

    @property
    def region(self) -> str:
        """Region of the machine; empty: it tells none."""
        ...

    @property
    def zone(self) -> str:
        """Zone of the machine; empty: it tells none."""
        ...

    @property
    def connected(self) -> bool:
        """Whether it is connected."""
        ...

    @property
    def gpus(self) -> int:
        """GPUs that its engines can use."""
        ...

    @property
    def replicas(self) -> int:
        """Engines that it has."""
        ...

    @property
    def max_replicas(self) -> int:
        """Most engines that it can have."""
        ...

    @property
    def pending_orders(self) -> int:
        """Orders that it has not carried out."""
        ...


_GAUGES: tuple[tuple[str, str, Callable[[AgentState], float]], ...] = (
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

    def __init__(self, states: Callable[[], Sequence[AgentState]]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Collects the state of all agents for Prometheus."""
        states = self._states()
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for state in states:
                gauge.add_metric([state.agent, state.region, state.zone], float(read(state)))
            yield gauge
