"""Backend whose engines belong to an agent, another process: it gives the agent orders and connects to its engines.

The agent may be away for a while. Its engines serve meanwhile, and orders are given again when it is back.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from maitred.core.backoff import BackoffCeiling
from maitred.core.clock import Clock
from maitred.fleet.agent.connection import MessageConnection
from maitred.fleet.agent.protocol import (
    AgentReplica,
    AgentState,
    SetDesired,
    StartReplica,
    StopReplica,
    ToController,
)
from maitred.fleet.backend import BackendFacts, BackendReplica
from maitred.fleet.local_backend import LocalBackend
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.remote import RemoteEngine
from maitred.scaling.replica_status import ReplicaPhase

_RECONNECT_BACKOFF = BackoffCeiling(first_s=0.02, most_s=1.0)


class AgentBackend:
    """Backend at an agent. Implements `ReplicaBackend`.

    Args:
        path: Unix socket at which the agent takes orders.
        make_engine: Makes the connection to the engine at an address.
        facts: The facts until the agent has told its own.
        name_of: Returns the name of the replica of a number.
        clock: The clock.
    """

    def __init__(
        self,
        path: Path,
        make_engine: Callable[[str], RemoteEngine],
        facts: BackendFacts,
        name_of: Callable[[int], str],
        clock: Clock,
    ) -> None:
        self._path = path
        self._name_of = name_of
        self._clock = clock
        self._state = AgentState(facts, [], desired=None)
        self._kept: DesiredReplicas | None = None
        """Desired numbers of this process, which an agent that has been away is told again."""
        self._addresses: dict[str, str] = {}
        self._replicas: dict[str, BackendReplica] = {}
        self._starting: set[str] = set()
        """Replicas whose start was ordered, until the agent has them..."""
        self._stopping: set[str] = set()
        """...and those whose end was ordered, until it has not."""
        self._connections = LocalBackend(lambda name: make_engine(self._addresses[name]), facts, name_of, clock)
        self._connections.on_change(self._on_connection_change)
        self._listeners: list[Callable[[], None]] = []
        self._connection: MessageConnection[ToController] | None = None
        self._is_known = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._connect_task: asyncio.Task[None] | None = None

    @property
    def facts(self) -> BackendFacts:
        """Facts of the agent. Implements `ReplicaBackend`."""
        return replace(self._state.facts, outlives_gateway=True)

    @property
    def desired(self) -> DesiredReplicas | None:
        """Desired numbers that the agent has been told. Implements `ReplicaBackend`."""
        return self._state.desired

    def replicas(self) -> Mapping[str, BackendReplica]:
        """Returns the replicas of the agent, and those that it is to start. Implements `ReplicaBackend`."""
        return self._replicas

    def name_of(self, number: int) -> str:
        """Returns the name of the replica of this number. Implements `ReplicaBackend`."""
        return self._name_of(number)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change. Implements `ReplicaBackend`."""
        self._listeners.append(listener)

    def keep_desired(self, desired: DesiredReplicas) -> None:
        """Has the agent keep the desired numbers for the next controller. Implements `ReplicaBackend`."""
        self._kept = desired
        self._send(SetDesired(desired))

    def start(self, name: str) -> None:
        """Orders the start of a replica. Implements `ReplicaBackend`."""
        if name not in self._replicas:
            self._starting.add(name)
            self._replicas[name] = BackendReplica(
                name=name,
                phase=ReplicaPhase.STARTING,
                since_s=self._clock.monotonic_s(),
                start_kind=self._state.facts.start_kind,
            )
            self._send(StartReplica(name))
            self._notify()

    def stop(self, name: str) -> None:
        """Orders the end of a replica, and leaves its engine. Implements `ReplicaBackend`."""
        if name in self._replicas and name not in self._stopping:
            self._stopping.add(name)
            self._starting.discard(name)
            self._replicas[name] = replace(
                self._replicas[name], phase=ReplicaPhase.DRAINING, since_s=self._clock.monotonic_s()
            )
            self._connections.stop(name)
            self._send(StopReplica(name))
            self._notify()

    async def wait_started(self) -> None:
        """Waits until this process is connected to one of the engines. Implements `ReplicaBackend`.

        An agent that can start none says so itself, and ends.
        """
        await self._connections.wait_started()

    async def __aenter__(self) -> Self:
        """Waits until the agent has told what it has."""
        await self._connections.__aenter__()
        self._connect_task = asyncio.create_task(self._keep_connected(), name="agent connection")
        await self._is_known.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connections; the agent keeps its engines."""
        assert self._connect_task is not None
        self._connect_task.cancel()
        await asyncio.wait({self._connect_task})
        await self._connections.__aexit__(kind, error, trace)

    # --- the agent ---

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            try:
                _, connection = await loop.create_unix_connection(
                    lambda: MessageConnection(ToController, self._on_state, self._is_lost.set), str(self._path)
                )
            except OSError:
                failures += 1
                await asyncio.sleep(_RECONNECT_BACKOFF.after(failures))
                continue
            failures = 0
            self._is_lost.clear()
            self._connection = connection
            if self._kept is not None:
                self._send(SetDesired(self._kept))
            for name in self._starting:
                self._send(StartReplica(name))
            for name in self._stopping:
                self._send(StopReplica(name))
            try:
                await self._is_lost.wait()
            finally:
                self._connection = None
                connection.close()

    def _send(self, order: StartReplica | StopReplica | SetDesired) -> None:
        if self._connection is not None:
            self._connection.send(order)

    def _on_state(self, state: AgentState) -> None:
        self._state = state
        found = {replica.name: replica for replica in state.replicas}
        self._starting.difference_update(found)
        for name, replica in found.items():
            if name not in self._replicas or self._replicas[name].engine is None:
                self._adopt(replica)
        for name in self._replicas.keys() - found.keys() - self._starting:
            self._connections.stop(name)
        self._update()
        self._is_known.set()

    def _adopt(self, replica: AgentReplica) -> None:
        """Connects to the engine of a replica of the agent."""
        if replica.name in self._stopping or replica.name in self._connections.replicas():
            return
        self._addresses[replica.name] = replica.address
        self._connections.start(replica.name)
        self._replicas[replica.name] = BackendReplica(
            name=replica.name,
            phase=replica.phase,
            since_s=self._clock.monotonic_s() - replica.age_s,
            engine=self._connections.replicas()[replica.name].engine,
            start_kind=replica.start_kind,
        )

    # --- what there is ---

    def _on_connection_change(self) -> None:
        if self._is_known.is_set():
            self._update()

    def _update(self) -> None:
        """Brings the replicas up to date with the agent and with the connections to its engines."""
        found = {replica.name: replica for replica in self._state.replicas}
        connections = self._connections.replicas()
        for name, replica in list(self._replicas.items()):
            if name not in found and name not in connections and name not in self._starting:
                del self._replicas[name]
                self._stopping.discard(name)
            elif name in found and name not in self._stopping:
                self._replicas[name] = self._merge(replica, found[name], connections.get(name))
        self._notify()

    def _merge(self, replica: BackendReplica, told: AgentReplica, connection: BackendReplica | None) -> BackendReplica:
        """Returns the replica as it is now: this process's own connection tells first whether its engine serves."""
        phase, failure = told.phase, told.failure
        if connection is not None and phase is not ReplicaPhase.DRAINING:
            if connection.phase is ReplicaPhase.SERVING:
                phase, failure = ReplicaPhase.SERVING, ""
            elif phase is ReplicaPhase.SERVING:
                phase, failure = connection.phase, connection.failure
        since_s = replica.since_s if phase is replica.phase else self._clock.monotonic_s()
        return replace(
            replica,
            phase=phase,
            since_s=since_s,
            failure=failure,
            start_kind=told.start_kind,
            start_phases=told.start_phases,
        )

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
