"""Server of an agent: tells controllers what its backend has, and passes their orders on to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from maitred.core.clock import Clock
from maitred.fleet.agent.connection import MessageConnection
from maitred.fleet.agent.protocol import AgentReplica, AgentState, SetDesired, StartReplica, StopReplica, ToAgent
from maitred.fleet.backend import ReplicaBackend
from maitred.fleet.policy.reconciler import DesiredReplicas


class AgentServer:
    """Server of an agent.

    Args:
        backend: Backend that has the engines; its owner opens and closes it.
        clock: The clock of the backend.
    """

    def __init__(self, backend: ReplicaBackend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._desired: DesiredReplicas | None = None
        self._connections: set[MessageConnection[ToAgent]] = set()
        self._is_scheduled = False
        backend.on_change(self._schedule)

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Accepts controllers at a Unix socket for as long as the block lasts."""
        _remove_stale(path)
        server = await asyncio.get_running_loop().create_unix_server(self.accept, str(path))
        try:
            yield
        finally:
            server.close()
            for connection in list(self._connections):
                connection.close()

    def accept(self) -> MessageConnection[ToAgent]:
        """Returns the end of a new connection from a controller."""
        connection: MessageConnection[ToAgent] = MessageConnection(
            ToAgent,
            self._on_order,
            on_end=lambda: self._connections.discard(connection),
            on_open=lambda: self._on_open(connection),
        )
        return connection

    def _on_open(self, connection: MessageConnection[ToAgent]) -> None:
        self._connections.add(connection)
        connection.send(self._state())

    def _on_order(self, order: ToAgent) -> None:
        match order:
            case StartReplica():
                self._backend.start(order.name)
            case StopReplica():
                self._backend.stop(order.name)
            case SetDesired():
                self._desired = order.desired

    def _schedule(self) -> None:
        """Has all controllers told the state after the changes of this turn of the event loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_state)

    def _send_state(self) -> None:
        self._is_scheduled = False
        state = self._state()
        for connection in self._connections:
            connection.send(state)

    def _state(self) -> AgentState:
        now_s = self._clock.monotonic_s()
        return AgentState(
            self._backend.facts,
            [
                AgentReplica(
                    name=replica.name,
                    address=str(replica.engine.client.address),
                    phase=replica.phase,
                    age_s=now_s - replica.since_s,
                    start_kind=replica.start_kind,
                    start_phases=replica.start_phases,
                    failure=replica.failure,
                )
                for replica in self._backend.replicas().values()
                if replica.engine is not None
            ],
            self._desired,
        )


def _remove_stale(path: Path) -> None:
    """Removes the socket that an agent has left which was killed."""
    path.unlink(missing_ok=True)
