"""What is held is kept and given back, in the background too."""

import asyncio

import pytest

from maitred.admission.leases import Leases
from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationGranted
from maitred.core.errors import StoreUnavailable
from tests.support.admission_services import FlakyCounters, StillClock

LEASE_S = 30.0
POOL = LimitClaim("pool", CounterKind.POOL, 10, 1)


class LeasesSetup:
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
    setup = LeasesSetup()
    await setup.take("a")
    await setup.take("b")
    setup.clock.now_s = 20.0
    await setup.leases.renew()
    assert setup.counters.renewed == [({"a", "b"}, LEASE_S)]
    setup.clock.now_s = 40.0
    assert await setup.used() == 2
    setup.clock.now_s = 51.0
    assert await setup.used() == 0, "without renewal they end"


async def test_where_nothing_is_held_nothing_is_renewed():
    setup = LeasesSetup()
    await setup.take("a")
    await setup.leases.settle("a", {})
    await setup.leases.renew()
    assert setup.counters.renewed == []
    assert setup.leases.active == 0


@pytest.mark.parametrize("trouble", [StoreUnavailable(), RuntimeError(), OSError()])
async def test_a_failed_renewal_is_logged_and_survived(trouble, caplog):
    setup = LeasesSetup()
    await setup.take("a")
    setup.counters.trouble = trouble
    await setup.leases.renew()
    assert "1 leases could not be renewed" in caplog.text


@pytest.mark.parametrize("trouble", [StoreUnavailable(), RuntimeError(), OSError()])
async def test_a_settlement_that_failed_is_late_and_its_lease_is_kept(trouble, caplog):
    setup = LeasesSetup()
    await setup.take("a")
    setup.counters.trouble = trouble
    await setup.leases.settle("a", {"pool": 1})
    assert (setup.leases.active, setup.leases.late) == (1, 1)
    assert "tried again" in caplog.text
    await setup.leases.settle_late()
    assert setup.leases.late == 1
    setup.counters.trouble = None
    await setup.leases.renew()
    await setup.leases.settle_late()
    assert (setup.leases.active, setup.leases.late) == (0, 0)
    assert setup.counters.settled == [("a", {"pool": 1})]
    assert await setup.used() == 0


async def test_one_that_cannot_be_settled_holds_up_no_other(monkeypatch):
    setup = LeasesSetup()
    for lease in "ab":
        setup.leases.settle_later(lease, {})
    settled = []

    async def settle(lease, amounts):
        if lease == "a":
            raise RuntimeError
        settled.append(lease)

    monkeypatch.setattr(setup.counters, "settle", settle)
    await setup.leases.settle_late()
    assert settled == ["b"]
    assert setup.leases.late == 1


async def test_counters_that_hang_hold_up_an_answer_for_a_moment_only():
    setup = LeasesSetup(patience_s=0.0)
    await setup.take("a")
    setup.counters.trouble = asyncio.Event().wait
    await setup.leases.settle("a", {})
    assert setup.leases.late == 1


async def test_the_background_renews_and_catches_up():
    setup = LeasesSetup(lease_s=0.03)
    await setup.take("a")
    await setup.take("b")
    setup.counters.trouble = StoreUnavailable()
    await setup.leases.settle("a", {})
    running = asyncio.create_task(setup.leases.run())
    setup.counters.trouble = None
    async with asyncio.timeout(300):
        while setup.leases.late or not setup.counters.renewed:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert setup.counters.renewed[0] == ({"a", "b"}, 0.03)
    assert setup.counters.settled == [("a", {})]
    running.cancel()
    await asyncio.wait([running])


async def test_at_the_end_what_is_late_gets_a_last_chance(caplog):
    setup = LeasesSetup()
    running = asyncio.create_task(setup.leases.run())
    await asyncio.sleep(0)
    setup.leases.settle_later("a", {})
    running.cancel()
    await asyncio.wait([running])
    assert setup.counters.settled == [("a", {})]
    assert "not settled" not in caplog.text


async def test_leases_that_never_settle_are_logged(caplog):
    setup = LeasesSetup()
    setup.counters.trouble = StoreUnavailable()
    running = asyncio.create_task(setup.leases.run())
    await asyncio.sleep(0)
    setup.leases.settle_later("a", {})
    running.cancel()
    await asyncio.wait([running])
    assert "1 requests are not settled. Their usage is in the ledger." in caplog.text
