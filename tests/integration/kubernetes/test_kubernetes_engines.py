"""Engines in the pods of a Deployment, under load: what comes, goes and dies there, no client sees.

Each test runs against the API server of the tests; with `KUBECONFIG`, `make test-cluster` runs it against that one.
"""

import asyncio
import os
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from maitred.testing.server_process import free_port, serving
from tests.integration.fleet.test_replica_pool import Fleet, Load
from tests.integration.gateway.test_drain import ADMIN_KEY, DECLARED
from tests.integration.gateway.test_replicas import all_kinds
from tests.support.kubernetes.cluster import running_cluster
from tests.support.servers.operator_client import operator_client

LIMIT_S = 500.0
SECRET = "a secret of the engines and the gateways"


@pytest.fixture(params=[pytest.param(False, id="own"), pytest.param(True, id="external", marks=pytest.mark.external)])
async def cluster(request, tmp_path):
    """A cluster whose pods are engine processes."""
    environment = {**os.environ, "MAITRED_LINK_SECRET": SECRET}
    settings = ("engine.kv_memory_bytes=32MiB", "engine.threads=1", "engine_link.secret.env=MAITRED_LINK_SECRET")
    arguments = [part for setting in settings for part in ("--set", setting)]
    options = {"port": free_port(), "environment": environment, "arguments": arguments}
    async with running_cluster(tmp_path, options, is_external=request.param) as started:
        yield started


class PodFleet(Fleet):
    """A gateway whose engines are in pods, as its operator sees them."""

    def __init__(self, server, client, cluster):
        super().__init__(server, client)
        self.cluster = cluster

    def engines(self):
        """The processes of the engines that run, by pod."""
        return {name: engine for name, engine in self.cluster.kubelet.engines.items() if engine.returncode is None}

    async def names(self):
        """The names of the replicas that serve."""
        return {replica["replica"] for replica in (await self.pool())["replicas"] if replica["phase"] == "serving"}

    async def wait_phases(self, **phases):
        """Waits until there are exactly so many replicas in each phase, as many processes, and no other pods."""
        while True:
            await super().wait_phases(**phases)
            if len(await self.cluster.pods()) == Counter(phases).total():
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def gateway(cluster, **further):
    """A gateway. When it ends, the pods stay."""
    settings = {
        **DECLARED,
        "model.backend": "kubernetes",
        "kubernetes.kubeconfig": str(cluster.kubeconfig),
        "kubernetes.namespace": cluster.namespace,
        "kubernetes.port": str(cluster.kubelet.port),
        "kubernetes.max_replicas": "4",
        "engine_link.secret.env": "MAITRED_LINK_SECRET",
        "engine_link.allow_plaintext": "true",
        "dispatch.recoveries": "20",
        **further,
    }
    server = serving(settings=settings, environment={"ADMIN": ADMIN_KEY, "MAITRED_LINK_SECRET": SECRET})
    async with operator_client(server, ADMIN_KEY, LIMIT_S) as (started, client):
        yield PodFleet(started, client, cluster)


@pytest.mark.parametrize("workers", [1, 2])
async def test_no_answer_is_lost_cut_or_doubled_while_pods_come_go_and_die(cluster, workers):
    async with asyncio.timeout(LIMIT_S), gateway(cluster, **{"server.workers": workers}) as fleet:
        await fleet.wait_phases(serving=1)
        before = await fleet.settled()
        undisturbed = await all_kinds(fleet.client)
        await fleet.scale(0)
        await fleet.wait_phases()
        load = Load(fleet.client, undisturbed)  # its readers wait in the queue
        await fleet.scale(3)
        await load.flows()
        await fleet.wait_phases(serving=3)
        next(iter(fleet.engines().values())).kill()  # its container is started again
        await load.flows()
        await fleet.wait_phases(serving=3)
        deleted = next(iter(fleet.engines()))
        await cluster.delete_pod(deleted)  # another pod takes its place
        await load.flows()
        while deleted in await cluster.pods():  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(0.05)
        await fleet.wait_phases(serving=3)
        await fleet.scale(1)
        await fleet.wait_phases(serving=1)
        await load.flows()
        received = [*undisturbed.values(), *await load.end()]
        metrics = await fleet.settled()
        for name, counted in [("prompt", "prompt_tokens"), ("output", "completion_tokens")]:
            ledger = f"maitred_ledger_{name}_tokens_total"
            assert metrics[ledger] - before.get(ledger, 0.0) == sum(answer.usage[counted] for answer in received)


async def test_replicas_have_the_names_of_their_pods_and_a_number_of_kubectl_is_followed(cluster):
    async with asyncio.timeout(LIMIT_S), gateway(cluster) as fleet:
        await fleet.wait_phases(serving=1)
        assert await fleet.names() == await cluster.pods()
        await cluster.scale(2)
        await fleet.wait_phases(serving=2)
        assert await fleet.names() == await cluster.pods()
        await cluster.scale(1)
        await fleet.wait_phases(serving=1)
        assert await cluster.replicas() == 1


async def test_engines_outlive_a_killed_gateway_and_the_next_one_takes_them_over(cluster):
    async with asyncio.timeout(LIMIT_S):
        async with gateway(cluster, **{"model.replicas": 2}) as fleet:
            await fleet.wait_phases(serving=2)
            before = fleet.engines()
            fleet.server.process.kill()
            await asyncio.to_thread(fleet.server.process.wait)
        async with gateway(cluster) as fleet:
            await fleet.wait_phases(serving=2)
            assert fleet.engines() == before
            assert (await all_kinds(fleet.client)).keys()


async def test_the_fleet_stays_as_it_is_while_the_api_server_is_away_and_follows_afterwards(cluster):
    if cluster.server is None:
        pytest.skip("only the API server of the tests can be taken away")
    async with asyncio.timeout(LIMIT_S), gateway(cluster, **{"model.replicas": 2}) as fleet:
        await fleet.wait_phases(serving=2)
        load = Load(fleet.client, await all_kinds(fleet.client))
        cluster.server.is_down = True
        await fleet.scale(3)
        await load.flows(200)
        assert len(fleet.engines()) == 2
        cluster.server.is_down = False
        await fleet.wait_phases(serving=3)
        await load.end()


async def test_a_pod_that_cannot_start_is_shown_with_its_reason(cluster):
    async with asyncio.timeout(LIMIT_S), gateway(cluster) as fleet:
        await fleet.wait_phases(serving=1)
        cluster.kubelet.is_held = True
        await fleet.scale(2)
        while (await fleet.phases())["failed"] != 1:  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(0.05)
        cluster.kubelet.is_held = False
        await fleet.wait_phases(serving=2)


async def test_of_two_gateways_without_a_common_database_one_scales_and_both_serve(cluster):
    async with asyncio.timeout(LIMIT_S), gateway(cluster) as first, gateway(cluster) as second:
        for fleet in (first, second):
            await fleet.wait_phases(serving=1)
        undisturbed = await all_kinds(first.client)
        loads = [Load(fleet.client, undisturbed) for fleet in (first, second)]
        await second.scale(3)  # it takes the lease
        for fleet in (first, second):
            await fleet.wait_phases(serving=3)
        for load in loads:
            await load.flows()
        await first.scale(1)
        for fleet in (first, second):
            await fleet.wait_phases(serving=1)
        assert await first.names() == await second.names()
        for load in loads:
            await load.flows()
            assert await load.end()
        for fleet in (first, second):
            assert (await fleet.settled()).get("maitred_lost_streams_total", 0) == 0
