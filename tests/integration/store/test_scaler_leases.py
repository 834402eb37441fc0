"""Leases of scalers on both databases: one owner an epoch, and no decision of an earlier one."""

import asyncio

import pytest

from maitred.app.scaling.lease import LeaseClaim
from maitred.core.clock import SystemClock
from maitred.store.database import open_database
from maitred.store.scaling.lease import ScalerLease, ScalerLeases
from tests.support.clock import FakeClock
from tests.support.stores import deadline


@pytest.fixture
async def leases(store_config):
    async with open_database(store_config) as database:
        yield ScalerLeases(database, SystemClock())


async def test_a_pool_that_nobody_has_decided_on_has_no_owner(leases):
    assert await leases.read("chat") == ScalerLease(pool="chat")


async def test_a_lease_is_taken_once(leases):
    seen = await leases.read("chat")
    first = await leases.take(seen, "a")
    assert (first.owner, first.epoch) == ("a", 1)
    assert await leases.take(seen, "b") is None
    assert await leases.read("chat") == first


async def test_it_is_taken_after_an_epoch_that_somebody_has_seen(leases):
    taken = await leases.take(await leases.read("chat"), "one", after_epoch=7)
    assert taken.epoch == (await leases.read("chat")).epoch == 8
    assert (await leases.take(taken, "other", after_epoch=3)).epoch == 9


async def test_of_many_at_once_one_takes_it(leases):
    seen = await leases.read("chat")
    taken = await asyncio.gather(*(leases.take(seen, f"gateway-{number}") for number in range(8)))
    assert len([lease for lease in taken if lease is not None]) == 1


async def test_what_was_renewed_is_not_taken(leases):
    held = await leases.take(await leases.read("chat"), "a")
    assert (await leases.renew(held)).renewals == 1
    assert await leases.take(held, "b") is None
    assert (await leases.read("chat")).owner == "a"


async def test_a_owner_of_an_earlier_epoch_writes_nothing(leases):
    old = await leases.take(await leases.read("chat"), "a")
    await leases.decide(old, 2, 0, b"first")
    new = await leases.take(await leases.read("chat"), "b")
    assert new.desired == 2, "what was decided stays"
    assert await leases.decide(old, 9, 0, b"late") is None
    assert await leases.renew(old) is None
    assert (await leases.decide(new, 3, 1, b"second")).desired == 3
    now = await leases.read("chat")
    assert (now.desired, now.asleep, now.epoch, now.owner) == (3, 1, 2, "b")
    assert [(one.decision, one.epoch) for one in await leases.decisions("chat")] == [(b"second", 2), (b"first", 1)]


async def test_an_override_is_kept_beside_what_is_decided(leases):
    await leases.set_override("chat", 4, 1_000.0)
    held = await leases.take(await leases.read("chat"), "a")
    assert (held.override_replicas, held.override_until_s) == (4, 1_000.0)
    await leases.set_override("chat", None, None)
    assert (await leases.decide(held, 1, 0, b"")).override_replicas is None, "the decision does not bring it back"


async def test_only_the_last_decisions_are_kept(leases, monkeypatch):
    monkeypatch.setattr("maitred.store.scaling.lease._KEPT_DECISIONS", 3)
    held = await leases.take(await leases.read("chat"), "a")
    other = await leases.take(await leases.read("embed"), "a")
    await leases.decide(other, 1, 0, b"other")
    for number in range(7):
        await leases.decide(held, number, 0, b"%d" % number)
    kept = await leases.decisions("chat")
    assert [one.decision for one in kept] == [b"6", b"5", b"4"]
    assert [one.decision for one in await leases.decisions("chat", before=kept[0].id, limit=1)] == [b"5"]
    assert len(await leases.decisions("embed")) == 1


async def test_pools_of_gateways_that_are_gone_are_forgotten(store_config):
    clock = FakeClock()
    async with open_database(store_config) as database:
        leases = ScalerLeases(database, clock)
        old = await leases.take(await leases.read("old"), "a")
        await leases.decide(old, 1, 0, b"")
        clock.now_s += 91 * 86_400
        await leases.take(await leases.read("new"), "b")
        assert await leases.read("old") == ScalerLease(pool="old")
        assert await leases.decisions("old") == []


async def test_two_gateways_follow_each_other_through_pauses_and_an_outage(store_config):
    clock = FakeClock()
    async with open_database(store_config) as database, open_database(store_config) as others:
        one = LeaseClaim(ScalerLeases(database, clock), "chat", "one", clock)
        other = LeaseClaim(ScalerLeases(others, clock), "chat", "other", clock)

        async def pass_time(seconds, *claims):
            for _ in range(seconds):
                clock.now_s += 1.0
                for claim in claims:
                    await claim.hold()
                assert not (one.is_held and other.is_held)

        await pass_time(5, one, other)
        assert await one.decide(2, 0, b"one")
        with deadline(database, 1e-6), deadline(others, 1e-6):
            assert not await one.decide(9, 0, b"lost")
            await pass_time(20, one, other)
        await pass_time(10, other, one)
        assert await one.decide(3, 0, b"after"), "nobody was judged by an outage"
        await pass_time(30, other)
        assert not await one.decide(9, 0, b"late")
        assert await other.decide(4, 0, b"other")
        stored = await ScalerLeases(database, clock).decisions("chat")
        assert [(row.epoch, row.decision) for row in stored] == [(2, b"other"), (1, b"after"), (1, b"one")]
