"""Lease of a Deployment in the cluster: one owner at a time, whatever the databases of gateways say."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from maitred.app.scaling.lease import LeaseClaim
from maitred.core.errors import StoreUnavailable
from maitred.fleet.kubernetes.api import KubernetesApi
from maitred.fleet.kubernetes.config import KubernetesConfig
from maitred.fleet.kubernetes.leases import KubernetesLeases
from tests.support.clock import FakeClock
from tests.support.kubernetes.api_server import ApiServer

POOL = "models/maitred-engine@kubernetes"


class _Leases(KubernetesLeases):
    """Leases of a gateway whose database is a list."""

    def __init__(self, kept, clock, api):
        self._clock, self._api, self._name, self._kept = clock, api, "scaler", kept

    async def keep_decision(self, lease, decision):
        self._kept.append((lease.epoch, decision))


@asynccontextmanager
async def gateways(tmp_path, count=2):
    """Gateways of one Deployment, each with a claim and what its database has kept."""
    clock = FakeClock()
    async with ApiServer().running() as server:
        file = tmp_path / "kubeconfig"
        file.write_text(server.kubeconfig())
        async with KubernetesApi(KubernetesConfig(kubeconfig=str(file))) as api:
            made = []
            for number in range(count):
                kept = []
                made.append((LeaseClaim(_Leases(kept, clock, api), POOL, f"gateway-{number}", clock), kept))
            yield server, clock, made


async def test_of_gateways_that_ask_at_once_one_decides(tmp_path):
    async with gateways(tmp_path, count=5) as (_, _, made):
        held = await asyncio.gather(*(claim.hold() for claim, _ in made))
        assert sum(held) == 1


async def test_a_decision_of_an_owner_that_was_replaced_is_not_written(tmp_path):
    async with gateways(tmp_path) as (server, clock, [(first, kept), (second, kept_by_second)]):
        assert await first.hold()
        assert await first.decide(3, 0, b"three")
        assert not await second.hold()
        clock.now_s += 14.0
        assert not await second.hold()
        clock.now_s += 6.0
        assert await second.hold()  # nobody has renewed it
        assert second.lease.desired == 3
        assert not await first.decide(1, 0, b"one")
        assert not first.is_held
        assert await second.decide(2, 0, b"two")
        assert (kept, kept_by_second) == ([(1, b"three")], [(2, b"two")])
        assert server.leases["scaler"]["spec"]["holderIdentity"] == "gateway-1"
        assert server.leases["scaler"]["spec"]["leaseTransitions"] == 2


async def test_what_an_operator_sets_at_any_gateway_the_owner_reads(tmp_path):
    async with gateways(tmp_path) as (_, clock, [(first, _), (second, _)]):
        assert await first.hold()
        await second.leases.set_override(POOL, 5, clock.wall_s() + 60)
        await first.refresh()
        assert first.lease.override_replicas == 5


async def test_nobody_decides_while_the_api_server_is_away(tmp_path):
    async with gateways(tmp_path) as (server, clock, [(first, _), (second, _)]):
        assert await first.hold()
        server.is_down = True
        clock.now_s += 16.0
        assert not await first.hold()
        assert not await second.hold()
        assert first.is_away
        with pytest.raises(StoreUnavailable, match="cannot be read"):
            await first.leases.read(POOL)
        server.is_down = False
        clock.now_s += 16.0
        assert await first.hold()
