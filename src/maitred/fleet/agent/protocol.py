"""Protocol between a controller and an agent, which owns engine processes: msgpack frames over a socket.

::

    controller                     agent
      <----------------- AgentState       at once, and again after every change
      StartReplica --------------->
      StopReplica ---------------->
      SetDesired ----------------->

An agent tells its whole state, which is small, so a message that is lost with its connection needs no repair: the next
controller, or the next connection, reads what there is and orders what is missing. Orders are idempotent. The end of
the connection changes nothing at the agent: a dead controller leaves the fleet as it is. Clocks of two machines differ,
so times are ages.
"""

import msgspec

from maitred.fleet.backend import BackendFacts, StartPhase
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.scaling.replica_status import ReplicaPhase
from maitred.scaling.startup_times import StartKind


class AgentReplica(msgspec.Struct, frozen=True, array_like=True):
    """State of one replica of an agent."""

    name: str
    address: str
    """Address at which its engine listens, or will."""
    phase: ReplicaPhase
    age_s: float
    """Seconds since the phase began."""
    start_kind: StartKind
    start_phases: tuple[StartPhase, ...]
    failure: str


class AgentState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Agent: everything that it has."""

    facts: BackendFacts
    replicas: list[AgentReplica]
    desired: DesiredReplicas | None
    """Desired numbers that a controller has had it keep; None: none has."""


class StartReplica(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Controller: the replica is to run."""

    name: str


class StopReplica(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Controller: the replica, which runs no request any more, is to end."""

    name: str


class SetDesired(msgspec.Struct, frozen=True, array_like=True, tag="desired"):
    """Controller: the next controller is to desire these numbers of replicas."""

    desired: DesiredReplicas


ToAgent = StartReplica | StopReplica | SetDesired
ToController = AgentState
