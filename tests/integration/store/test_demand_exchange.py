"""Demand of several gateways for one pool, told through a real database."""

from contextlib import AsyncExitStack

import pytest

from maitred.app.scaling.lease import LeaseClaim
from maitred.app.scaling.scaler import ModelScaler
from maitred.app.scaling.shared_demand import SharedDemand
from maitred.scaling.config import AutoscalingConfig
from maitred.store.database import open_database
from maitred.store.scaling.demand import DemandExchange, GatewayDemand
from maitred.store.scaling.lease import ScalerLeases
from tests.support.clock import FakeClock
from tests.support.dispatchers import DispatchSetup, enter, make_dispatch_request
from tests.support.scaling.pools import TIMES, PaperPool
from tests.support.stores import deadline


class Gateway(DispatchSetup):
    """A gateway with a database connection of its own; its replica takes four requests and ends none."""

    def __init__(self, database, name, clock):
        super().__init__(clock=clock)
        self.database, self.sent = database, 0
        self.replica.say(times=TIMES)
        self.pool = PaperPool(clock)
        self.lease = LeaseClaim(ScalerLeases(database, clock), "chat", name, clock)
        shared = SharedDemand(DemandExchange(database), "chat", name, clock)
        config = AutoscalingConfig(enabled=True, max_replicas=8, ttft_s=1.0, itl_s=0.2)
        self.scaler = ModelScaler(self.pool, self.dispatcher, self.lease, config, clock, shared=shared)

    def get(self, requests):
        for _ in range(requests):
            self.sent += 1
            request = make_dispatch_request(self.sent, max_tokens=100, arrived_s=self.clock.now_s)
            enter(self.dispatcher.enqueue(request))

    @property
    def waiting(self):
        return self.scaler.last.decision.evidence.waiting


@pytest.fixture
async def gateways(store_config):
    """Two gateways of one pool; the first one decides."""
    async with AsyncExitStack() as stack:
        clock = FakeClock()
        databases = [await stack.enter_async_context(open_database(store_config)) for _ in range(2)]
        made = [Gateway(database, name, clock) for database, name in zip(databases, ("one", "other"), strict=True)]
        await pass_time(clock, 2, *made)
        assert [gateway.lease.is_held for gateway in made] == [True, False]
        yield made


async def pass_time(clock, seconds, *gateways, other_gets=0):
    """Lets gateways decide once a second, while the last one gets requests."""
    for _ in range(seconds):
        clock.now_s += 1.0
        if other_gets:
            gateways[-1].get(other_gets)
        for gateway in gateways:
            gateway.replica.notify()
            await gateway.scaler.step()


async def test_who_decides_counts_what_the_other_gateway_gets(gateways):
    one, other = gateways
    await pass_time(one.clock, 10, one, other, other_gets=3)
    decision = one.scaler.last.decision
    assert decision.desired > 1
    assert decision.evidence.waiting == pytest.approx(26, abs=3), "thirty have come, and four run"
    assert decision.evidence.requests_per_s.mean == pytest.approx(3.0, rel=0.5)
    assert one.scaler.autoscaler.forecast.level == pytest.approx(other.scaler.autoscaler.forecast.level, rel=0.3)
    assert other.pool.orders == []


async def test_what_a_gateway_gets_while_its_database_is_away_counts_late(gateways):
    one, other = gateways
    with deadline(other.database, 1e-6):
        for _ in range(4):
            one.clock.now_s += 1.0
            other.get(5)
            await other.scaler.step()
            await one.scaler.step()
    assert one.waiting == 0
    await pass_time(one.clock, 8, one, other)
    assert one.waiting == 16
    assert sum(made.decision.evidence.waiting > 0 for made in one.scaler.decisions) == 7


async def test_a_gateway_that_is_gone_counts_no_more_and_its_row_is_removed(gateways):
    one, other = gateways
    await pass_time(one.clock, 10, one, other, other_gets=3)
    await pass_time(one.clock, 4, one)
    assert one.waiting > 20
    await pass_time(one.clock, 3, one)
    assert one.waiting == 0
    exchange = DemandExchange(one.database)
    asker = GatewayDemand("asker", 1, b"")
    assert {told.gateway for told in await exchange.exchange("chat", asker)} == {"one", "other"}
    await pass_time(one.clock, 70, one)
    assert {told.gateway for told in await exchange.exchange("chat", asker)} == {"one"}


async def test_demands_of_another_pool_are_not_read_and_who_wrote_again_is_not_removed(gateways):
    exchange = DemandExchange(gateways[0].database)
    assert await exchange.exchange("embed", GatewayDemand("a", 1, b"first")) == []
    assert await exchange.exchange("embed", GatewayDemand("b", 1, b"")) == [GatewayDemand("a", 1, b"first")]
    await exchange.exchange("embed", GatewayDemand("a", 2, b"second"))
    await exchange.remove("embed", {"a": 1, "b": 1})
    assert await exchange.exchange("embed", GatewayDemand("c", 1, b"")) == [GatewayDemand("a", 2, b"second")]
