"""Whatever order gateways, pauses and outages come in, two scalers never act in one epoch."""

import asyncio
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from maitred.app.scaling.lease import LeaseClaim
from tests.support.clock import FakeClock
from tests.support.scaling.leases import PaperLeases

GATEWAYS = ("a", "b", "c")


class OwnClock:
    """A gateway's clocks: the wall time jumps, and the monotonic time is its own."""

    def __init__(self, time, offset_s):
        self._time = time
        self._offset_s = offset_s
        self.jumped_s = 0.0

    def monotonic_s(self):
        return self._time.now_s + self._offset_s

    def wall_s(self):
        return self._time.now_s + self.jumped_s


class Spell(NamedTuple):
    """A time in which some gateways run, and the others hang."""

    seconds: int
    running: frozenset[str]
    restarted: frozenset[str]
    jumped_s: float
    store_is_away: bool


NAMES = st.frozensets(st.sampled_from(GATEWAYS))
SPELLS = st.builds(
    Spell,
    seconds=st.sampled_from((2, 9, 25)),
    running=NAMES,
    restarted=st.one_of(st.just(frozenset()), NAMES),
    jumped_s=st.sampled_from((0.0, 1e6, -1e6)),
    store_is_away=st.sampled_from((False, False, True)),
)


@given(st.lists(SPELLS, min_size=6, max_size=20))
def test_each_epoch_has_one_actor_and_epochs_only_grow(spells):
    time = FakeClock()
    leases = PaperLeases(time)
    clocks = {name: OwnClock(time, 1e5 * number) for number, name in enumerate(GATEWAYS)}
    owners = {name: LeaseClaim(leases, "chat", name, clocks[name]) for name in GATEWAYS}
    acted = []

    async def play(spell):
        leases.away = spell.store_is_away
        for name in GATEWAYS:
            clocks[name].jumped_s += spell.jumped_s
            if name in spell.restarted:
                owners[name] = LeaseClaim(leases, "chat", name, clocks[name])
        for _ in range(spell.seconds):
            time.now_s += 1.0
            for name in sorted(spell.running):
                # One that has hung decides first by what it knew, as a process that was stopped between two lines.
                if owners[name]._has_taken and await owners[name].decide(len(acted), 0, b""):
                    acted.append((owners[name].lease.epoch, name))
                await owners[name].hold()
            assert sum(owner.is_held for owner in owners.values()) <= 1

    async def play_all():
        for spell in spells:
            await play(spell)

    asyncio.run(play_all())
    epochs = [epoch for epoch, _ in acted]
    assert epochs == sorted(epochs)
    assert len(dict(acted)) == len(set(acted)), "an epoch with two actors"
