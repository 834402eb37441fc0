"""The counters in memory against a model that keeps lists and fractions, and tries every output in turn.

Times are multiples of 1/64 s and rates of 1/8 token/s, which microseconds and billionths of a token hold exactly: the
model and the counters must agree to the last digit.
"""

import asyncio
import math
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationGranted
from maitred.core.errors import StoreUnavailable
from maitred.store.counters.memory import MemoryCounters
from maitred.store.counters.table import LATE_SETTLE_S

TICK_S = 1 / 64
DAY_S = 64.0
SOME_WALL_S = 1.7e9


class StoppedClock:
    def __init__(self):
        self.now_s = 1000.0

    def monotonic_s(self):
        return self.now_s

    def wall_s(self):
        return SOME_WALL_S + self.now_s


class Shape(msgspec.Struct, frozen=True):
    """A counter that the machine plays with."""

    name: str
    kind: CounterKind
    capacity: int
    rate: float = 0.0
    windowed: bool = False
    hard: bool = True


SHAPES = (
    Shape("requests", CounterKind.BUCKET, 6, rate=1 / 8),
    Shape("tokens", CounterKind.BUCKET, 100, rate=25 / 8),
    Shape("soft-tokens", CounterKind.BUCKET, 50, rate=1.0, hard=False),
    Shape("frozen", CounterKind.BUCKET, 300),
    Shape("running", CounterKind.POOL, 4),
    Shape("held-tokens", CounterKind.POOL, 150),
    Shape("day", CounterKind.BUDGET, 200, windowed=True),
    Shape("soft-day", CounterKind.BUDGET, 100, windowed=True, hard=False),
    Shape("total", CounterKind.BUDGET, 1500),
)


class ModelCounter:
    """One counter of the model."""

    def __init__(self, shape, spent):
        self.shape = shape
        self.missing = Fraction(0)
        self.charged = spent
        self.reserved = 0
        self.taken_net = 0  # of a bucket: all that was ever taken, less what came back
        self.may_exceed = max(spent - shape.capacity, 0)  # what settling took beyond what it had reserved

    def available(self):
        if self.shape.kind is CounterKind.BUCKET:
            return math.floor(self.shape.capacity - self.missing)
        return self.shape.capacity - self.charged - self.reserved

    def take(self, amount):
        self.taken_net += amount
        if self.shape.kind is CounterKind.BUCKET:
            self.missing += amount
        else:
            self.reserved += amount

    def give_back(self, amount):
        self.taken_net -= amount
        if self.shape.kind is CounterKind.BUCKET:
            self.missing = max(self.missing - amount, Fraction(0))
        else:
            self.reserved -= amount

    def charge(self, used):
        self.taken_net += used
        if self.shape.kind is CounterKind.BUCKET:
            self.missing += used
        elif self.shape.kind is CounterKind.BUDGET:
            self.charged += used


class Lease:
    def __init__(self, ends_s, taken):
        self.ends_s = ends_s
        self.taken = taken  # counter -> amount
        self.expired = False


class CountersMachine(RuleBasedStateMachine):
    """Random reservations, settlements (some twice, some late), renewals and jumps of time."""

    @initialize(spent=st.dictionaries(st.sampled_from(["day", "soft-day", "total"]), st.integers(0, 250)))
    def make(self, spent):
        self.clock = StoppedClock()
        self.begun_s = self.clock.now_s
        self.spent_before = spent
        self.asked = []

        async def spent_so_far(counters):
            self.asked.extend(counters)
            return {counter: self.spent_of(counter) for counter in counters}

        self.counters = MemoryCounters(self.clock, spent_so_far)
        self.models = {}
        self.leases = {}
        self.settled = []
        self.made = 0
        self.orders = []
        """Claims that come again as the same object, as those of a key do, in the window that they were made in."""

    # --- the rules

    @rule(data=st.data(), output=st.integers(0, 60), lease_ticks=st.integers(1, 64 * 90), kept=st.booleans())
    def reserve(self, data, output, lease_ticks, kept):
        shapes = data.draw(st.lists(st.sampled_from(SHAPES), unique=True, max_size=6))
        claims = [self.draw_claim(data, shape) for shape in shapes]
        if kept:
            claims = tuple(claims)
            self.orders.append((self.day(), claims))
        self.take(data, claims, output, lease_ticks)

    @precondition(lambda self: any(day == self.day() for day, _ in self.orders))
    @rule(data=st.data(), output=st.integers(0, 60), lease_ticks=st.integers(1, 64 * 90))
    def reserve_again(self, data, output, lease_ticks):
        claims = data.draw(st.sampled_from([claims for day, claims in self.orders if day == self.day()]))
        self.take(data, claims, output, lease_ticks)

    def take(self, data, claims, output, lease_ticks):
        least = data.draw(st.integers(0, output))
        self.made += 1
        lease = f"lease-{self.made}"
        models = [self.model_of(claim) for claim in claims]

        answer = self.run(self.counters.reserve(Reservation(lease, claims, output, least, lease_ticks * TICK_S)))

        fitting = [o for o in range(least, output + 1) if all(self.fits(claim, output, o) for claim in claims)]
        if not fitting:
            assert not isinstance(answer, ReservationGranted), "there was no room"
            self.check_denial(answer, claims, output, least)
            return
        assert isinstance(answer, ReservationGranted), "there was room"
        assert answer.output == fitting[-1], "the largest output that fits"
        taken = {}
        for claim, model in zip(claims, models, strict=True):
            amount = claim.amount(answer.output)
            model.take(amount)
            taken[claim.counter] = amount
            if model.shape.kind is CounterKind.BUCKET and model.shape.hard and amount:
                elapsed = Fraction(self.clock.now_s - self.begun_s)
                assert model.taken_net <= model.shape.capacity + Fraction(model.shape.rate) * elapsed
        self.leases[lease] = Lease(self.clock.now_s + lease_ticks * TICK_S, taken)
        self.check_readings(claims, answer.readings)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), habit=st.sampled_from(["less", "exact", "more", "nothing"]))
    def settle(self, data, habit):
        id_ = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases.pop(id_)
        amounts = {}
        for counter, amount in lease.taken.items():
            most = {"less": amount, "exact": amount, "more": amount + 40, "nothing": 0}[habit]
            used = amount if habit == "exact" else data.draw(st.integers(0, most))
            model = self.models[counter]
            # A charge that comes late was reserved by nothing.
            if lease.expired:
                model.charge(used)
                model.may_exceed += used
            elif model.shape.kind is CounterKind.BUCKET and used >= amount:
                model.charge(used - amount)
            elif model.shape.kind is CounterKind.BUCKET:
                model.give_back(amount - used)
            else:
                model.give_back(amount)
                model.charge(used)
                model.may_exceed += max(used - amount, 0)
            if used or data.draw(st.booleans()):
                amounts[counter] = used
        self.run(self.counters.settle(id_, amounts))
        self.settled.append((id_, amounts))

    @precondition(lambda self: self.settled)
    @rule(data=st.data())
    def settle_again(self, data):
        id_, amounts = data.draw(st.sampled_from(self.settled))
        self.run(self.counters.settle(id_, {counter: used + 1 for counter, used in amounts.items()}))

    @rule(data=st.data(), lease_ticks=st.integers(1, 64 * 90))
    def renew(self, data, lease_ticks):
        known = st.sampled_from([*sorted(self.leases), "never-made"])
        ids = data.draw(st.lists(known, unique=True, max_size=4))
        self.run(self.counters.renew(ids, lease_ticks * TICK_S))
        for id_ in ids:
            lease = self.leases.get(id_)
            if lease is not None and not lease.expired:
                lease.ends_s = self.clock.now_s + lease_ticks * TICK_S

    @rule(ticks=st.one_of(st.integers(1, 64), st.integers(1, 64 * 100), st.integers(64 * 3500, 64 * 8000)))
    def pass_time(self, ticks):
        self.clock.now_s += ticks * TICK_S
        for model in self.models.values():
            model.missing = max(model.missing - Fraction(model.shape.rate) * Fraction(ticks, 64), Fraction(0))
        for id_, lease in list(self.leases.items()):
            if lease.ends_s <= self.clock.now_s and not lease.expired:
                lease.expired = True
                for counter, amount in lease.taken.items():
                    self.models[counter].give_back(amount)
            if lease.ends_s + LATE_SETTLE_S <= self.clock.now_s:
                # Too late for the counters; the ledger still has it.
                self.settled.append((id_, dict(self.leases.pop(id_).taken)))

    # --- what must hold

    @invariant()
    def reads_as_the_model(self):
        claims = [self.claim(shape) for shape in SHAPES]
        self.check_readings(claims, self.run(self.counters.read(claims)))

    @invariant()
    def hard_counters_hold(self):
        for model in self.models.values():
            if not model.shape.hard or model.shape.kind is CounterKind.BUCKET:
                continue
            may_exceed = model.may_exceed if model.shape.kind is CounterKind.BUDGET else 0
            assert model.charged + model.reserved <= model.shape.capacity + may_exceed

    @invariant()
    def asks_once(self):
        assert len(self.asked) == len(set(self.asked))

    def teardown(self):
        if not hasattr(self, "counters"):
            return
        for id_ in sorted(self.leases)[::2]:
            self.run(self.counters.settle(id_, {}))
        # Every window ends, every bucket with a refill is full, and what was not settled is past remembering.
        self.clock.now_s += LATE_SETTLE_S + 100 * DAY_S
        for _ in range(len(self.models)):
            self.run(self.counters.renew([], 1.0))
            self.clock.now_s += DAY_S
        size = self.counters.size()
        assert (size.leases, size.expired, size.ends) == (0, 0, 0)
        kept = [shape for shape in SHAPES if shape.name in self.models and not shape.windowed and not shape.rate]
        kept = [shape for shape in kept if shape.kind is CounterKind.BUDGET or self.models[shape.name].missing]
        assert size.counters <= len(kept), "no pool, no full bucket, no window that has passed"
        endless = next(shape for shape in SHAPES if shape.name == "total")
        assert self.run(self.counters.read([self.claim(endless)]))[0].reserved == 0

    # --- the model

    def run(self, coroutine):
        """Budgets are known at once here, so nothing may wait."""
        with pytest.raises(StopIteration) as done:
            coroutine.send(None)
        return done.value.value

    def day(self):
        return int(self.clock.wall_s() // DAY_S)

    def counter_of(self, shape):
        return f"{shape.name}:{self.day()}" if shape.windowed else shape.name

    def spent_of(self, counter):
        # What was spent before the machine began, in the window in which it began.
        name, _, window = counter.partition(":")
        return self.spent_before.get(name, 0) if window in {"", str(int((SOME_WALL_S + 1000) // DAY_S))} else 0

    def claim(self, shape, **more):
        return LimitClaim(
            counter=self.counter_of(shape),
            kind=shape.kind,
            capacity=shape.capacity,
            refill_per_s=shape.rate,
            ends_s=(self.day() + 1) * DAY_S if shape.windowed else None,
            hard=shape.hard,
            **{"fixed": 0, **more},
        )

    def draw_claim(self, data, shape):
        return self.claim(
            shape,
            fixed=data.draw(st.integers(0, max(shape.capacity // 3, 1))),
            per_output=data.draw(st.integers(0, 5)),
            divisor=data.draw(st.integers(1, 7)),
            clamps=data.draw(st.booleans()),
        )

    def model_of(self, claim):
        if claim.counter not in self.models:
            shape = next(shape for shape in SHAPES if shape.name == claim.counter.partition(":")[0])
            self.models[claim.counter] = ModelCounter(shape, self.spent_of(claim.counter))
        return self.models[claim.counter]

    def fits(self, claim, output, granted):
        amount = claim.amount(granted if claim.clamps else output)
        return not claim.hard or amount == 0 or amount <= self.model_of(claim).available()

    def wait_s(self, claim, amount):
        """Infinite: never; -1: nobody knows."""
        model = self.model_of(claim)
        if amount > claim.capacity:
            return math.inf
        if claim.kind is CounterKind.BUCKET:
            over = model.missing + amount - claim.capacity
            return float(over / Fraction(model.shape.rate)) if model.shape.rate else math.inf
        if claim.kind is CounterKind.POOL or model.charged + amount <= claim.capacity:
            return -1.0
        return math.inf if claim.ends_s is None else claim.ends_s - self.clock.wall_s()

    def check_denial(self, denied, claims, output, least):
        waits = {
            index: self.wait_s(claim, claim.amount(least if claim.clamps else output))
            for index, claim in enumerate(claims)
            if not self.fits(claim, output, least)
        }
        assert denied.claim in waits, "a claim without room is named"
        longest = max(waits.values())
        assert waits[denied.claim] >= longest - 1e-5, "it has room last"
        if longest in {math.inf, -1.0}:
            assert denied.retry_after_s is None
        else:
            assert denied.retry_after_s is not None
            assert longest <= denied.retry_after_s <= longest + 1e-5
        self.check_readings(claims, denied.readings)

    def check_readings(self, claims, readings):
        for claim, reading in zip(claims, readings, strict=True):
            model = self.model_of(claim)
            assert reading.capacity == claim.capacity
            assert reading.remaining == model.available()
            if claim.kind is CounterKind.BUCKET:
                assert reading.used == claim.capacity - model.available()
                reset_s = float(model.missing / Fraction(model.shape.rate)) if model.shape.rate else 0.0
                assert reading.reset_s == pytest.approx(reset_s)
            elif claim.kind is CounterKind.POOL:
                assert (reading.used, reading.reset_s) == (model.reserved, 0.0)
            else:
                assert (reading.used, reading.reserved) == (model.charged, model.reserved)
                assert reading.reset_s == (0.0 if claim.ends_s is None else claim.ends_s - self.clock.wall_s())


TestCounters = CountersMachine.TestCase
TestCounters.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Caller(msgspec.Struct, frozen=True):
    """One who reserves while others do, on budgets that nobody has met."""

    budgets: frozenset[str]
    starts_after: int
    """Turns of the event loop."""
    gives_up_after: int | None


CALLERS = st.builds(
    Caller,
    budgets=st.frozensets(st.sampled_from("abc"), min_size=1),
    starts_after=st.integers(0, 6),
    gives_up_after=st.none() | st.integers(0, 6),
)


@settings(max_examples=100, deadline=None)
@given(
    callers=st.lists(CALLERS, min_size=1, max_size=12),
    turns=st.lists(st.integers(0, 4), max_size=6),
    failures=st.sets(st.integers(0, 5), max_size=3),
)
def test_meeting_a_budget_cannot_be_raced(callers, turns, failures):
    """Whatever is slow, fails or is given up: each budget begins once, and holds exactly what was granted."""
    begun = []

    async def spent(counters):
        call = len(begun)
        begun.append(counters)
        for _ in range(turns[call] if call < len(turns) else 1):
            await asyncio.sleep(0)
        if call in failures:
            raise StoreUnavailable
        return {"a": 5}

    counters = MemoryCounters(StoppedClock(), spent)
    granted = []

    async def call(number, caller):
        for _ in range(caller.starts_after):
            await asyncio.sleep(0)
        claims = [LimitClaim(budget, CounterKind.BUDGET, 30, 10) for budget in sorted(caller.budgets)]
        if isinstance(await counters.reserve(Reservation(str(number), claims, 0, 0, 60.0)), ReservationGranted):
            granted.append(caller.budgets)

    async def play():
        async def give_up(task, turns):
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()

        async with asyncio.timeout(300):
            tasks = [asyncio.ensure_future(call(number, caller)) for number, caller in enumerate(callers)]
            patience = [
                asyncio.ensure_future(give_up(task, caller.starts_after + caller.gives_up_after))
                for task, caller in zip(tasks, callers, strict=True)
                if caller.gives_up_after is not None
            ]
            outcomes = await asyncio.gather(*tasks, *patience, return_exceptions=True)
            for outcome in outcomes:
                assert outcome is None or isinstance(outcome, (StoreUnavailable, asyncio.CancelledError)), outcome
            failures.clear()
            claims = [LimitClaim(budget, CounterKind.BUDGET, 30, 0) for budget in "abc"]
            return await counters.read(claims)

    for budget, reading in zip("abc", asyncio.run(play()), strict=True):
        assert reading.used == (5 if budget == "a" else 0)
        assert reading.reserved == 10 * sum(budget in budgets for budgets in granted)
        assert reading.remaining >= 0
