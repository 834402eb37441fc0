"""What a gateway tells of its demand, and what it makes of what others tell."""

import pytest

from maitred.app.scaling.shared_demand import SharedDemand
from maitred.scaling.demand import ArrivalWindow, Demand
from maitred.store.scaling.demand import GatewayDemand
from tests.support.clock import FakeClock
from tests.support.scaling.leases import PaperExchange


def demand(clock, waiting=0, requests=0.0):
    return Demand(waiting=waiting, window=ArrivalWindow(start_s=clock.now_s - 1.0, length_s=1.0, requests=requests))


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def exchange():
    return PaperExchange()


@pytest.fixture
async def gateways(clock, exchange):
    """Two gateways that know each other."""
    made = [SharedDemand(exchange, "chat", name, clock) for name in ("one", "other")]
    for _ in range(2):
        for gateway in made:
            await gateway.add_others(demand(clock))
    return made


async def test_each_counts_both(gateways, clock):
    one, other = gateways
    assert (await one.add_others(demand(clock, waiting=2, requests=2.0))).waiting == 2
    whole = await other.add_others(demand(clock, waiting=3, requests=3.0))
    assert (whole.waiting, whole.window.requests) == (5, 5.0)
    clock.now_s += 1.0
    whole = await one.add_others(demand(clock, waiting=1))
    assert (whole.waiting, whole.window.requests) == (4, 3.0)


async def test_without_the_database_the_others_count_as_they_were_for_a_few_seconds(gateways, clock, exchange):
    one, other = gateways
    await other.add_others(demand(clock, waiting=3))
    await one.add_others(demand(clock))
    exchange.away = {"one"}
    counted = []
    for _ in range(7):
        clock.now_s += 1.0
        counted.append((await one.add_others(demand(clock, waiting=1, requests=2.0))).waiting)
    assert counted == [4, 4, 4, 4, 1, 1, 1]
    exchange.away = set()
    await one.add_others(demand(clock))
    clock.now_s += 20.0
    (told,) = [told for told in exchange.told.values() if told.gateway == "one"]
    assert (await other.add_others(demand(clock))).window.requests > 0, "it tells then what has arrived meanwhile"
    assert told.sequence == 11


async def test_what_another_version_tells_does_not_count(gateways, clock, exchange):
    exchange.told["chat", "later"] = GatewayDemand("later", 1, b"\xff")
    assert (await gateways[0].add_others(demand(clock, waiting=1))).waiting == 1
