"""Placement of replicas on agents, and the facts of all agents as those of one backend. Pure functions."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from maitred.fleet.backend import BackendFacts

NO_AGENT = BackendFacts(max_replicas=0, max_starts=1, outlives_gateway=True)
"""Facts while no agent is there."""


class AgentLoad(Struct, frozen=True, kw_only=True):
    """Load of one agent, as far as it decides where the next replica starts."""

    name: str
    facts: BackendFacts
    zone: str = ""
    is_connected: bool = True
    """Whether it takes orders."""
    replicas: int = 0
    """Replicas that it has, in any phase."""
    starting: int = 0
    """Replicas that start."""
    is_failing: bool = False
    """Whether one of them has failed."""

    @property
    def free(self) -> int:
        """Replicas that it can have beyond those."""
        return max(0, self.facts.max_replicas - self.replicas) if self.is_connected else 0

    @property
    def free_starts(self) -> int:
        """Replicas that should start there now beyond those that do."""
        return max(0, min(self.free, self.facts.max_starts - self.starting))


def place(agents: Sequence[AgentLoad]) -> AgentLoad | None:
    """Returns the agent at which the next replica starts; None: there is no free place.

    First come agents whose starts do not fail and that can start one now, then the zone with the fewest replicas, then
    the most free places. The order does not depend on that of the arguments.
    """
    by_zone = Counter[str]()
    for agent in agents:
        by_zone[agent.zone] += agent.replicas
    return min(
        (agent for agent in agents if agent.free),
        key=lambda agent: (agent.is_failing, not agent.free_starts, by_zone[agent.zone], -agent.free, agent.name),
        default=None,
    )


def merge_facts(agents: Sequence[AgentLoad]) -> BackendFacts:
    """Returns the facts of all agents together.

    Places and starts are added up, where an agent that is away has no place beyond its replicas. The engines can sleep
    if those of all agents can. What a start takes is that of the agent where the next one would be; the price is the
    highest.
    """
    connected = [agent for agent in agents if agent.is_connected]
    if not connected:
        return replace(NO_AGENT, max_replicas=sum(agent.replicas for agent in agents))
    following = (place(agents) or connected[0]).facts
    return BackendFacts(
        max_replicas=sum(agent.replicas + agent.free for agent in agents),
        max_starts=sum(agent.starting + agent.free_starts for agent in agents) or 1,
        start_kind=following.start_kind,
        expected_start_s=following.expected_start_s,
        can_sleep=all(agent.facts.can_sleep for agent in connected),
        puts_to_sleep=True,
        outlives_gateway=True,
        usd_per_hour=max(agent.facts.usd_per_hour for agent in connected),
    )
