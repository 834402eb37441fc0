"""Backend whose engines belong to an agent, another process: it gives the agent orders and connects to its engines.

The agent may be away for a while. Its engines serve meanwhile, and orders are given again when it is back.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from maitred.core.backoff import BackoffCeiling
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
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
    ToController,
    version_fault,
)
from maitred.fleet.backend import BackendFacts, BackendReplica
from maitred.fleet.local_backend import LocalBackend
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.remote import RemoteEngine
from maitred.scaling.replica_status import ReplicaPhase

_RECONNECT_BACKOFF = BackoffCeiling(first_s=0.02, most_s=1.0)

_log = logging.getLogger(__name__)


class AgentBackend:
    """Backend at one agent. Implements `ReplicaBackend`.

    Args:
        path: Unix socket at which the agent takes orders; None: the agent dials, and `on_open` gets its connections.
        make_engine: Makes the connection to the engine at an address.
        facts: The facts until the agent has told its own.
        name_of: Returns the name of the replica of a number.
        clock: The clock.
        epoch: Returns the epoch in which this process may give orders now; None: it may give none.

    Attributes:
        hello: Who and where the agent is.
        state: What it has told last.
        lines: Connections with it; an agent that dials several addresses of this machine has several.
        away_since_s: Since when it has had no connection; None: it has one.
    """

    def __init__(
        self,
        path: Path | None,
        make_engine: Callable[[str], RemoteEngine],
        facts: BackendFacts,
        name_of: Callable[[int], str],
        clock: Clock,
        epoch: Callable[[], int | None] = lambda: 0,
    ) -> None:
        self.hello = AgentHello()
        self.state = AgentState(facts, [], desired=None)
        self.lines: list[MessageConnection[ToController]] = []
        self.away_since_s: float | None = clock.monotonic_s()
        self._path = path
        self._name_of = name_of
        self._clock = clock
        self._epoch = epoch
        self._kept: DesiredReplicas | None = None
        """Desired numbers of this process, which an agent that has been away is told again."""
        self._leaving: frozenset[str] | None = None
        """Replicas that are to go, as this process has said; None: it has said nothing."""
        self._asleep: frozenset[str] | None = None
        """Replicas that are to sleep, as this process has said; None: it has said nothing."""
        self._addresses: dict[str, str] = {}
        self._faults: dict[str, str] = {}
        """Why the settings of this process allow no connection to the engine of a replica."""
        self._replicas: dict[str, BackendReplica] = {}
        self._starting: dict[str, float] = {}
        """Replicas whose start was ordered, with the time of the last order, until the agent has them..."""
        self._stopping: set[str] = set()
        """...and those whose end was ordered, until it has not."""
        self._connections = LocalBackend(lambda name: make_engine(self._addresses[name]), facts, name_of, clock)
        self._connections.on_change(self._on_connection_change)
        self._listeners: list[Callable[[], None]] = []
        self._is_known = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._connect_task: asyncio.Task[None] | None = None

    @property
    def facts(self) -> BackendFacts:
        """Facts of the agent. Implements `ReplicaBackend`."""
        return replace(self.state.facts, outlives_gateway=True, puts_to_sleep=True)

    @property
    def pending_orders(self) -> int:
        """Starts and ends that were ordered and that the agent has not begun or completed."""
        return len(self._starting) + len(self._stopping)

    @property
    def desired(self) -> DesiredReplicas | None:
        """Desired numbers that the agent has been told. Implements `ReplicaBackend`."""
        return self.state.desired

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

    def keep_leaving(self, names: Collection[str]) -> None:
        """Has the agent tell all gateways that these of its replicas are to go. Implements `ReplicaBackend`."""
        leaving = (frozenset(names) | self._stopping) & self._replicas.keys()
        if leaving != self._leaving:
            self._leaving = leaving
            self._send(SetDesired(None, leaving=tuple(sorted(leaving))))

    def keep_asleep(self, names: Collection[str]) -> None:
        """Has the agent put these of its replicas to sleep, and wake all others. Implements `ReplicaBackend`."""
        asleep = frozenset(names) & self._replicas.keys()
        if asleep != self._asleep:
            self._asleep = asleep
            self._send(SetDesired(None, asleep=tuple(sorted(asleep))))

    def claim(self, desired: DesiredReplicas | None) -> None:
        """Tells the agent the epoch of this process, so that it takes no order of an earlier one.

        Args:
            desired: The desired numbers, as far as somebody has set them.
        """
        self._kept, self._leaving, self._asleep = desired, None, None
        self._send(SetDesired(desired))

    def start(self, name: str) -> None:
        """Orders the start of a replica. Implements `ReplicaBackend`."""
        if name not in self._replicas:
            self._starting[name] = self._clock.monotonic_s()
            self._replicas[name] = BackendReplica(
                name=name,
                phase=ReplicaPhase.STARTING,
                since_s=self._clock.monotonic_s(),
                start_kind=self.state.facts.start_kind,
                region=self.hello.region or None,
            )
            self._send(StartReplica(name))
            self._notify()

    def stop(self, name: str) -> None:
        """Orders the end of a replica, and leaves its engine. Implements `ReplicaBackend`."""
        if name in self._replicas and name not in self._stopping:
            self._stopping.add(name)
            self._starting.pop(name, None)
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
        """Waits until the agent has told what it has, if it is dialed."""
        await self._connections.__aenter__()
        if self._path is not None:
            self._connect_task = asyncio.create_task(self._keep_connected(self._path), name="agent connection")
            await self._is_known.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connections; the agent keeps its engines."""
        if self._connect_task is not None:
            self._connect_task.cancel()
            await asyncio.wait({self._connect_task})
        for line in list(self.lines):
            line.close()
        self._is_known.clear()  # what is closed now is not connected again
        await self._connections.__aexit__(kind, error, trace)

    # --- the agent ---

    async def _keep_connected(self, path: Path) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            try:
                _, line = await loop.create_unix_connection(self._make_line, str(path))
            except OSError:
                failures += 1
                await asyncio.sleep(_RECONNECT_BACKOFF.after(failures))
                continue
            failures = 0
            self._is_lost.clear()
            try:
                await self._is_lost.wait()
            finally:
                line.close()

    def _make_line(self) -> MessageConnection[ToController]:
        line: MessageConnection[ToController] = MessageConnection(
            ToController,
            lambda message: self.on_message(line, message),
            on_end=lambda: self.on_end(line),
            on_open=lambda: self.on_open(line),
        )
        return line

    def on_open(self, line: MessageConnection[ToController]) -> None:
        """Handles a new connection with the agent: gives again the orders that it may not have got."""
        self.lines.append(line)
        self.away_since_s = None
        line.send(ControllerHello())
        if not (self._kept is None and self._leaving is None and self._asleep is None):
            leaving = None if self._leaving is None else tuple(sorted(self._leaving))
            asleep = None if self._asleep is None else tuple(sorted(self._asleep))
            self._send(SetDesired(self._kept, leaving=leaving, asleep=asleep))
        for name in self._starting:
            self._starting[name] = self._clock.monotonic_s()
            self._send(StartReplica(name))
        for name in self._stopping:
            self._send(StopReplica(name))

    def on_end(self, line: MessageConnection[ToController]) -> None:
        """Handles the end of a connection with the agent."""
        self._is_lost.set()
        if line in self.lines:
            self.lines.remove(line)
            if not self.lines:
                self.away_since_s = self._clock.monotonic_s()
                self._notify()

    def on_message(self, line: MessageConnection[ToController], message: ToController) -> None:
        """Handles what the agent tells."""
        match message:
            case AgentHello():
                if fault := version_fault(message.protocol):
                    line.send(AgentRejection(fault))
                    line.reject(fault)
                elif message.instance != self.hello.instance:
                    self._on_instance()
                self.hello = message
            case AgentState():
                if message.number > self.state.number:
                    self._on_state(message)
            case OrderRefused():
                _log.warning(
                    "The agent %s refuses the orders of this gateway: another one has given orders in epoch %d.",
                    self.hello.name,
                    message.epoch,
                )

    def _on_instance(self) -> None:
        """Handles another process of the agent: the engines of the one before have ended with it."""
        self.state = replace(self.state, replicas=[], number=0)
        self._stopping.clear()
        for name in list(self._connections.replicas()):
            self._replicas[name] = replace(
                self._replicas[name], phase=ReplicaPhase.DRAINING, since_s=self._clock.monotonic_s()
            )
            self._connections.stop(name)

    def _send(self, order: Order) -> None:
        """Sends an order with the epoch of this process, if it may give orders."""
        if self.lines and (epoch := self._epoch()) is not None:
            self.lines[-1].send(replace(order, epoch=epoch))

    def _on_state(self, state: AgentState) -> None:
        self.state = state
        found = {replica.name: replica for replica in state.replicas}
        for name in found.keys() if state.facts.max_replicas else list(self._starting):
            self._starting.pop(name, None)  # an agent that leaves starts none
        for name in self._replicas.keys() - found.keys() - self._starting.keys():
            self._connections.stop(name)
        self._update()
        self._is_known.set()

    def forget_orders(self) -> None:
        """Forgets the orders that the agent has not carried out, because another process gives them from now on."""
        self._kept = self._leaving = self._asleep = None
        if self._starting or self._stopping:
            self._starting.clear()
            self._stopping.clear()
            self._update()

    def drop_unheard(self, after_s: float) -> None:
        """Forgets starts that were ordered so long ago while the agent, which is there, has not begun them."""
        now_s = self._clock.monotonic_s()
        unheard = [name for name, ordered_s in self._starting.items() if now_s - ordered_s >= after_s]
        if unheard and self.lines:
            _log.error("The agent %s has not begun to start %s.", self.hello.name, ", ".join(sorted(unheard)))
            for name in unheard:
                del self._starting[name]
            self._update()

    def drop_lost(self, after_s: float) -> None:
        """Gives up the replicas of an agent that is away for so long, if their engines do not answer either."""
        now_s = self._clock.monotonic_s()
        if self.away_since_s is None or now_s - self.away_since_s < after_s:
            return
        connections = self._connections.replicas()
        lost = {
            name
            for name in self._replicas
            if (connection := connections.get(name)) is None
            or (connection.phase is not ReplicaPhase.SERVING and now_s - connection.since_s >= after_s)
        }
        if lost:
            _log.error("The agent %s is away, and so are its replicas %s.", self.hello.name, ", ".join(sorted(lost)))
            self.state = replace(self.state, replicas=[told for told in self.state.replicas if told.name not in lost])
            for name in lost:
                self._starting.pop(name, None)
                self._connections.stop(name)
            self._update()

    def _adopt(self, replica: AgentReplica) -> None:
        """Connects to the engine of a replica of the agent."""
        self._addresses[replica.name] = replica.address
        try:
            self._connections.start(replica.name)
        except ConfigInvalid as error:
            if self._faults.get(replica.name) != error.message:
                _log.error("The replica %s of an agent cannot be used: %s", replica.name, error.message)
            self._faults[replica.name] = error.message
        else:
            self._faults.pop(replica.name, None)
        connection = self._connections.replicas().get(replica.name)
        self._replicas[replica.name] = BackendReplica(
            name=replica.name,
            phase=replica.phase,
            since_s=self._clock.monotonic_s() - replica.age_s,
            engine=None if connection is None else connection.engine,
            start_kind=replica.start_kind,
            region=self.hello.region or None,
            serves_others=self._serves_others(replica),
            is_leaving=replica.is_leaving,
            is_reserved=replica.is_reserved,
        )

    def _serves_others(self, told: AgentReplica) -> bool:
        """Whether other gateways may have requests at a replica: not if the agent is that of this process alone."""
        return self._path is None and told.phase is ReplicaPhase.SERVING

    # --- what there is ---

    def _on_connection_change(self) -> None:
        if self._is_known.is_set():
            self._update()

    def _update(self) -> None:
        """Brings the replicas up to date with the agent and with the connections to its engines."""
        found = {replica.name: replica for replica in self.state.replicas}
        connections = self._connections.replicas()
        for name, told in found.items():
            if name not in connections and name not in self._stopping:
                self._adopt(told)
            elif name in connections and told.address != self._addresses[name]:
                self._connections.stop(name)  # once that connection has ended, there is one with the new engine
        for name, replica in list(self._replicas.items()):
            if name not in found and name not in connections and name not in self._starting:
                del self._replicas[name]
                self._stopping.discard(name)
                self._faults.pop(name, None)
            elif name in found and name not in self._stopping:
                self._replicas[name] = self._merge(replica, found[name], connections.get(name))
        self._notify()

    def _merge(self, replica: BackendReplica, told: AgentReplica, connection: BackendReplica | None) -> BackendReplica:
        """Returns the replica as it is now: this process's own connection tells first whether its engine serves."""
        phase, failure = told.phase, told.failure
        if connection is None and told.name in self._faults:
            phase, failure = ReplicaPhase.FAILED, self._faults[told.name]
        elif connection is not None and phase is not ReplicaPhase.DRAINING:
            if connection.phase in (ReplicaPhase.SERVING, ReplicaPhase.DRAINING):
                phase, failure = connection.phase, ""
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
            serves_others=self._serves_others(told),
            is_leaving=told.is_leaving,
            is_reserved=told.is_reserved,
        )

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
