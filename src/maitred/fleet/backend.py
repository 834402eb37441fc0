"""Interface of a replica backend: it starts and stops the engines of one model on some kind of machines.

A backend carries out orders and tells what is there; it decides nothing. `ReplicaPool` compares what is there with what
is desired and gives the orders. An order returns at once: the machine may be far away, and a start takes seconds or
minutes. Its result shows in `replicas`, and listeners hear of each change. Orders are idempotent, so the pool may
repeat them.

A start that fails is tried again by the backend, with back-off, until the replica is stopped; a replica that dies is
started again under its name. Both show as `ReplicaPhase.FAILED` with the reason until they are over.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import msgspec

from maitred.fleet.local import LocalEngine
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.process import process_memory_bytes
from maitred.fleet.remote import RemoteEngine
from maitred.scaling.replica_status import ReplicaPhase
from maitred.scaling.startup_times import StartKind

ManagedEngine = LocalEngine | RemoteEngine
"""Engine whose connection is kept by its owner."""


def engines_memory_bytes(engines: Iterable[ManagedEngine]) -> int | None:
    """Measures the memory of the processes of engines together; returns None if none is kept on this machine."""
    local = [engine for engine in engines if isinstance(engine, LocalEngine)]
    return sum(map(process_memory_bytes, engine_pids(local))) if local else None


def engine_pids(engines: Iterable[ManagedEngine]) -> list[int]:
    """Returns the ids of the processes of engines that run on this machine. Call it in the event loop."""
    return [engine.pid for engine in engines if isinstance(engine, LocalEngine) and engine.pid is not None]


class BackendFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a backend that decisions need."""

    max_replicas: int
    """Most replicas that it can run at a time, in any phase."""
    max_starts: int = 1
    """Most replicas that should start at a time: starts on one machine slow each other down."""
    start_kind: StartKind = StartKind.COLD
    """Kind of the next start of a new replica."""
    expected_start_s: float = 10.0
    """Expected seconds of such a start before one has been measured."""
    can_scale: bool = True
    """Whether replicas can be started and stopped; False: they are as many as somebody else has set."""
    can_sleep: bool = False
    """Whether its engines can be put to sleep."""
    puts_to_sleep: bool = False
    """Whether it puts engines to sleep and wakes them itself, as `keep_asleep` says, since others use them, too."""
    outlives_gateway: bool = False
    """Whether its replicas stay when the gateway ends."""
    is_shared: bool = False
    """Whether other gateways may start and stop its replicas, too; one that ends gives their answers first."""
    gpus_per_replica: float = 0.0
    """GPUs of one replica; 0: the backend does not know."""
    follows: bool = False
    """Whether another gateway gives the orders now, so that this one only takes over what there is."""
    usd_per_hour: float = 0.0
    """Price of one replica."""


class StartPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Measured part of a complete start."""

    name: str
    """Name of the part, such as `process` or `model`."""
    seconds: float


class BackendReplica(msgspec.Struct, frozen=True, kw_only=True):
    """State of one replica of a backend. A change makes a new object."""

    name: str
    ordered_as: str = ""
    """Name under which its start was ordered here, if its own was not known then; empty: it is the same."""
    phase: ReplicaPhase
    """`STARTING`, `SERVING` (its engine is connected, awake or asleep), `DRAINING` (it is stopped now) or `FAILED`."""
    since_s: float
    """Time at which the phase began, on the monotonic clock."""
    engine: ManagedEngine | None = None
    """Engine with its connection, which the backend owns; None: its address is not known yet."""
    start_kind: StartKind = StartKind.COLD
    """Kind of its current or last start."""
    start_phases: tuple[StartPhase, ...] = ()
    """Measured parts of its last complete start; together they are the whole."""
    failure: str = ""
    """Reason why it does not run; empty while it does."""
    region: str | None = None
    """Region where it is started; None: its engine tells it, or nobody does."""
    serves_others: bool = False
    """Whether it may have requests of other gateways now, even if this one is not connected to its engine."""
    is_leaving: bool = False
    """Whether a gateway has said that it is to go, so that none sends it new requests."""
    is_reserved: bool = False
    """Whether a gateway has said that it sleeps beside those that serve, so that none wakes it for a request."""


class ReplicaBackend(Protocol):
    """Backend that runs the replicas of one model."""

    @property
    def facts(self) -> BackendFacts:
        """Facts about the backend, as they are now."""
        ...

    @property
    def desired(self) -> DesiredReplicas | None:
        """Desired numbers that were kept before the backend was opened; None: none were, or it keeps none."""
        ...

    def replicas(self) -> Mapping[str, BackendReplica]:
        """Returns the replicas that exist, by name; also those that the backend had before it was opened."""
        ...

    def name_of(self, number: int) -> str:
        """Returns the name for a new replica; if that of number 0 exists already, the next number has another."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of `replicas` or `facts`."""
        ...

    def keep_desired(self, desired: DesiredReplicas) -> None:
        """Keeps the desired numbers for who opens the backend next, if something of it outlives this process."""
        ...

    def keep_leaving(self, names: Collection[str]) -> None:
        """Has other gateways send nothing new to these replicas, which are to go; to all others they may again."""
        ...

    def keep_asleep(self, names: Collection[str]) -> None:
        """Has these replicas sleep, and no others, if the backend puts them to sleep itself."""
        ...

    def start(self, name: str) -> None:
        """Orders the start of a replica. Nothing happens if it exists, even if it is being stopped."""
        ...

    def stop(self, name: str) -> None:
        """Orders the end of a replica, which runs no request any more. Nothing happens if there is none."""
        ...

    async def wait_started(self) -> None:
        """Waits until one replica has been ready.

        Raises:
            ReplicaUnavailable: No replica can start; the message gives the reason.
        """
        ...

    async def __aenter__(self) -> Self:
        """Opens the backend: `replicas` has those that exist already."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes all connections, and stops the replicas unless `facts.outlives_gateway`."""
        ...


@runtime_checkable
class LeasedBackend(ReplicaBackend, Protocol):
    """Backend to which the gateway that holds the lease of the pool alone gives orders."""

    epoch: Callable[[], int | None]
    """Returns the epoch of the lease that this gateway holds; None: it holds none, and only follows."""

    @property
    def latest_epoch(self) -> int:
        """Latest epoch in which an order was given, as far as it is known."""
        ...

    def check_lease(self) -> None:
        """Follows the lease; to be called when it has been taken, renewed or lost."""
        ...
