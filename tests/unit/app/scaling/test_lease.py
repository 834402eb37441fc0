"""Who decides on a pool: one gateway at a time, whatever clocks and database do."""

import asyncio

import pytest

from maitred.app.scaling.lease import LeaseClaim, hold_lease
from tests.support.clock import FakeClock
from tests.support.scaling.leases import PaperLeases


class JumpingClock(FakeClock):
    """A clock of one gateway: its wall time may jump."""

    def __init__(self, time):
        super().__init__()
        self.time = time
        self.jumped_s = 0.0

    def monotonic_s(self):
        return self.time.now_s

    def wall_s(self):
        return self.time.now_s + self.jumped_s


@pytest.fixture
def time():
    return FakeClock()


@pytest.fixture
def leases(time):
    return PaperLeases(time)


@pytest.fixture
def one(leases, time):
    return LeaseClaim(leases, "chat", "one", JumpingClock(time))


@pytest.fixture
def other(leases, time):
    return LeaseClaim(leases, "chat", "other", JumpingClock(time))


async def pass_time(time, seconds, *owners):
    """Lets the owners look once a second."""
    for _ in range(seconds):
        time.now_s += 1
        for owner in owners:
            await owner.hold()


async def test_the_first_one_takes_it_and_the_other_does_not(one, other, time):
    assert await one.hold()
    assert not await other.hold()
    await pass_time(time, 100, one, other)
    assert (one.is_held, other.is_held, one.lease.epoch) == (True, False, 1)


async def test_a_owner_that_is_gone_is_followed_by_another(one, other, time):
    await pass_time(time, 3, one, other)
    await pass_time(time, 10, other)
    assert not other.is_held, "too early to judge"
    await pass_time(time, 15, other)
    assert other.is_held
    assert other.lease.epoch == 2


async def test_a_owner_that_was_only_paused_decides_nothing_any_more(one, other, time):
    assert await one.hold()
    await pass_time(time, 30, other)
    assert not one.is_held, "it knows without asking"
    assert not await one.decide(5, 0, b"")
    assert not await one.hold()
    await pass_time(time, 60, one, other)
    assert (one.is_held, other.is_held) == (False, True)


async def test_the_same_gateway_takes_its_lease_back_at_once_after_a_restart(one, leases, time):
    assert await one.hold()
    again = LeaseClaim(leases, "chat", "one again", JumpingClock(time), former_owner="one")
    assert await again.hold()
    assert again.lease.epoch == 2
    assert not await one.decide(5, 0, b""), "the process before it is fenced off"


async def test_two_copies_of_a_data_folder_do_not_take_the_lease_from_each_other(leases, time):
    copies = [LeaseClaim(leases, "chat", name, JumpingClock(time), former_owner="before") for name in ("one", "other")]
    await pass_time(time, 100, *copies)
    assert [copy.is_held for copy in copies] == [True, False]
    assert copies[0].lease.epoch == 1


async def test_a_lease_whose_answer_was_lost_is_taken_again_at_once(one, leases, time):
    await leases.take(await leases.read("chat"), "one")
    assert await one.hold()
    assert one.lease.epoch == 2


async def test_jumps_of_wall_clocks_mean_nothing(one, other, time):
    await pass_time(time, 2, one, other)
    other._clock.jumped_s = 1e6
    one._clock.jumped_s = -1e6
    await pass_time(time, 60, one, other)
    assert (one.is_held, other.is_held, one.lease.epoch) == (True, False, 1)


async def test_while_the_database_is_away_nobody_decides_and_nobody_is_judged_gone(one, other, leases, time):
    await pass_time(time, 3, one, other)
    leases.away = True
    assert not await one.decide(5, 0, b"")
    await pass_time(time, 60, one, other)
    assert not one.is_held
    leases.away = False
    await pass_time(time, 6, other, one)  # the other one looks first
    assert (one.is_held, other.is_held, one.lease.epoch) == (True, False, 1)
    assert await one.decide(5, 0, b"")


async def test_a_write_that_took_too_long_is_not_carried_out(one, leases, time):
    assert await one.hold()

    def slow():
        time.now_s += 20

    leases.on_write = slow
    assert not await one.decide(5, 0, b"")


async def test_an_operators_number_comes_with_the_next_renewal(one, leases, time):
    assert await one.hold()
    await leases.set_override("chat", 3, 1e9)
    await one.refresh()
    assert one.lease.override_replicas == 3


async def test_what_an_operator_and_the_scaler_ask_at_once_comes_one_after_the_other(one, leases, time):
    await asyncio.gather(one.refresh(), one.refresh(), one.hold())
    assert (one.is_held, one.lease.epoch, one.lease.owner) == (True, 1, "one")
    assert await one.decide(2, 0, b"")


async def test_an_operators_gateway_takes_it_and_the_former_owner_follows(one, other, time):
    assert await one.hold()
    assert await other.seize()
    assert (other.epoch, other.lease.owner) == (2, "other")
    await pass_time(time, 100, one, other)
    assert (one.epoch, other.epoch) == (None, 2)


async def test_it_is_not_seized_while_the_database_is_away(one, other, leases):
    assert await one.hold()
    leases.away = True
    assert not await other.seize()
    leases.away = False
    assert await other.seize()


class PaperMachines:
    """A backend whose agents have seen some epoch."""

    latest_epoch = 0

    def __init__(self):
        self.seen = []
        self.epoch = None

    def check_lease(self):
        self.seen.append(self.epoch())


async def test_agents_that_know_a_later_epoch_than_a_new_database_get_one_after_it(one, monkeypatch):
    backend, pauses = PaperMachines(), []

    async def pause(seconds):
        pauses.append(seconds)
        backend.latest_epoch = 7
        if len(pauses) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await hold_lease(one, backend)
    assert backend.seen == [1, 1, 8, 8]
