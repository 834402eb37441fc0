"""Engines on a real Ray cluster of two nodes, under load: what comes, goes and dies there, no client sees."""

import asyncio
import socket
from collections import Counter
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import count

import httpx
import pytest

from benchmarks.support.ray.cluster import ray_cluster
from maitred.testing.server_process import free_port, serving
from tests.integration.fleet.test_replica_pool import Fleet, Load
from tests.integration.gateway.test_drain import ADMIN_KEY, DECLARED
from tests.integration.gateway.test_replicas import all_kinds
from tests.support.processes import living_children
from tests.support.servers.operator_client import operator_client

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'maitred[ray]'", allow_module_level=True)

LIMIT_S = 800.0
MAX_REPLICAS = 4
_numbers = count()


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster() as started:
        yield started


class RayFleet(Fleet):
    """A gateway whose engines are on Ray, as its operator sees them."""

    def __init__(self, server, client, cluster):
        super().__init__(server, client)
        self.cluster = cluster

    def engines(self):
        """The processes of the engines, on all nodes."""
        return engines(self.cluster)


def settings(cluster, application, port, **further):
    return {
        **DECLARED,
        "model.backend": "ray",
        "ray.address": cluster.dashboard,
        "ray.token.env": "RAY_TOKEN",
        "ray.application": application,
        "ray.replica.max_replicas": MAX_REPLICAS,
        "ray.replica.first_port": port,
        "engine_link.secret.env": "MAITRED_LINK_SECRET",
        "engine_link.allow_plaintext": "true",
        "engine.kv_memory_bytes": "32MiB",
        "dispatch.recoveries": "20",
        **further,
    }


@asynccontextmanager
async def gateway(cluster, application, port, **further):
    """A gateway. When it ends, the engines stay."""
    environment = {"ADMIN": ADMIN_KEY, "RAY_TOKEN": cluster.token, "MAITRED_LINK_SECRET": cluster.secret}
    server = serving(settings=settings(cluster, application, port, **further), environment=environment)
    async with operator_client(server, ADMIN_KEY, LIMIT_S) as (started, client):
        yield RayFleet(started, client, cluster)


@asynccontextmanager
async def application(cluster):
    """Gateways over one application with the engines; nothing of it is left at the end.

    Yields:
        Makes a gateway. The first one deploys the application.
    """
    name, port = f"engines-{next(_numbers)}", free_port()
    yield lambda **further: gateway(cluster, name, port, **further)
    headers = {"authorization": f"Bearer {cluster.token}"}
    async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(headers=headers, timeout=LIMIT_S) as client:
        (await client.put(f"{cluster.dashboard}/api/serve/applications/", json={"applications": []})).raise_for_status()
        while actors(cluster) or engines(cluster):  # noqa: ASYNC110 - only looking tells
            await asyncio.sleep(0.05)


def engines(cluster):
    """The processes of the engines, on all nodes."""
    children = living_children(cluster.pid, recursive=True)
    return {child for child, (_, command) in children.items() if " engine " in command and "--listen" in command}


def actors(cluster):
    """The titles of Ray's processes that are replicas of Serve."""
    children = living_children(cluster.pid, recursive=True)
    return [command for _, command in children.values() if command.startswith("ray::ServeReplica")]


@pytest.mark.parametrize("workers", [1, 2])
async def test_no_answer_is_lost_cut_or_doubled_while_actors_and_engines_come_go_and_die(cluster, workers):
    async with application(cluster) as gateways, gateways(**{"server.workers": workers}) as fleet:
        await fleet.wait_phases(serving=1)
        before = await fleet.settled()
        undisturbed = await all_kinds(fleet.client)
        await fleet.scale(0)
        await fleet.wait_phases()
        load = Load(fleet.client, undisturbed)  # its readers wait in the queue
        await fleet.scale(3)
        await load.flows()
        await fleet.wait_phases(serving=3)
        await load.flows()
        fleet.engines().pop().kill()
        await load.flows()
        await fleet.wait_phases(serving=3)
        engine = fleet.engines().pop()
        actor = engine.parent()
        assert actor.name().startswith("ray::")
        actor.kill()
        await load.flows()
        await asyncio.to_thread(engine.wait, LIMIT_S)  # it goes with its actor
        await fleet.wait_phases(serving=3)
        await fleet.scale(1)
        await fleet.wait_phases(serving=1)
        await load.flows()
        received = [*undisturbed.values(), *await load.end()]
        metrics = await fleet.settled()
        for name, counted in [("prompt", "prompt_tokens"), ("output", "completion_tokens")]:
            ledger = f"maitred_ledger_{name}_tokens_total"
            assert metrics[ledger] - before.get(ledger, 0.0) == sum(answer.usage[counted] for answer in received)
        assert not cluster.handle_requests()


async def test_ray_stops_the_replica_that_was_drained(cluster):
    async with application(cluster) as gateways, gateways(**{"model.replicas": 3}) as fleet:
        await fleet.wait_phases(serving=3)
        ports = {port_of(engine): engine for engine in fleet.engines()}
        first = min(ports)
        names = {f"engine-{port - first}" for port in ports}
        await fleet.scale(2)
        await fleet.wait_phases(serving=2)
        left = {replica["replica"] for replica in (await fleet.pool())["replicas"]}
        assert len(left) == 2
        assert left < names
        assert {f"engine-{port_of(engine) - first}" for engine in fleet.engines()} == left


def port_of(engine):
    command = engine.cmdline()
    return int(command[command.index("--listen") + 1].rpartition(":")[2])


async def test_engines_outlive_a_killed_gateway_and_the_next_one_takes_them_over(cluster):
    async with application(cluster) as gateways:
        async with gateways(**{"model.replicas": 2}) as fleet:
            await fleet.wait_phases(serving=2)
            before = fleet.engines()
            fleet.server.process.kill()
            await asyncio.to_thread(fleet.server.process.wait)
        async with gateways() as fleet:
            await fleet.wait_phases(serving=2)
            assert fleet.engines() == before
            assert (await all_kinds(fleet.client)).keys()


async def test_engines_go_on_without_serves_controller(cluster):
    async with application(cluster) as gateways, gateways() as fleet:
        await fleet.wait_phases(serving=1)
        before = fleet.engines()
        undisturbed = await all_kinds(fleet.client)
        load = Load(fleet.client, undisturbed)
        await load.flows()
        children = living_children(cluster.pid, recursive=True)
        (controller,) = [child for child, (name, _) in children.items() if name.startswith("ray::ServeContr")]
        controller.kill()
        await load.flows()
        await fleet.scale(2)  # Ray starts the controller again, and it finds what it had
        await fleet.wait_phases(serving=2)
        assert before < fleet.engines()
        await load.end()


async def test_replicas_are_on_both_nodes(cluster):
    async with (
        application(cluster) as gateways,
        gateways(**{"model.replicas": 4, "ray.replica.num_cpus": "2"}) as fleet,
    ):
        await fleet.wait_phases(serving=4)
        parents = Counter(raylet_of(engine).pid for engine in fleet.engines())
        assert sorted(parents.values()) == [2, 2]


def raylet_of(engine):
    return next(parent for parent in engine.parents() if parent.name() == "raylet")


async def test_targets_can_be_pushed_as_bounds_of_a_policy(cluster):
    async with application(cluster) as gateways, gateways(**{"ray.replica.scaling": "policy"}) as fleet:
        await fleet.wait_phases(serving=1)
        before = fleet.engines()
        await fleet.scale(2)
        await fleet.wait_phases(serving=2)
        assert before < fleet.engines()
        await fleet.scale(0)
        await fleet.wait_phases()


async def test_an_engine_that_cannot_start_says_why_and_starts_when_it_can(cluster):
    async with application(cluster) as gateways, gateways() as fleet:
        await fleet.wait_phases(serving=1)
        (engine,) = fleet.engines()
        command = engine.cmdline()
        host, _, port = command[command.index("--listen") + 1].removeprefix("tcp:").rpartition(":")
        with socket.socket() as occupant:
            occupant.bind((host, int(port) + 1))
            occupant.listen()
            await fleet.scale(2)
            while not any("Cannot listen" in (r["failure"] or "") for r in (await fleet.pool())["replicas"]):  # noqa: ASYNC110 - only asking tells
                await asyncio.sleep(0.05)
        await fleet.wait_phases(serving=2)


async def test_gateways_of_one_application_follow_each_other(cluster):
    async with application(cluster) as gateways, gateways(**{"model.replicas": 2}) as first:
        await first.wait_phases(serving=2)
        async with gateways() as second:
            await second.wait_phases(serving=2)
            await second.scale(3)
            await first.wait_phases(serving=3)
            await first.scale(1)
            await second.wait_phases(serving=1)
        assert (await first.pool())["serving"] == 1
