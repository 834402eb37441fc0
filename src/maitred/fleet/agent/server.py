"""Server of an agent: tells controllers what its backend has, and passes their orders on to it."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from maitred.core.clock import Clock
from maitred.fleet.agent.connection import MessageConnection
from maitred.fleet.agent.protocol import (
    AgentHello,
    AgentRejection,
    AgentReplica,
    AgentState,
    ControllerHello,
    Order,
    OrderRefused,
    SetDesired,
    StartReplica,
    StopReplica,
    ToAgent,
    version_fault,
)
from maitred.fleet.backend import ReplicaBackend
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.replica.engine.client import EngineClient
from maitred.scaling.replica_status import ReplicaPhase
from maitred.wire.link.credentials import Credentials

_log = logging.getLogger(__name__)


class AgentServer:
    """Server of an agent. Controllers dial it at a Unix socket, or it has a connection to each of them (`connect`).

    Args:
        backend: Backend that has the engines; its owner opens and closes it.
        clock: The clock of the backend.
        hello: Who and where the agent is.

    Attributes:
        epoch: Highest epoch of an order so far.
    """

    def __init__(self, backend: ReplicaBackend, clock: Clock, hello: AgentHello = AgentHello()) -> None:  # noqa: B008
        self.epoch = 0
        self._backend = backend
        self._clock = clock
        self._hello = replace(hello, instance=secrets.token_hex(8))
        self._desired: DesiredReplicas | None = None
        self._leaving: frozenset[str] = frozenset()
        """Replicas that are to go, as a controller has said, so that all gateways drain them."""
        self._asleep: frozenset[str] = frozenset()
        """Replicas that are to sleep, as a controller has said, so that no gateway wakes them."""
        self._clients: dict[str, EngineClient] = {}
        """Clients of the engines that have been told to sleep, whose reports are watched."""
        self._seen_asleep: dict[str, bool] = {}
        """Whether they slept by their last report."""
        self._connections: set[MessageConnection[ToAgent]] = set()
        self._is_leaving = False
        self._states = 0
        self._is_scheduled = False
        backend.on_change(self._schedule)
        backend.on_change(self._keep_asleep)

    @asynccontextmanager
    async def listening(self, path: Path) -> AsyncIterator[None]:
        """Accepts controllers at a Unix socket for as long as the block lasts."""
        _remove_stale(path)
        server = await asyncio.get_running_loop().create_unix_server(self.connect, str(path))
        try:
            yield
        finally:
            server.close()
            self.close()

    def connect(
        self,
        on_end: Callable[[], None] = lambda: None,
        credentials: Credentials = Credentials(),  # noqa: B008 - frozen
    ) -> MessageConnection[ToAgent]:
        """Returns the agent's end of a new connection with a controller.

        Args:
            on_end: Called once when the controller is gone.
            credentials: Secret that the controller must know; none at a Unix socket.
        """

        def end() -> None:
            self._connections.discard(connection)
            on_end()

        connection: MessageConnection[ToAgent] = MessageConnection(
            ToAgent,
            lambda message: self._on_message(connection, message),
            on_end=end,
            on_open=lambda: self._on_open(connection),
            credentials=credentials,
        )
        return connection

    def leave(self) -> None:
        """Tells controllers that all replicas end soon, and that none is started here; their owner stops them then."""
        self._is_leaving = True
        self._send_state()

    def close(self) -> None:
        """Closes all connections after what was sent."""
        for connection in list(self._connections):
            connection.close()

    def _on_open(self, connection: MessageConnection[ToAgent]) -> None:
        self._connections.add(connection)
        connection.send(self._hello)
        connection.send(self._state())

    def _on_message(self, connection: MessageConnection[ToAgent], message: ToAgent) -> None:
        match message:
            case ControllerHello():
                if fault := version_fault(message.protocol):
                    connection.reject(fault)
            case AgentRejection():
                connection.reject(message.reason)
            case _ if message.epoch < self.epoch:
                _log.warning(
                    "An order of epoch %d is refused: another gateway has given orders in epoch %d.",
                    message.epoch,
                    self.epoch,
                )
                connection.send(OrderRefused(self.epoch))
            case _:
                self._obey(message)

    def _obey(self, order: Order) -> None:
        if order.epoch > self.epoch:
            self.epoch = order.epoch
            self._schedule()
        match order:
            case StartReplica():
                if not self._is_leaving:
                    self._leaving -= {order.name}
                    self._asleep -= {order.name}
                    self._backend.start(order.name)
            case StopReplica():
                self._backend.stop(order.name)
            case SetDesired():
                desired = order.desired or self._desired
                leaving = self._leaving if order.leaving is None else frozenset(order.leaving)
                if (desired, leaving) != (self._desired, self._leaving):
                    self._desired, self._leaving = desired, leaving
                    self._schedule()
                if order.asleep is not None and (asleep := frozenset(order.asleep)) != self._asleep:
                    self._let_sleep(asleep)

    # --- sleep ---

    def _let_sleep(self, asleep: frozenset[str]) -> None:
        """Has these replicas sleep, and wakes those that slept and are to serve again."""
        woken, self._asleep = self._asleep - asleep, asleep
        for replica in self._backend.replicas().values():
            if replica.name in woken and replica.engine is not None and replica.engine.client.is_ready:
                replica.engine.client.request_asleep(asleep=False)
        self._keep_asleep()
        self._schedule()

    def _keep_asleep(self) -> None:
        """Tells the engines to sleep that are to and do not: an engine that has been started again is awake."""
        for replica in self._backend.replicas().values():
            if replica.name not in self._asleep or replica.engine is None:
                continue
            client = replica.engine.client
            if self._clients.get(replica.name) is not client:
                self._clients[replica.name] = client
                client.on_change(partial(self._on_report, replica.name, client))
            if client.is_ready and not client.is_asleep:
                client.request_asleep(asleep=True)
        for name in self._clients.keys() - self._backend.replicas().keys():
            del self._clients[name]
            self._seen_asleep.pop(name, None)

    def _on_report(self, name: str, client: EngineClient) -> None:
        """Puts an engine to sleep again that a gateway has woken which did not know that it sleeps."""
        was_asleep, self._seen_asleep[name] = self._seen_asleep.get(name, False), client.is_asleep
        if was_asleep and not client.is_asleep and client.is_ready and name in self._asleep:
            client.request_asleep(asleep=True)

    # --- what there is ---

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
        self._states += 1
        facts = self._backend.facts
        return AgentState(
            replace(facts, max_replicas=0) if self._is_leaving else facts,
            [
                AgentReplica(
                    name=replica.name,
                    address=str(replica.engine.client.address),
                    phase=ReplicaPhase.DRAINING if self._is_leaving else replica.phase,
                    age_s=now_s - replica.since_s,
                    start_kind=replica.start_kind,
                    start_phases=replica.start_phases,
                    failure=replica.failure,
                    is_leaving=replica.name in self._leaving,
                    is_reserved=replica.name in self._asleep,
                )
                for replica in self._backend.replicas().values()
                if replica.engine is not None
            ],
            desired=self._desired,
            epoch=self.epoch,
            number=self._states,
        )


def _remove_stale(path: Path) -> None:
    """Removes the socket that an agent has left which was killed."""
    path.unlink(missing_ok=True)
