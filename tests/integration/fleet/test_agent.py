"""An agent and its controllers over a real socket: orders, what there is, and what is left when either is gone."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from maitred.fleet.agent.backend import AgentBackend
from maitred.fleet.agent.server import AgentServer
from maitred.fleet.backend import BackendFacts
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.scaling.replica_status import ReplicaPhase
from tests.support.clock import FakeClock
from tests.support.servers.paper_fleet import PaperBackend, PaperConnection

LIMIT_S = 300.0


async def until(condition):
    """Waits for something that the other end of a socket does."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.001)


class Controller:
    """A controller: its backend, and the connections that it has made, by address."""

    def __init__(self, path, clock):
        self.connections = []
        self.backend = AgentBackend(path, self._connect, BackendFacts(max_replicas=1), "r{}".format, clock)

    def _connect(self, address):
        self.connections.append(PaperConnection())
        return self.connections[-1]

    async def until(self, **phases):
        """Waits until there are exactly these replicas, in these phases."""

        def phases_now():
            return {name: replica.phase.value for name, replica in self.backend.replicas().items()}

        await until(lambda: phases_now() == phases)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def path(short_folder):
    return short_folder / "agent.sock"


@pytest.fixture
def agent(clock):
    return PaperBackend(clock, max_replicas=5)


@asynccontextmanager
async def controller_of(path, clock):
    controller = Controller(path, clock)
    async with asyncio.timeout(LIMIT_S), controller.backend:
        yield controller


async def test_a_controller_learns_what_there_is_and_orders_more(path, clock, agent):
    agent.start("r0")
    clock.now_s += 5
    async with AgentServer(agent, clock).listening(path), controller_of(path, clock) as controller:
        assert controller.backend.facts.max_replicas == 5
        assert controller.backend.desired is None
        assert controller.backend.replicas()["r0"].since_s == clock.monotonic_s() - 5
        agent.become("r0", ReplicaPhase.SERVING)
        controller.connections[0].connect()
        await controller.until(r0="serving")
        controller.backend.start("r1")
        controller.backend.start("r1")
        await controller.until(r0="serving", r1="starting")
        await until(lambda: controller.backend.replicas()["r1"].engine is not None)
        assert list(agent.there) == ["r0", "r1"]


async def test_a_stopped_replica_is_there_until_its_process_is_gone(path, clock, agent):
    agent.start("r0")
    agent.become("r0", ReplicaPhase.SERVING)
    async with AgentServer(agent, clock).listening(path), controller_of(path, clock) as controller:
        controller.connections[0].connect()
        await controller.until(r0="serving")
        controller.backend.stop("r0")
        assert controller.backend.replicas()["r0"].phase is ReplicaPhase.DRAINING
        await until(lambda: agent.there["r0"].phase is ReplicaPhase.DRAINING)
        await until(lambda: not controller.connections[0].is_open)
        controller.backend.start("r0")
        await controller.until(r0="draining")
        agent.vanish("r0")
        await controller.until()
        controller.backend.start("r0")
        await controller.until(r0="starting")
        await until(lambda: "r0" in agent.there)


async def test_a_failure_shows_with_its_reason(path, clock, agent):
    async with AgentServer(agent, clock).listening(path), controller_of(path, clock) as controller:
        controller.backend.start("r0")
        await until(lambda: "r0" in agent.there)
        agent.become("r0", ReplicaPhase.FAILED)
        await controller.until(r0="failed")
        assert controller.backend.replicas()["r0"].failure == "it died"


async def test_a_dead_controller_leaves_the_fleet_to_the_next_one(path, clock, agent):
    async with AgentServer(agent, clock).listening(path):
        async with controller_of(path, clock) as controller:
            controller.backend.keep_desired(DesiredReplicas(1, asleep=2))
            controller.backend.start("r0")
            await until(lambda: "r0" in agent.there)
        agent.become("r0", ReplicaPhase.SERVING)
        async with controller_of(path, clock) as following:
            assert following.backend.desired == DesiredReplicas(1, asleep=2)
            assert list(following.backend.replicas()) == ["r0"]
            following.connections[0].connect()
            await following.until(r0="serving")


async def test_orders_are_given_again_to_an_agent_that_was_away(path, clock, agent):
    async with controller_of_agent_that_comes_later(path, clock) as (controller, serve):
        async with serve(agent):
            await controller.until()
        controller.backend.start("r0")
        again = PaperBackend(clock)
        async with serve(again):
            await until(lambda: "r0" in again.there)
            await controller.until(r0="starting")


async def test_what_an_agent_has_lost_with_its_life_is_gone(path, clock, agent):
    agent.start("r0")
    async with controller_of_agent_that_comes_later(path, clock) as (controller, serve):
        async with serve(agent):
            await controller.until(r0="starting")
        async with serve(PaperBackend(clock)):
            await controller.until()
            assert not controller.connections[0].is_open


async def test_an_agent_puts_engines_to_sleep_keeps_them_asleep_and_wakes_them(path, clock, agent):
    agent.start("r0")
    agent.become("r0", ReplicaPhase.SERVING)
    client = agent.there["r0"].engine.client
    async with AgentServer(agent, clock).listening(path), controller_of(path, clock) as controller:
        assert controller.backend.facts.puts_to_sleep
        controller.backend.keep_asleep(["r0", "unknown"])
        await until(lambda: controller.backend.replicas()["r0"].is_reserved)
        assert client.orders == [True]
        client.tell(asleep=True)
        client.tell()  # a gateway that does not know has woken it
        assert client.orders == [True, True]
        client.tell(asleep=True)
        agent.become("r0", ReplicaPhase.FAILED)
        client.tell()
        agent.become("r0", ReplicaPhase.SERVING)
        assert client.orders == [True] * 3, "an engine that was started again is awake"
        client.tell(asleep=True)
        controller.backend.keep_asleep([])
        await until(lambda: not controller.backend.replicas()["r0"].is_reserved)
        assert client.orders == [True, True, True, False]
        client.tell()
        assert client.orders[-1] is False


async def test_the_next_controller_learns_what_sleeps(path, clock, agent):
    agent.start("r0")
    agent.become("r0", ReplicaPhase.SERVING)
    async with AgentServer(agent, clock).listening(path):
        async with controller_of(path, clock) as controller:
            controller.backend.keep_asleep(["r0"])
            await until(lambda: controller.backend.replicas()["r0"].is_reserved)
        agent.there["r0"].engine.client.tell(asleep=True)
        async with controller_of(path, clock) as following:
            assert following.backend.replicas()["r0"].is_reserved
            assert agent.there["r0"].engine.client.orders == [True]


@asynccontextmanager
async def controller_of_agent_that_comes_later(path, clock):
    controller = Controller(path, clock)
    opening = asyncio.create_task(controller.backend.__aenter__())
    try:
        async with asyncio.timeout(LIMIT_S):
            yield controller, lambda backend: AgentServer(backend, clock).listening(path)
            await opening
    finally:
        await controller.backend.__aexit__(None, None, None)
