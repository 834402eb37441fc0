"""Backend of engines on other machines: each machine has an agent, which dials this gateway and owns its engines.

::

    agent --hello, state--> gateway       an agent that is away keeps its engines, and its engines their answers
    agent <----orders------ gateway       those of the gateway that has the lease of the pool

A replica is named after its agent. Where the next one starts is decided when it starts (see `placement`).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from itertools import count, islice
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid
from maitred.fleet.agent.backend import AgentBackend
from maitred.fleet.agent.config import AgentConfig
from maitred.fleet.agent.connection import STRANGER_S, MessageConnection
from maitred.fleet.agent.placement import NO_AGENT, AgentLoad, merge_facts, place
from maitred.fleet.agent.protocol import AgentHello, AgentRejection, ToController, version_fault
from maitred.fleet.agent.status import MAX_AGENTS, AgentStatus
from maitred.fleet.backend import BackendFacts, BackendReplica
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.remote import RemoteEngine
from maitred.scaling.replica_status import ReplicaPhase
from maitred.wire.address import TcpAddress, parse_tcp
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import Credentials, listener_credentials
from maitred.wire.link.handshake import AGENT_LINK

SETTLE_S = 6.0
"""Time after the start in which no order is given: agents that have lost this gateway dial it again within it."""
SHUNNED_S = 60.0
"""Time in which an agent where a replica could not run is the last to get another one."""
REJECTED_S = 30.0
"""Time for which an agent that was rejected is shown; it tries again every few seconds."""
_CHECK_S = 0.5
"""Interval at which agents and replicas that are away are looked at."""

_log = logging.getLogger(__name__)


class MachineBackend:
    """Backend of the engines of all agents that have dialed. Implements `ReplicaBackend`.

    Args:
        config: The `agents` section.
        link: Settings by which agents and gateways know each other.
        make_engine: Makes the connection to the engine at an address.
        clock: The clock.
        region: Region of this gateway, which gives orders to agents there alone; empty: to those that tell none.

    Attributes:
        epoch: Returns the epoch of the lease that this gateway holds; None: it holds none, and only follows.
        address: Where it listens; its port is known once it does.
    """

    def __init__(
        self,
        config: AgentConfig,
        link: LinkConfig,
        make_engine: Callable[[str], RemoteEngine],
        clock: Clock,
        region: str = "",
    ) -> None:
        self.epoch: Callable[[], int | None] = lambda: None
        self.address = parse_tcp(config.listen)
        self._config = config
        self._link = link
        self._make_engine = make_engine
        self._clock = clock
        self._region = region
        self._agents: dict[str, AgentBackend] = {}
        self._replicas: dict[str, BackendReplica] = {}
        self._listeners: list[Callable[[], None]] = []
        self._lines: set[MessageConnection[ToController]] = set()
        self._failed_since_s: dict[str, float] = {}
        """When a replica failed first that has not served since."""
        self._shunned_until_s: dict[str, float] = {}
        """Agents where a replica could not run, and until when others come before them."""
        self._rejected: dict[str, tuple[float, AgentStatus]] = {}
        """Agents that may not take part, and when they were rejected last."""
        self._opened_s = clock.monotonic_s()
        self._has_served = asyncio.Event()
        self._kept: DesiredReplicas | None = None
        """Desired numbers of this gateway, since it has had the lease; also before it gives orders."""
        self._claimed: int | None = None
        """Epoch of which the agents have been told."""
        self._closing: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._watch_task: asyncio.Task[None] | None = None

    # --- what there is ---

    @property
    def facts(self) -> BackendFacts:
        """Facts of all agents together. Implements `ReplicaBackend`."""
        return replace(merge_facts(self._loads()), follows=self._order_epoch() is None)

    @property
    def desired(self) -> DesiredReplicas | None:
        """Desired numbers of this gateway, or of the latest epoch that an agent has been told."""
        if self._kept is not None:
            return self._kept
        told = [agent.state for agent in self._own() if agent.state.desired is not None]
        return max(told, key=lambda state: state.epoch).desired if told else None

    def agents(self) -> list[AgentStatus]:
        """Returns the status of each agent, by name; at the end those that were rejected lately."""
        now_s = self._clock.monotonic_s()
        self._rejected = {
            name: (at_s, status) for name, (at_s, status) in self._rejected.items() if now_s - at_s < REJECTED_S
        }
        known = [
            AgentStatus(
                name=agent.hello.name,
                address=agent.lines[0].peer if agent.lines else "",
                region=agent.hello.region,
                zone=agent.hello.zone,
                gpus=agent.hello.gpus,
                is_connected=bool(agent.lines),
                takes_orders=self._is_own(agent.hello),
                fault="" if self._is_own(agent.hello) else self._elsewhere(agent.hello),
                replicas=len(agent.replicas()),
                max_replicas=agent.facts.max_replicas,
                pending_orders=agent.pending_orders,
            )
            for _, agent in sorted(self._agents.items())
        ]
        return [*known, *(status for _, status in self._rejected.values())][:MAX_AGENTS]

    def replicas(self) -> Mapping[str, BackendReplica]:
        """Returns the replicas of all agents. Implements `ReplicaBackend`."""
        return self._replicas

    def name_of(self, number: int) -> str:
        """Returns the name for a new replica, which says where it starts. Implements `ReplicaBackend`."""
        found = place(self._loads())
        agent = "" if found is None else found.name
        free = (name for name in (f"{agent}-{free_number}" for free_number in count()) if name not in self._replicas)
        return next(islice(free, number, None))

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change. Implements `ReplicaBackend`."""
        self._listeners.append(listener)

    # --- orders ---

    def keep_desired(self, desired: DesiredReplicas) -> None:
        """Has all agents keep the desired numbers. Implements `ReplicaBackend`."""
        self._kept = None if self._held_epoch() is None else desired
        for agent in self._own():
            agent.keep_desired(desired)

    def keep_leaving(self, names: Collection[str]) -> None:
        """Has all agents tell which replicas are to go, if this gateway gives orders. Implements `ReplicaBackend`."""
        if self._order_epoch() is not None:
            for agent in self._own():
                agent.keep_leaving(names)

    def keep_asleep(self, names: Collection[str]) -> None:
        """Has all agents put these replicas to sleep, if this gateway gives orders. Implements `ReplicaBackend`."""
        if self._order_epoch() is not None:
            for agent in self._own():
                agent.keep_asleep(names)

    def start(self, name: str) -> None:
        """Orders the start of a replica at the agent that its name says. Implements `ReplicaBackend`."""
        if (agent := self._agent_of(name)) is not None:
            agent.start(name)

    def stop(self, name: str) -> None:
        """Orders the end of a replica. Implements `ReplicaBackend`."""
        if (agent := self._agent_of(name)) is not None:
            agent.stop(name)

    def _agent_of(self, name: str) -> AgentBackend | None:
        """Returns the agent of a replica, if this gateway may give it orders."""
        agent = self._agents.get(name.rpartition("-")[0])
        may_order = agent is not None and self._is_own(agent.hello) and self._order_epoch() is not None
        return agent if may_order else None

    @property
    def latest_epoch(self) -> int:
        """Latest epoch that an agent of this region knows."""
        return max((agent.state.epoch for agent in self._own()), default=0)

    def check_lease(self) -> None:
        """Follows the lease: a gateway that has got it claims all agents, and one that has lost it forgets its orders.

        To be called when the lease has been taken, renewed or lost.
        """
        if self._held_epoch() is None:
            self._kept = None
        epoch, before, desired = self._order_epoch(), self._claimed, self.desired
        self._claimed = epoch
        for agent in self._own():
            if epoch is None:
                agent.forget_orders()
            elif epoch != before:
                agent.claim(desired)
        if epoch != before:
            self._notify()

    def _held_epoch(self) -> int | None:
        epoch = self.epoch()
        return None if epoch is None or epoch < self.latest_epoch else epoch

    def _order_epoch(self) -> int | None:
        return None if self._clock.monotonic_s() - self._opened_s < SETTLE_S else self._held_epoch()

    async def wait_started(self) -> None:
        """Waits until one replica has been ready. Implements `ReplicaBackend`."""
        await self._has_served.wait()

    # --- life ---

    async def __aenter__(self) -> Self:
        """Listens for agents at the address of the settings.

        Raises:
            ConfigInvalid: The address cannot be had, or other machines could reach it without a secret or TLS.
        """
        credentials = listener_credentials(self.address, self._link, AGENT_LINK)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: self._accept(credentials),
                self.address.host,
                self.address.port,
                ssl=credentials.tls,
                ssl_handshake_timeout=None if credentials.tls is None else STRANGER_S,
            )
        except OSError as error:
            raise ConfigInvalid(
                f"Cannot listen on {self.address}: {error.strerror or error}. Choose another address in agents.listen."
            ) from error
        self.address = TcpAddress(self.address.host, self._server.sockets[0].getsockname()[1])
        self._opened_s = self._clock.monotonic_s()
        self._watch_task = asyncio.create_task(self._watch(), name="agents")
        _log.info("Waiting for agents (`maitred agent --gateway HOST:PORT`) on %s.", self.address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes all connections. The agents keep their engines."""
        assert self._server is not None
        assert self._watch_task is not None
        self._server.close()
        self._watch_task.cancel()
        for line in list(self._lines):
            line.close()
        await asyncio.wait({self._watch_task, *self._closing})
        for agent in self._agents.values():
            await agent.__aexit__(kind, error, trace)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                self.check_lease()
                self._drop_lost()
                self._move_failed()
            except Exception:  # without this task, nothing that is lost would ever be given up
                _log.exception("The agents cannot be looked at; this is tried again.")

    def _drop_lost(self) -> None:
        """Gives up replicas and agents that have been away for too long."""
        now_s = self._clock.monotonic_s()
        for name, agent in list(self._agents.items()):
            agent.drop_unheard(self._config.lost_after_s)
            agent.drop_lost(self._config.lost_after_s)
            is_gone = agent.away_since_s is not None and now_s - agent.away_since_s >= self._config.lost_after_s
            if not agent.replicas() and is_gone:
                del self._agents[name]
                closing = asyncio.create_task(agent.__aexit__(None, None, None), name=f"end of agent {name}")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def _move_failed(self) -> None:
        """Stops a replica whose agent cannot start it, if another agent has a place: the pool starts one there.

        An engine that only this gateway does not reach stays: others may have answers there.
        """
        now_s = self._clock.monotonic_s()
        if self._order_epoch() is None:
            return
        for agent in self._own():
            for name, replica in list(agent.replicas().items()):
                is_stuck = now_s - self._failed_since_s.get(name, now_s) >= self._config.lost_after_s
                better = place(self._loads()) if is_stuck and agent.lines else None
                if better is None or better.is_failing or better.name == agent.hello.name:
                    continue
                _log.warning("The replica %s does not run, and another is started elsewhere: %s", name, replica.failure)
                self._shunned_until_s[agent.hello.name] = now_s + SHUNNED_S
                agent.stop(name)

    # --- agents ---

    def _accept(self, credentials: Credentials) -> MessageConnection[ToController]:
        line: MessageConnection[ToController] = MessageConnection(
            ToController,
            lambda message: self._on_message(line, message),
            on_end=lambda: self._on_end(line),
            on_open=lambda: self._lines.add(line),
            credentials=credentials,
            listens=True,
        )
        return line

    def _on_end(self, line: MessageConnection[ToController]) -> None:
        self._lines.discard(line)
        for agent in self._agents.values():
            agent.on_end(line)

    def _on_message(self, line: MessageConnection[ToController], message: ToController) -> None:
        """Handles what an agent tells; its first message says which one it is."""
        for agent in self._agents.values():
            if line in agent.lines:
                agent.on_message(line, message)
                return
        if not isinstance(message, AgentHello):
            line.reject("it has not said who it is")
        elif fault := self._fault_of(message):
            _log.error("The agent %s at %s may not take part: %s", message.name, line.peer, fault)
            rejected = AgentStatus(
                name=message.name, address=line.peer, region=message.region, zone=message.zone, fault=fault
            )
            if message.name in self._rejected or len(self._rejected) < MAX_AGENTS:
                self._rejected[message.name] = self._clock.monotonic_s(), rejected
            line.send(AgentRejection(fault))
            line.reject(fault)
        else:
            self._rejected.pop(message.name, None)
            self._admit(line, message)

    def _fault_of(self, hello: AgentHello) -> str:
        """Returns why an agent may not take part; empty: it may."""
        if fault := version_fault(hello.protocol):
            return fault
        if self._region and not hello.region:
            return (
                f"It tells no region, and this gateway is in {self._region}. Start it with --region, so that "
                "gateways of one region alone give it orders."
            )
        known = self._agents.get(hello.name)
        if known is not None and known.lines and known.hello.instance != hello.instance:
            return (
                f"Another agent with the name {hello.name} is connected from {known.lines[0].peer}. Give each its own "
                "--name."
            )
        return ""

    def _admit(self, line: MessageConnection[ToController], hello: AgentHello) -> None:
        agent = self._agents.get(hello.name)
        if agent is None:
            agent = self._agents[hello.name] = AgentBackend(
                None,
                self._make_engine,
                facts=NO_AGENT,
                name_of=f"{hello.name}-{{}}".format,
                clock=self._clock,
                epoch=lambda: self._order_epoch() if self._is_own(self._agents[hello.name].hello) else None,
            )
            agent.on_change(self._update)
        if not agent.lines:
            where = "/".join(filter(None, (hello.region, hello.zone)))
            _log.info("The agent %s (%s) has connected from %s.", hello.name, where or "no zone", line.peer)
            if not self._is_own(hello):
                # Beside agents of its own region a gateway may well have others; without any, a name may be wrong.
                has_own = any(one is not agent for one in self._own())
                level = logging.INFO if has_own else logging.WARNING
                _log.log(level, "The agent %s gets no orders here: %s", hello.name, self._elsewhere(hello))
        agent.on_message(line, hello)
        if not self._is_own(hello):
            agent.forget_orders()  # it was in the region of this gateway before
        agent.on_open(line)
        if (epoch := self._order_epoch()) is not None and epoch == self._claimed:
            agent.claim(self.desired)

    def _elsewhere(self, hello: AgentHello) -> str:
        """Returns why this gateway starts nothing at an agent of another region."""
        here = f"this gateway is in {self._region}" if self._region else "this gateway has no region"
        return (
            f"It is in {hello.region}, and {here}, so its replicas are used and none is started there. Give both the "
            "same region if this gateway is to start some."
        )

    def _is_own(self, hello: AgentHello) -> bool:
        """Whether an agent is where this gateway starts replicas."""
        return hello.region == self._region

    def _own(self) -> list[AgentBackend]:
        """Returns the agents to which this gateway may give orders."""
        return [agent for agent in self._agents.values() if self._is_own(agent.hello)]

    def _loads(self) -> list[AgentLoad]:
        now_s = self._clock.monotonic_s()
        return [
            AgentLoad(
                name=agent.hello.name,
                facts=agent.facts,
                zone=agent.hello.zone,
                is_connected=bool(agent.lines),
                replicas=len(agent.replicas()),
                starting=sum(replica.phase is ReplicaPhase.STARTING for replica in agent.replicas().values()),
                is_failing=now_s < self._shunned_until_s.get(agent.hello.name, now_s)
                or any(replica.phase is ReplicaPhase.FAILED for replica in agent.replicas().values()),
            )
            for agent in self._own()
        ]

    def _update(self) -> None:
        self._replicas = {
            name: replica for agent in self._agents.values() for name, replica in agent.replicas().items()
        }
        now_s = self._clock.monotonic_s()
        for name, replica in self._replicas.items():
            is_rejected = replica.engine is not None and replica.engine.client.is_rejected
            if replica.phase is ReplicaPhase.SERVING:
                self._failed_since_s.pop(name, None)
                self._has_served.set()
            elif replica.serves_others and not is_rejected:
                self._failed_since_s.pop(name, None)
            elif replica.phase is ReplicaPhase.FAILED:
                self._failed_since_s.setdefault(name, now_s)
        for name in self._failed_since_s.keys() - self._replicas.keys():
            del self._failed_since_s[name]
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
