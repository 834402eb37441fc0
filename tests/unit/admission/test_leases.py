"""What is held is kept and given back, in the background too."""

import asyncio

import pytest

from maitred.admission.leases import Leases
from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationGranted
from maitred.core.errors import StoreUnavailable
from tests.support.admission_services import FlakyCounters, StillClock

LEASE_S = 30.0
POOL = LimitClaim("pool", CounterKind.POOL, 10, 1)


class House:
    def __init__(self, lease_s=LEASE_S, **others):
        self.clock = StillClock()
        self.counters = FlakyCounters(self.clock)
        self.leases = Leases(self.counters, lease_s, **others)

    async def take(self, lease):
        assert isinstance(await self.counters.reserve(Reservation(lease, [POOL], 1, 1, LEASE_S)), ReservationGranted)
        self.leases.hold(lease)

    async def used(self):
        (reading,) = await self.counters.read([POOL])
        return reading.used


async def test_all_leases_are_renewed_in_one_call():
    house = House()
    await house.take("a")
    await house.take("b")
    house.clock.now_s = 20.0
    await house.leases.renew()
    assert house.counters.renewed == [({"a", "b"}, LEASE_S)]
    house.clock.now_s = 40.0
    assert await house.used() == 2
    house.clock.now_s = 51.0
    assert await house.used() == 0, "without renewal they end"


async def test_where_nothing_is_held_nothing_is_renewed():
    house = House()
    await house.take("a")
    await house.leases.settle("a", {})
    await house.leases.renew()
    assert house.counters.renewed == []
    assert house.leases.active == 0


@pytest.mark.parametrize("trouble", [StoreUnavailable(), RuntimeError(), OSError()])
async def test_trouble_with_the_renewal_is_told_and_survived(trouble, caplog):
    house = House()
    await house.take("a")
    house.counters.trouble = trouble
    await house.leases.renew()
    assert "1 leases could not be renewed" in caplog.text


@pytest.mark.parametrize("trouble", [StoreUnavailable(), RuntimeError(), OSError()])
async def test_a_settlement_that_failed_is_late_and_its_lease_is_kept(trouble, caplog):
    house = House()
    await house.take("a")
    house.counters.trouble = trouble
    await house.leases.settle("a", {"pool": 1})
    assert (house.leases.active, house.leases.late) == (1, 1)
    assert "tried again" in caplog.text
    await house.leases.settle_late()
    assert house.leases.late == 1
    house.counters.trouble = None
    await house.leases.renew()
    await house.leases.settle_late()
    assert (house.leases.active, house.leases.late) == (0, 0)
    assert house.counters.settled == [("a", {"pool": 1})]
    assert await house.used() == 0


async def test_one_that_cannot_be_settled_holds_up_no_other(monkeypatch):
    house = House()
    for lease in "ab":
        house.leases.settle_later(lease, {})
    settled = []

    async def settle(lease, amounts):
        if lease == "a":
            raise RuntimeError
        settled.append(lease)

    monkeypatch.setattr(house.counters, "settle", settle)
    await house.leases.settle_late()
    assert settled == ["b"]
    assert house.leases.late == 1


async def test_counters_that_hang_hold_up_an_answer_for_a_moment_only():
    house = House(patience_s=0.0)
    await house.take("a")
    house.counters.trouble = asyncio.Event().wait
    await house.leases.settle("a", {})
    assert house.leases.late == 1


async def test_the_background_renews_and_catches_up():
    house = House(lease_s=0.03)
    await house.take("a")
    await house.take("b")
    house.counters.trouble = StoreUnavailable()
    await house.leases.settle("a", {})
    running = asyncio.create_task(house.leases.run())
    house.counters.trouble = None
    async with asyncio.timeout(30):
        while house.leases.late or not house.counters.renewed:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert house.counters.renewed[0] == ({"a", "b"}, 0.03)
    assert house.counters.settled == [("a", {})]
    running.cancel()
    await asyncio.wait([running])


async def test_at_the_end_what_is_late_gets_a_last_chance(caplog):
    house = House()
    running = asyncio.create_task(house.leases.run())
    await asyncio.sleep(0)
    house.leases.settle_later("a", {})
    running.cancel()
    await asyncio.wait([running])
    assert house.counters.settled == [("a", {})]
    assert "not settled" not in caplog.text


async def test_what_is_late_for_ever_is_told(caplog):
    house = House()
    house.counters.trouble = StoreUnavailable()
    running = asyncio.create_task(house.leases.run())
    await asyncio.sleep(0)
    house.leases.settle_later("a", {})
    running.cancel()
    await asyncio.wait([running])
    assert "1 requests are not settled. Their usage is in the ledger." in caplog.text
