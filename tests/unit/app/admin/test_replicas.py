"""What an operator says to replicas, and what dispatch makes of it."""

import asyncio

import pytest
from msgspec.structs import replace

from maitred.app.admin.replicas import ReplicaAdmin
from maitred.app.admin.scaling import ScalingAdmin
from maitred.app.scaling.lease import LeaseClaim
from maitred.core.errors import Conflict, InvalidRequest, ModelLoading, ReplicaUnavailable, ResourceNotFound
from maitred.dispatch.request import Endpoint
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.pool_member import NEXT_REPLICA, NextReplica
from maitred.scaling.startup_times import StartKind, StartupTimes
from tests.support.clock import FakeClock
from tests.support.dispatchers import DispatchSetup
from tests.support.scaling.leases import PaperLeases
from tests.support.servers.paper_fleet import PaperBackend


def admin_of(*setups):
    dispatchers = {f"m{number}": setup.dispatcher for number, setup in enumerate(setups)}
    clock = FakeClock()
    return ReplicaAdmin(dispatchers, {}, clock, ScalingAdmin({}, clock))


async def test_a_drained_replica_gets_nothing_new_and_rests_when_it_is_empty():
    setup = DispatchSetup(replicas=2)
    replicas = admin_of(setup)
    async with setup.enqueue(1) as entry:
        busy = (await entry.wait_dispatched()).name
        drained = replicas.drain(busy, None)
        assert (drained.state, drained.ready, drained.requests) == ("draining", False, 1)
        for number in range(2, 5):
            async with setup.enqueue(number) as another:
                assert (await another.wait_dispatched()).name != busy
    states = {replica.replica: (replica.state, replica.requests) for replica in replicas.all()}
    assert states[busy] == ("maintenance", 0)
    assert replicas.resume(busy, None).ready


async def test_who_waits_for_the_only_replica_is_served_when_it_is_back():
    setup = DispatchSetup()
    replicas = admin_of(setup)
    replicas.drain("replica-0", "m0")
    with pytest.raises(ReplicaUnavailable, match="out of service for maintenance") as refused:
        setup.check()
    assert refused.value.retry_after_s == 10.0
    assert not setup.dispatcher.serving
    async with setup.enqueue() as entry:
        granted = asyncio.ensure_future(entry.wait_dispatched())
        await asyncio.sleep(0)
        assert not granted.done()
        replicas.resume("replica-0", "m0")
        assert (await granted).name == "replica-0"
    assert setup.dispatcher.serving
    setup.assert_empty()


def test_a_name_must_be_that_of_one_replica():
    replicas = admin_of(DispatchSetup(), DispatchSetup())
    with pytest.raises(ResourceNotFound, match=r"no replica 'nobody'"):
        replicas.drain("nobody", None)
    with pytest.raises(ResourceNotFound, match="of 'm7'"):
        replicas.drain("replica-0", "m7")
    with pytest.raises(InvalidRequest, match="is a replica of m0, m1") as refused:
        replicas.maintain("replica-0", None)
    assert refused.value.param == "model"
    assert replicas.maintain("replica-0", "m1").state == "maintenance"
    assert [replica.state for replica in replicas.all()] == ["serving", "maintenance"]


def test_what_stands_for_the_replica_to_come_takes_no_command():
    setup = DispatchSetup()
    (endpoint_state,) = setup.dispatcher.core.endpoint_states
    endpoint_state.endpoint = Endpoint(NEXT_REPLICA, NextReplica(lambda: ModelLoading(retry_after_s=3.0)))
    replicas = admin_of(setup)
    with pytest.raises(ResourceNotFound, match="no replica 'next'"):
        replicas.drain(NEXT_REPLICA, None)
    assert endpoint_state.endpoint.admin_state.serving


@pytest.mark.parametrize(
    ("facts", "asleep", "kind", "message"),
    [
        ({"can_scale": False}, 0, Conflict, "external_scaler_enabled"),
        ({"can_sleep": False}, 1, InvalidRequest, "asleep"),
    ],
)
async def test_a_number_that_the_backend_cannot_have_is_refused(facts, asleep, kind, message):
    clock = FakeClock()
    backend = PaperBackend(clock, found=["r0"], **facts)
    pool = ReplicaPool(backend, DesiredReplicas(1), StartupTimes({StartKind.WEIGHTS_CACHED: 4.0}), clock)
    admin = ReplicaAdmin({}, {"m": pool}, clock, ScalingAdmin({}, clock))
    async with pool:
        with pytest.raises(kind, match=message):
            admin.scale("m", 2, asleep)
        assert pool.desired.serving == 1


class LeasedPaperBackend(PaperBackend):
    """Follows unless its gateway holds the lease."""

    claim: LeaseClaim

    @property
    def facts(self):
        return replace(self._facts, follows=self.claim.epoch is None)

    @facts.setter
    def facts(self, facts):
        self._facts = facts


async def test_an_order_takes_a_lease_again_that_another_gateway_took_without_a_word():
    clock = FakeClock()
    leases = PaperLeases(clock)
    ours, theirs = (LeaseClaim(leases, "chat@here", owner, clock) for owner in ("ours", "theirs"))
    LeasedPaperBackend.claim = ours
    backend = LeasedPaperBackend(clock, found=["r0"])
    pool = ReplicaPool(backend, DesiredReplicas(1), StartupTimes({StartKind.WEIGHTS_CACHED: 4.0}), clock)
    admin = ReplicaAdmin({}, {"m": pool}, clock, ScalingAdmin({}, clock))
    admin.claims["m"] = ours
    async with pool:
        await admin.claim("m")
        assert ours.epoch == 1
        assert await theirs.seize()
        assert not backend.facts.follows, "it does not know yet"
        await admin.claim("m")
        assert (ours.epoch, leases.leases["chat@here"].owner) == (3, "ours")
