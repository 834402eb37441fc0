"""The line between agents and gateways on other machines: who is let in, who gives orders, and what a cut changes."""

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from maitred.core.errors import ConfigInvalid
from maitred.core.secret import Secret
from maitred.fleet.agent.config import AgentConfig
from maitred.fleet.agent.dialer import GatewayDialer
from maitred.fleet.agent.machine_backend import SETTLE_S, MachineBackend
from maitred.fleet.agent.protocol import AgentHello
from maitred.fleet.agent.server import AgentServer
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.pool_member import HEARD_S
from maitred.scaling.replica_status import ReplicaPhase
from maitred.scaling.startup_times import StartKind, StartupTimes
from maitred.wire.address import parse_address
from maitred.wire.link.config import LinkConfig
from tests.integration.fleet.test_agent import LIMIT_S, until
from tests.support.certificates import Authority
from tests.support.clock import FakeClock
from tests.support.servers.paper_fleet import PaperBackend, PaperConnection

SECRET = Secret("a secret that both ends know", "{env: A}")


class Gateway:
    """A gateway: its backend, and the connections that it has made to engines, at `addresses`."""

    def __init__(self, clock, link, port=0, region="", epoch=1):
        self.connections, self.addresses = [], []
        self.epoch = epoch
        config = AgentConfig(listen=f"tcp:127.0.0.1:{port}", lost_after_s=10.0)
        self.backend = MachineBackend(config, link, self._connect, clock, region)
        self.backend.epoch = lambda: self.epoch

    def _connect(self, address):
        self.addresses.append(address)
        self.connections.append(PaperConnection())
        return self.connections[-1]

    def phases(self):
        return {name: replica.phase.value for name, replica in self.backend.replicas().items()}

    async def until(self, **phases):
        """Waits until there are exactly these replicas, in these phases; `_` stands for the dash of a name."""
        expected = {name.replace("_", "-"): phase for name, phase in phases.items()}
        await until(lambda: self.phases() == expected)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def links(tmp_path):
    """The settings of a gateway and of an agent that trust each other."""
    authority = Authority(tmp_path)
    gateway, agent = authority.issue("gateway"), authority.issue("agent")
    return [
        LinkConfig(secret=SECRET, certificate_file=end.certificate, key_file=end.key, ca_file=authority.file)
        for end in (gateway, agent)
    ]


@asynccontextmanager
async def gateway_of(clock, link, **options):
    gateway = Gateway(clock, link, **options)
    async with asyncio.timeout(LIMIT_S), gateway.backend:
        clock.now_s += SETTLE_S
        yield gateway


@asynccontextmanager
async def agent_of(clock, link, *gateways, name="a", **place):
    """An agent that dials gateways, with what it has."""
    backend = PaperBackend(clock, max_replicas=3)
    server = AgentServer(backend, clock, AgentHello(name=name, **place))
    async with GatewayDialer(server, [gateway.backend.address for gateway in gateways], link):
        yield backend, server


async def test_two_gateways_see_the_replicas_and_one_gives_the_orders(clock, links):
    async with (
        gateway_of(clock, links[0]) as leader,
        gateway_of(clock, links[0], epoch=None) as follower,
        agent_of(clock, links[1], leader, follower, zone="x") as (agent, _),
    ):
        await until(lambda: leader.backend.facts.max_replicas == follower.backend.facts.max_replicas == 3)
        assert not leader.backend.facts.follows
        assert follower.backend.facts.follows
        assert leader.backend.name_of(0) == "a-0"
        assert leader.backend.name_of(1) == "a-1"
        leader.backend.check_lease()
        leader.backend.keep_desired(DesiredReplicas(1))
        leader.backend.start("a-0")
        follower.backend.start("a-1")
        follower.backend.stop("a-0")
        await follower.until(a_0="starting")
        await leader.until(a_0="starting")
        assert list(agent.there) == ["a-0"]
        assert follower.backend.desired == DesiredReplicas(1)
        leader.backend.stop("a-0")
        agent.vanish("a-0")
        await follower.until()
        await leader.until()


@asynccontextmanager
async def pool_of(clock, link, *, epoch):
    """The pool of a gateway, with the gateway."""
    gateway = Gateway(clock, link, epoch=epoch)
    async with ReplicaPool(gateway.backend, DesiredReplicas(2), StartupTimes({}), clock) as pool:
        clock.now_s += SETTLE_S
        yield pool, gateway


async def test_all_gateways_drain_what_one_lets_go_and_the_next_one_goes_on_with_it(clock, links):
    def shows(pool, **phases):
        return {status.name[-1]: status.phase.value for status in pool.replicas()} == {
            name[-1]: phase for name, phase in phases.items()
        }

    async with (
        asyncio.timeout(LIMIT_S),
        pool_of(clock, links[0], epoch=1) as (leader, leading),
        pool_of(clock, links[0], epoch=None) as (follower, following),
        agent_of(clock, links[1], leading, following) as (agent, _),
    ):
        for name in ("a-0", "a-1"):
            agent.start(name)
            agent.become(name, ReplicaPhase.SERVING)
        for gateway in (leading, following):
            await until(lambda gateway=gateway: len(gateway.connections) == 2)
            for connection in gateway.connections:
                connection.connect()
        for pool in (leader, follower):
            await until(lambda pool=pool: shows(pool, _0="serving", _1="serving"))
        clock.now_s += 60.0  # what was heard of is counted
        for gateway in (leading, following):  # the follower has a request at each
            for connection in gateway.connections:
                connection.client.tell(running=1)
        leader.set_desired(1)
        await until(lambda: shows(follower, _0="serving", _1="draining"))
        assert [endpoint.admin_state.serving for endpoint in follower.endpoints()] == [True, False]
        leader.set_desired(2)
        await until(lambda: shows(follower, _0="serving", _1="serving"))
        assert follower.endpoints()[1].admin_state.serving
        leader.set_desired(1)
        await until(lambda: shows(follower, _0="serving", _1="draining"))
        clock.now_s += HEARD_S
        leader.refresh()
        await until(lambda: shows(leader, _0="serving", _1="draining"))
        leading.epoch, following.epoch = None, 2
        for gateway in (following, leading):
            gateway.backend.check_lease()
        await until(
            lambda: agent.there["a-1"].phase is ReplicaPhase.SERVING and shows(leader, _0="serving", _1="draining")
        )
        following.connections[1].client.tell()
        follower.refresh()
        await until(lambda: agent.there["a-1"].phase is ReplicaPhase.DRAINING)
        agent.vanish("a-1")
        for pool in (leader, follower):
            await until(lambda pool=pool: shows(pool, _0="serving"))


async def test_a_gateway_shows_its_agents_those_of_other_regions_and_those_that_it_rejects(clock, links, caplog):
    caplog.set_level(logging.WARNING)
    async with (
        gateway_of(clock, links[0], region="eu") as gateway,
        agent_of(clock, links[1], gateway, name="here", region="eu", zone="x", gpus=2) as (agent, _),
        agent_of(clock, links[1], gateway, name="there", region="us"),
        agent_of(clock, links[1], gateway, name="nowhere"),
    ):
        await until(lambda: len(gateway.backend.agents()) == 3 and gateway.backend.facts.max_replicas == 3)
        here, there, nowhere = gateway.backend.agents()
        assert (here.name, here.region, here.zone, here.gpus, here.max_replicas) == ("here", "eu", "x", 2, 3)
        assert here.address.startswith("127.0.0.1:")
        assert (here.is_connected, here.takes_orders, here.fault, here.pending_orders) == (True, True, "", 0)
        assert (there.is_connected, there.takes_orders) == (True, False)
        assert "It is in us, and this gateway is in eu" in there.fault
        assert (nowhere.name, nowhere.is_connected, nowhere.takes_orders) == ("nowhere", False, False)
        assert "Start it with --region" in nowhere.fault
        agent.start = lambda name: None  # it hears of the order and does not carry it out
        gateway.backend.check_lease()
        gateway.backend.start("here-0")
        assert gateway.backend.agents()[0].pending_orders == 1
        assert gateway.backend.agents()[0].replicas == 1


async def test_a_gateway_that_has_agents_of_other_regions_alone_warns(clock, links, caplog):
    caplog.set_level(logging.WARNING)
    async with gateway_of(clock, links[0]) as gateway, agent_of(clock, links[1], gateway, name="there", region="us"):
        await until(lambda: "The agent there gets no orders here" in caplog.text)
        assert "It is in us, and this gateway has no region" in gateway.backend.agents()[0].fault


async def test_an_order_to_sleep_or_wake_of_an_older_epoch_is_refused(clock, links, caplog):
    caplog.set_level(logging.WARNING)
    async with (
        gateway_of(clock, links[0], epoch=2) as new,
        gateway_of(clock, links[0], epoch=2) as old,
        agent_of(clock, links[1], new, old) as (agent, server),
    ):
        agent.start("a-0")
        agent.become("a-0", ReplicaPhase.SERVING)
        client = agent.there["a-0"].engine.client
        for gateway in (new, old):
            await until(lambda gateway=gateway: "a-0" in gateway.backend.replicas())
        new.backend.check_lease()
        new.backend.keep_asleep(["a-0"])
        await until(lambda: old.backend.replicas()["a-0"].is_reserved)
        client.tell(asleep=True)
        server.epoch = 3  # it was told elsewhere, and the old gateway has not heard of it
        old.backend.keep_asleep([])
        old.backend.keep_asleep(["a-0"])
        await until(lambda: "another one has given orders in epoch 3" in caplog.text)
        assert client.orders == [True]


async def test_orders_of_an_older_epoch_are_refused(clock, links, caplog):
    caplog.set_level(logging.WARNING)
    async with (
        gateway_of(clock, links[0]) as old,
        gateway_of(clock, links[0], epoch=None) as new,
        agent_of(clock, links[1], old, new) as (agent, server),
    ):
        await until(lambda: old.backend.facts.max_replicas == new.backend.facts.max_replicas == 3)
        server.epoch = 2  # it was told elsewhere, and the old gateway has not heard of it
        old.backend.start("a-0")
        await until(lambda: "another one has given orders in epoch 2" in caplog.text)
        assert not agent.there
        new.epoch = 3
        new.backend.check_lease()
        await until(lambda: old.backend.latest_epoch == 3)
        assert old.backend.facts.follows, "it still has its lease, but another gateway has a later one"
        old.backend.check_lease()
        await old.until()
        new.backend.start("a-0")
        await old.until(a_0="starting")


async def test_a_replica_whose_end_came_too_late_is_connected_again(clock, links):
    async with (
        gateway_of(clock, links[0]) as old,
        gateway_of(clock, links[0], epoch=None) as new,
        agent_of(clock, links[1], old, new) as (agent, _),
    ):
        agent.start("a-0")
        agent.become("a-0", ReplicaPhase.SERVING)
        await until(lambda: len(old.connections) == 1)
        old.connections[0].connect()
        await old.until(a_0="serving")
        await until(lambda: new.backend.replicas())
        new.epoch = 2
        new.backend.check_lease()
        old.backend.stop("a-0")
        await until(lambda: old.backend.latest_epoch == 2)
        old.backend.check_lease()
        await until(lambda: len(old.connections) == 2)
        old.connections[1].connect()
        await old.until(a_0="serving")


async def test_a_cut_line_leaves_what_serves_and_what_does_not_is_given_up_in_time(clock, links):
    async with gateway_of(clock, links[0]) as gateway:
        async with agent_of(clock, links[1], gateway) as (agent, _):
            for name in ("a-0", "a-1"):
                agent.start(name)
                agent.become(name, ReplicaPhase.SERVING)
            await until(lambda: len(gateway.connections) == 2)
            for connection in gateway.connections:
                connection.connect()
            await gateway.until(a_0="serving", a_1="serving")
        await until(lambda: gateway.backend.facts.max_replicas == 2)
        clock.now_s += 60
        gateway.connections[1].client.is_ready = False
        gateway.connections[1].on_transition()
        await gateway.until(a_0="serving", a_1="starting")
        clock.now_s += 10
        await gateway.until(a_0="serving")
        async with agent_of(clock, links[1], gateway) as (anew, _):
            await gateway.until()
            gateway.backend.check_lease()
            gateway.backend.start("a-0")
            await gateway.until(a_0="starting")
            await until(lambda: gateway.connections[2:] and "a-0" in anew.there)
        await until(lambda: gateway.backend.facts.max_replicas == 1)
        clock.now_s += 10
        await gateway.until()
        await until(lambda: not gateway.backend.facts.max_replicas)


async def test_an_agent_dials_again_and_a_gateway_that_is_back_finds_what_there_was(clock, links):
    async with gateway_of(clock, links[0]) as gateway:
        dialing = agent_of(clock, links[1], gateway)
        agent, _ = await dialing.__aenter__()
        await until(lambda: gateway.backend.facts.max_replicas)
        gateway.backend.check_lease()
        gateway.backend.keep_desired(DesiredReplicas(2))
        gateway.backend.start("a-0")
        await until(lambda: "a-0" in agent.there)
    port = gateway.backend.address.port
    async with gateway_of(clock, links[0], port=port, epoch=None) as back:
        await back.until(a_0="starting")
        assert back.backend.desired == DesiredReplicas(2)
        await dialing.__aexit__(None, None, None)


async def test_an_agent_that_leaves_says_so_and_gets_no_order(clock, links):
    async with gateway_of(clock, links[0]) as gateway, agent_of(clock, links[1], gateway) as (agent, server):
        agent.start("a-0")
        agent.become("a-0", ReplicaPhase.SERVING)
        await until(lambda: gateway.connections)
        gateway.connections[0].connect()
        await gateway.until(a_0="serving")
        server.leave()
        await gateway.until(a_0="draining")
        assert gateway.connections[0].is_open, "what runs there goes on"
        assert gateway.backend.facts.max_replicas == 1
        gateway.backend.start("a-1")
        agent.vanish("a-0")
        await until(lambda: not gateway.connections[0].is_open)
        assert not agent.there


@pytest.mark.parametrize("reason", ["secret", "no secret", "authority", "version", "name"])
async def test_who_is_not_let_in_is_told_why(clock, links, tmp_path, caplog, reason):
    caplog.set_level(logging.WARNING)
    ours, theirs = links
    place, said = {}, reason
    match reason:
        case "secret":
            theirs = replace(theirs, secret=Secret("another one of good length", "{env: B}"))
            said = "it does not know the secret of this gateway"
        case "no secret":
            theirs, said = replace(theirs, secret=None), "it asks for a secret, and this end has none"
        case "authority":
            issued = Authority(tmp_path, "stranger").issue("another")
            theirs = replace(theirs, certificate_file=issued.certificate, key_file=issued.key)
            said = "No connection to the gateway"
        case "version":
            place, said = {"protocol": 99}, "Run the same version of maitred on both machines"
        case "name":
            said = "Another agent with the name a is connected from 127.0.0.1"
    async with gateway_of(clock, ours) as gateway:
        first = agent_of(clock, links[1], gateway, name="a" if reason == "name" else "b")
        async with first, agent_of(clock, theirs, gateway, **place) as (agent, _):
            agent.start("a-0")
            await until(lambda: said in caplog.text)
            await until(lambda: gateway.backend.facts.max_replicas == 3)
            assert not gateway.phases()


async def test_what_a_gateway_desires_before_it_gives_orders_holds_afterwards(clock, links):
    async with gateway_of(clock, links[0]) as gateway, agent_of(clock, links[1], gateway) as (_, server):
        await until(lambda: gateway.backend.facts.max_replicas == 3)
        gateway.backend.check_lease()
        gateway.backend.keep_desired(DesiredReplicas(1))
        async with (
            gateway_of(clock, links[0], epoch=None) as again,
            GatewayDialer(server, [again.backend.address], links[1]),
        ):
            await until(lambda: again.backend.desired == DesiredReplicas(1))
            clock.now_s -= SETTLE_S
            again.epoch = 2
            again.backend.keep_desired(DesiredReplicas(2))
            assert again.backend.facts.follows
            assert again.backend.desired == DesiredReplicas(2)
            clock.now_s += SETTLE_S
            again.backend.check_lease()
            await until(lambda: gateway.backend.latest_epoch == 2)
            gateway.backend.check_lease()
            assert gateway.backend.desired == DesiredReplicas(2)


async def test_a_replica_that_does_not_run_is_given_up_where_another_agent_has_a_place(clock, links):
    async with gateway_of(clock, links[0]) as gateway, agent_of(clock, links[1], gateway) as (broken, _):
        await until(lambda: gateway.backend.facts.max_replicas == 3)
        gateway.backend.check_lease()
        gateway.backend.start("a-0")
        await until(lambda: "a-0" in broken.there)
        broken.become("a-0", ReplicaPhase.FAILED)
        await gateway.until(a_0="failed")
        clock.now_s += 30
        broken.become("a-0", ReplicaPhase.STARTING)  # the next attempt
        await gateway.until(a_0="starting")
        async with agent_of(clock, links[1], gateway, name="b"):
            await until(lambda: broken.there["a-0"].phase is ReplicaPhase.DRAINING)
            broken.vanish("a-0")
            await gateway.until()
            assert gateway.backend.name_of(0) == "b-0"
            clock.now_s += 60
            assert gateway.backend.name_of(0) == "a-0"


async def test_replicas_of_another_region_are_used_and_get_no_orders(clock, links):
    async with (
        gateway_of(clock, links[0], region="eu") as gateway,
        agent_of(clock, links[1], gateway, region="us") as (far, server),
        agent_of(clock, links[1], gateway, name="b", region="eu"),
    ):
        far.start("a-0")
        server.epoch = 9  # of the lease of its own region
        await gateway.until(a_0="starting")
        await until(lambda: gateway.backend.facts.max_replicas == 3)
        assert not gateway.backend.facts.follows
        assert gateway.backend.replicas()["a-0"].region == "us"
        assert gateway.backend.name_of(0) == "b-0"
        gateway.backend.check_lease()
        gateway.backend.stop("a-0")
        gateway.backend.start("a-1")
        gateway.backend.keep_desired(DesiredReplicas(1))
        assert gateway.phases() == {"a-0": "starting"}
        gateway.backend.start("b-0")
        await gateway.until(a_0="starting", b_0="starting")
        assert (list(far.there), server.epoch) == (["a-0"], 9)


async def test_an_agent_that_is_started_again_in_the_region_of_the_gateway_gets_its_orders(clock, links):
    async with gateway_of(clock, links[0], region="eu") as gateway:
        async with agent_of(clock, links[1], gateway, region="us"):
            await until(lambda: gateway.backend._agents)
            assert not gateway.backend.facts.max_replicas
        await until(lambda: not gateway.backend._agents["a"].lines)
        async with agent_of(clock, links[1], gateway, region="eu") as (agent, _):
            await until(lambda: gateway.backend.facts.max_replicas == 3)
            gateway.backend.check_lease()
            gateway.backend.start("a-0")
            await until(lambda: "a-0" in agent.there)
            assert gateway.backend.replicas()["a-0"].region == "eu"


async def test_a_start_at_an_agent_that_has_moved_to_another_region_is_forgotten(clock, links):
    async with gateway_of(clock, links[0], region="eu") as gateway:
        async with agent_of(clock, links[1], gateway, region="eu") as (_, server):
            await until(lambda: gateway.backend.facts.max_replicas == 3)
            gateway.backend.check_lease()
            server.epoch = 9  # so that it refuses the order
            gateway.backend.start("a-0")
            await gateway.until(a_0="starting")
        async with agent_of(clock, links[1], gateway, region="us"):
            await gateway.until()


async def test_a_start_that_an_agent_does_not_begin_is_forgotten_in_time(clock, links, caplog):
    async with gateway_of(clock, links[0]) as gateway, agent_of(clock, links[1], gateway) as (agent, server):
        await until(lambda: gateway.backend.facts.max_replicas == 3)
        gateway.backend.check_lease()
        agent.start = lambda name: None
        gateway.backend.start("a-0")
        clock.now_s += 9
        gateway.backend._drop_lost()
        assert gateway.phases() == {"a-0": "starting"}
        clock.now_s += 1
        gateway.backend._drop_lost()
        assert gateway.phases() == {}
        assert "has not begun to start a-0" in caplog.text
        gateway.backend.start("a-0")
        server.leave()
        await gateway.until()


def serve_at(agent, name, address):
    """Has an agent say that a replica serves at an address."""
    agent.start(name)
    agent.there[name].engine.client.address = parse_address(address)
    agent.become(name, ReplicaPhase.SERVING)


async def test_an_engine_that_is_told_at_another_address_is_connected_there(clock, links):
    async with gateway_of(clock, links[0]) as gateway, agent_of(clock, links[1], gateway) as (agent, _):
        serve_at(agent, "a-0", "tcp:127.0.0.1:9200")
        await until(lambda: gateway.connections)
        gateway.connections[0].connect()
        await gateway.until(a_0="serving")
        phases = []
        gateway.backend.on_change(lambda: phases.append(gateway.phases().get("a-0")))
        serve_at(agent, "a-0", "tcp:127.0.0.1:9201")
        await until(lambda: len(gateway.connections) == 2)
        assert gateway.addresses == ["tcp:127.0.0.1:9200", "tcp:127.0.0.1:9201"]
        assert "draining" in phases, "what uses its engine hears that this one goes"
        gateway.connections[1].connect()
        await gateway.until(a_0="serving")
        assert gateway.backend.replicas()["a-0"].engine is gateway.connections[1]
        assert not gateway.connections[0].is_open


async def test_engines_of_another_process_of_an_agent_are_connected_anew(clock, links):
    async with gateway_of(clock, links[0], epoch=None) as gateway:
        async with agent_of(clock, links[1], gateway) as (agent, _):
            serve_at(agent, "a-0", "tcp:127.0.0.1:9200")
            await until(lambda: gateway.connections)
            gateway.connections[0].connect()
            await gateway.until(a_0="serving")
        await until(lambda: not gateway.backend._agents["a"].lines)
        backend = PaperBackend(clock, max_replicas=3)
        serve_at(backend, "a-0", "tcp:127.0.0.1:9200")
        server = AgentServer(backend, clock, AgentHello(name="a"))
        async with GatewayDialer(server, [gateway.backend.address], links[1]):
            await until(lambda: len(gateway.connections) == 2)
            gateway.connections[1].connect()
            await gateway.until(a_0="serving")
            assert gateway.backend.replicas()["a-0"].engine is gateway.connections[1]


async def test_an_engine_to_which_the_settings_allow_no_connection_is_failed_with_the_reason(clock, links, caplog):
    fault = ConfigInvalid("Set engine_link.ca_file.")

    def connect(address):
        raise fault

    async with gateway_of(clock, links[0]) as gateway, agent_of(clock, links[1], gateway) as (agent, _):
        gateway.backend._make_engine = connect
        serve_at(agent, "a-0", "tcp:10.0.0.1:9200")
        await gateway.until(a_0="failed")
        agent.start("a-1")
        await gateway.until(a_0="failed", a_1="failed")
        assert gateway.backend.replicas()["a-0"].failure == "Set engine_link.ca_file."
        assert caplog.text.count("The replica a-0 of an agent cannot be used: Set engine_link.ca_file.") == 1
        assert not gateway.backend._has_served.is_set()


@pytest.mark.parametrize("is_rejected", [False, True])
async def test_an_engine_that_only_this_gateway_does_not_reach_stays(clock, links, is_rejected):
    async with (
        gateway_of(clock, links[0]) as gateway,
        agent_of(clock, links[1], gateway) as (agent, _),
        agent_of(clock, links[1], gateway, name="b"),
    ):
        await until(lambda: gateway.backend.facts.max_replicas == 6)
        gateway.backend.check_lease()
        serve_at(agent, "a-0", "tcp:127.0.0.1:9200")
        await until(lambda: gateway.connections)
        gateway.connections[0].fail("no route", is_rejected=is_rejected)
        await gateway.until(a_0="failed")
        clock.now_s += 60
        gateway.backend._move_failed()
        if is_rejected:
            await until(lambda: agent.there["a-0"].phase is ReplicaPhase.DRAINING)
        else:
            assert gateway.phases() == {"a-0": "failed"}
            assert agent.there["a-0"].phase is ReplicaPhase.SERVING


async def test_an_agent_without_a_region_gets_no_orders_of_gateways_that_have_one(clock, links, caplog):
    caplog.set_level(logging.WARNING)
    async with (
        gateway_of(clock, links[0], region="eu") as eu,
        gateway_of(clock, links[0], region="us") as us,
        gateway_of(clock, links[0]) as plain,
        agent_of(clock, links[1], eu, us, plain) as (_, server),
    ):
        await until(lambda: all(f"this gateway is in {region}. Start" in caplog.text for region in ("eu", "us")))
        await until(lambda: plain.backend.facts.max_replicas == 3)
        server.epoch = 9
        plain.epoch = 10
        plain.backend.check_lease()
        await until(lambda: server.epoch == 10)
        assert eu.backend.latest_epoch == us.backend.latest_epoch == 0, "no lease is taken because of it"
        assert not eu.backend.facts.max_replicas


async def test_a_gateway_that_an_agent_finds_late_stops_none_of_its_engines(clock, links):
    backend = PaperBackend(clock, max_replicas=6)
    server = AgentServer(backend, clock, AgentHello(name="a"))
    names = [f"a-{number}" for number in range(4)]
    for name in names:
        serve_at(backend, name, f"tcp:127.0.0.1:{9200 + int(name[-1])}")
    async with gateway_of(clock, links[0]) as former, GatewayDialer(server, [former.backend.address], links[1]):
        await until(lambda: former.backend.facts.max_replicas == 6)
        former.backend.check_lease()
        former.backend.keep_desired(DesiredReplicas(4))
        await until(lambda: former.backend._agents["a"].state.desired is not None)
    gateway = Gateway(clock, links[0], epoch=2)
    times = StartupTimes({StartKind.WEIGHTS_CACHED: 4.0})
    async with asyncio.timeout(LIMIT_S), ReplicaPool(gateway.backend, DesiredReplicas(1), times, clock) as pool:
        clock.now_s += SETTLE_S
        gateway.backend.check_lease()
        async with GatewayDialer(server, [gateway.backend.address], links[1]):
            await until(lambda: len(gateway.connections) == 4)
            for connection in gateway.connections:
                connection.connect()
            await gateway.until(**{name.replace("-", "_"): "serving" for name in names})
            await until(lambda: len(pool.replicas()) == 4)
            clock.now_s += 60
            gateway.backend.check_lease()
            pool.refresh()
            await until(lambda: server.epoch == 2)
            assert pool.desired == DesiredReplicas(4)
            assert {replica.phase for replica in backend.there.values()} == {ReplicaPhase.SERVING}
            await until(lambda: {replica.phase for replica in pool.replicas()} == {ReplicaPhase.SERVING})


async def test_a_gateway_that_other_machines_can_reach_needs_a_secret(clock):
    backend = MachineBackend(AgentConfig(listen="tcp:0.0.0.0:0"), LinkConfig(), lambda address: None, clock)
    with pytest.raises(ConfigInvalid, match=r"The gateway would listen on .* Set engine_link\.secret"):
        await backend.__aenter__()
