"""Protocol between a controller and an agent, which owns engine processes: msgpack frames over a socket.

::

    controller                     agent
      ControllerHello ------------>
      <----------------- AgentHello       at once
      <----------------- AgentState       at once, and again after every change
      StartReplica --------------->
      StopReplica ---------------->
      SetDesired ----------------->
      <--------------- OrderRefused       the order was of an older epoch
      AgentRejection ------------->       the agent may not take part; the connection ends

An agent tells its whole state, which is small, so a message that is lost with its connection needs no repair: the next
controller, or the next connection, reads what there is and orders what is missing. Orders are idempotent. The end of
the connection changes nothing at the agent: a dead controller leaves the fleet as it is. Clocks of two machines differ,
so times are ages.

Orders carry the epoch of the lease under which they are given. An agent remembers the highest one, and refuses orders
of older ones: a controller that has lost its lease without noticing it changes nothing.

The first two messages stay as they are in every version; later versions may append fields.
"""

import msgspec

from maitred.fleet.backend import BackendFacts, StartPhase
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.scaling.replica_status import ReplicaPhase
from maitred.scaling.startup_times import StartKind

AGENT_PROTOCOL = 1


class ControllerHello(msgspec.Struct, frozen=True, array_like=True, tag="controller"):
    """Controller: its version of the protocol."""

    protocol: int = AGENT_PROTOCOL


class AgentHello(msgspec.Struct, frozen=True, array_like=True, tag="agent"):
    """Agent: who and where it is."""

    protocol: int = AGENT_PROTOCOL
    name: str = ""
    """Name that it keeps over restarts; its replicas bear it."""
    instance: str = ""
    """Differs with every start of an agent."""
    region: str = ""
    zone: str = ""
    """Part of the region that fails as a whole."""
    gpus: int = 0
    """GPUs that its engines can use."""


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
    is_leaving: bool = False
    """Whether a controller has said that it is to go: no gateway sends it new requests."""
    is_reserved: bool = False
    """Whether a controller has said that it sleeps: no gateway wakes it for a request."""


class AgentState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Agent: everything that it has."""

    facts: BackendFacts
    replicas: list[AgentReplica]
    desired: DesiredReplicas | None
    """Desired numbers that a controller has had it keep; None: none has."""
    epoch: int = 0
    """Highest epoch of an order so far."""
    number: int = 0
    """Number of this state; of two connections, one may bring an older state later."""


class OrderRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Agent: an order was refused, because it was of an older epoch."""

    epoch: int
    """Highest epoch of an order so far."""


class StartReplica(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Controller: the replica is to run."""

    name: str
    epoch: int = 0


class StopReplica(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Controller: the replica, which runs no request any more, is to end."""

    name: str
    epoch: int = 0


class SetDesired(msgspec.Struct, frozen=True, array_like=True, tag="desired"):
    """Controller: what all controllers are to know: how many replicas are desired, and which ones leave or sleep."""

    desired: DesiredReplicas | None
    """None: those of before; only the epoch is told."""
    epoch: int = 0
    leaving: tuple[str, ...] | None = None
    """All replicas of the agent that are to go as soon as no gateway has requests there; None: those of before."""
    asleep: tuple[str, ...] | None = None
    """All replicas of the agent that are to sleep; None: those of before."""


class AgentRejection(msgspec.Struct, frozen=True, array_like=True, tag="rejection"):
    """Controller: the agent may not take part."""

    reason: str


Order = StartReplica | StopReplica | SetDesired
ToAgent = ControllerHello | Order | AgentRejection
ToController = AgentHello | AgentState | OrderRefused


def version_fault(protocol: int) -> str:
    """Returns why the two ends cannot work together; empty: they can."""
    if protocol == AGENT_PROTOCOL:
        return ""
    return (
        f"The agent and the gateway speak different protocols: the other end {protocol}, this one {AGENT_PROTOCOL}. "
        "Run the same version of maitred on both machines."
    )
