"""Killed at any moment, a gateway finds no bucket fuller than it was, and not much emptier than it must be.

One process reserves, settles, lets leases expire and is killed. What the ledger then has of it is worked out by hand:
a line for each request that ended, with what it used and when it ended, and one with the whole reservation for each
that did not. The next process begins with that, and both go on side by side: whatever the new one would let through,
the old one would have let through too.
"""

import asyncio
import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationGranted
from maitred.store.counters.memory import MemoryCounters

TICK_S = 1 / 16
REFILL_S = 120.0
LEASE_S = 30.0
CLAIMS = {
    "requests": LimitClaim("requests", CounterKind.BUCKET, 6, 0, refill_per_s=0.1),
    "tokens": LimitClaim("tokens", CounterKind.BUCKET, 120, 0, refill_per_s=4.0),
    "slow": LimitClaim("slow", CounterKind.BUCKET, 120, 0, refill_per_s=1.0),
}


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def monotonic_s(self):
        return 77.0 + self.now_s

    def wall_s(self):
        return 1.7e9 + self.now_s


class Step(msgspec.Struct, frozen=True):
    """A request begins, or one ends, after some time."""

    ticks: int
    begins: bool
    pick: int
    amounts: dict[str, int]


STEPS = st.lists(
    st.builds(
        Step,
        ticks=st.integers(0, 60) | st.integers(0, 16 * 50),
        begins=st.booleans(),
        pick=st.integers(0, 9),
        amounts=st.fixed_dictionaries(
            {"requests": st.integers(0, 1), "tokens": st.integers(0, 80), "slow": st.integers(0, 80)}
        ),
    ),
    max_size=40,
)


class Life:
    """The process that will be killed, and what the ledger has of it."""

    def __init__(self, clock):
        self.clock = clock
        self.counters = MemoryCounters(clock)
        self.running: dict[str, dict[str, int]] = {}
        self.lines: list[tuple[float, dict[str, int]]] = []
        self.made = 0

    async def do(self, step, *, at_once=False):
        self.clock.now_s += step.ticks * TICK_S
        if not step.begins and not at_once:
            if self.running:
                lease = sorted(self.running)[step.pick % len(self.running)]
                reserved = self.running.pop(lease)
                await self.end(lease, {name: min(amount, step.amounts[name]) for name, amount in reserved.items()})
            return
        self.made += 1
        lease = f"lease-{self.made:03d}"
        claims = [msgspec.structs.replace(claim, fixed=step.amounts[counter]) for counter, claim in CLAIMS.items()]
        if isinstance(await self.counters.reserve(Reservation(lease, claims, 0, 0, LEASE_S)), ReservationGranted):
            if at_once:
                await self.end(lease, step.amounts)
            else:
                self.running[lease] = step.amounts

    async def end(self, lease, used):
        await self.counters.settle(lease, used)
        self.lines.append((self.clock.wall_s(), used))

    def restore_from_ledger(self, new, window_s):
        """What the ledger says, second by second, as far back as that."""
        now_s = self.clock.wall_s()
        lines = self.lines + [(now_s, reserved) for reserved in self.running.values()]
        taken = {counter: {} for counter in CLAIMS}
        for time_s, amounts in lines:
            if time_s >= now_s - window_s:
                for counter, amount in amounts.items():
                    second = math.ceil(time_s)
                    taken[counter][second] = taken[counter].get(second, 0) + amount
        pairs = {counter: sorted(seconds.items()) for counter, seconds in taken.items() if seconds}
        new.restore_buckets(pairs, now_s - window_s, REFILL_S)


async def remaining(counters):
    return [reading.remaining for reading in await counters.read(list(CLAIMS.values()))]


@settings(max_examples=150, deadline=None)
@given(before=STEPS, after=STEPS, window_s=st.integers(0, 300) | st.just(math.inf))
def test_no_bucket_is_fuller_than_it_was(before, after, window_s):
    async def check():
        clock = Clock()
        old = Life(clock)
        for step in before:
            await old.do(step)
        new = MemoryCounters(clock)
        old.restore_from_ledger(new, window_s)
        for number, step in enumerate(after):
            was, found = await remaining(old.counters), await remaining(new)
            # What the dead process had reserved would have come back to it at the end of the leases.
            assert all(now <= then for now, then in zip(found, was, strict=True)), (found, was)
            clock.now_s += step.ticks * TICK_S
            claims = [msgspec.structs.replace(claim, fixed=step.amounts[counter]) for counter, claim in CLAIMS.items()]
            wanted = Reservation(f"new-{number}", claims, 0, 0, 1e6)
            if isinstance(await new.reserve(wanted), ReservationGranted):
                assert isinstance(await old.counters.reserve(wanted), ReservationGranted), "the burst was given twice"

    asyncio.run(check())


@settings(max_examples=100, deadline=None)
@given(before=STEPS)
def test_requests_that_end_at_once_leave_buckets_as_they_were(before):
    async def check():
        clock = Clock()
        old = Life(clock)
        for step in before:
            await old.do(step, at_once=True)
        new = MemoryCounters(clock)
        old.restore_from_ledger(new, math.inf)
        for claim, was, found in zip(CLAIMS.values(), await remaining(old.counters), await remaining(new), strict=True):
            # Times are rounded up to a second.
            assert was - claim.refill_per_s - 1 <= found <= was

    asyncio.run(check())
