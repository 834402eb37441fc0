"""Gateways are cut off from Redis, heal, crash and restart at any time: all of them together stay within every limit.

The machine has the true time and a list of what was admitted; it knows nothing of slices, leases or reports. Each
gateway has a clock that runs a little too fast or too slow. A gateway that is not cut off does its upkeep and renews
its leases as it does in service, and one that is cut off tries to.
"""

import asyncio
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from maitred.core.counters import CounterKind, LimitClaim, Reservation, ReservationGranted
from maitred.core.errors import StoreUnavailable
from maitred.redis.link import LinkLost
from maitred.store.counters.config import CountersConfig
from maitred.store.counters.redis import RedisCounters
from maitred.store.counters.session import CounterMode
from tests.support.servers.redis_server import redis_server

BUDGET, POOL, RATE = 3000, 400, 900
REFILL_PER_S = 2.0
LEASE_S = 30.0
SLICE_LEASE_S = 60.0
LONGEST_REQUEST_S = 0.4 * SLICE_LEASE_S
STEP_S = 9.0
DRIFT = 0.04
WALL_S = 1.7e9


@pytest.fixture(scope="module")
def server():
    with redis_server() as server:
        yield server


class Time:
    """Clock of one gateway, `pace` times as fast as the true time."""

    def __init__(self, machine, pace):
        self.machine, self.pace = machine, pace

    def monotonic_s(self):
        return 1000.0 + self.machine.now_s * self.pace

    def wall_s(self):
        return WALL_S + self.machine.now_s


class Gateway:
    """One gateway, its link to Redis, and its journal."""

    def __init__(self, machine, pace):
        self.id = uuid4().hex
        self.machine = machine
        config = CountersConfig(
            url=machine.server.url,
            namespace=machine.namespace,
            slice_share=machine.share,
            busy_slice_share=machine.busy_share,
            slice_lease_s=SLICE_LEASE_S,
            recovery_s=0.0,
            answer_timeout_s=10.0,
            absence_s=1e9,
        )

        async def nothing_spent(counters):
            return {}

        self.counters = RedisCounters(
            config, Time(machine, pace), self.id, read_spent=nothing_spent, offset_s=lambda: machine.now_s
        )
        self.session = self.counters._session
        self.link = self.session._link
        self.open, self.send = self.link.open, self.link.send
        self.is_cut, self.lost_replies, self.answers_left = False, 0, None
        self.link.open, self.link.send = self.open_if_whole, self.send_if_whole
        self.running = {}  # lease -> (claims, output, when it began)
        self.journal = {}  # lease -> what it used

    async def open_if_whole(self):
        if self.is_cut:
            raise LinkLost("no route")
        await self.open()

    async def send_if_whole(self, *commands):
        if self.answers_left == 0:
            self.is_cut, self.answers_left = True, None
        if self.is_cut:
            raise LinkLost("no route")
        replies = await self.send(*commands)
        if self.answers_left:
            self.answers_left -= 1
        if self.lost_replies:
            self.lost_replies -= 1
            raise LinkLost("the reply was lost")
        return replies

    async def start(self):
        await self.session.start()
        await self.session._stop_upkeep()

    async def upkeep(self):
        try:
            if self.session.mode is CounterMode.SHARED:
                await self.session.report_pending()
                await self.session.renew_slices()
            else:
                await self.session._recover()
        except LinkLost as error:
            self.session.on_link_lost(error)
        self.session._expire()


def claims_of(amount, clamps):
    return [
        LimitClaim("budget", CounterKind.BUDGET, BUDGET, amount, per_output=2, clamps=clamps),
        LimitClaim("pool", CounterKind.POOL, POOL, amount // 4, per_output=1, clamps=clamps),
        LimitClaim("rate", CounterKind.BUCKET, RATE, amount, refill_per_s=REFILL_PER_S),
    ]


class Cuts(RuleBasedStateMachine):
    """Random spends, cuts, lost replies, crashes, take-overs and times."""

    server = None

    @initialize(
        paces=st.lists(st.sampled_from([1 - DRIFT, 1.0, 1 + DRIFT]), min_size=2, max_size=4),
        share=st.sampled_from([0.1, 0.1, 0.5]),
        busy_share=st.sampled_from([0.0, 0.3, 0.5]),
    )
    def begin(self, paces, share, busy_share):
        self.share, self.busy_share = share, busy_share
        self.runner = asyncio.Runner()
        self.namespace = uuid4().hex
        self.now_s = 0.0
        self.charged = 0
        self.refusals = []
        self.missing, self.missing_at_s = 0.0, 0.0
        self.gateways = []
        for pace in paces:
            self.add(pace)

    def add(self, pace):
        gateway = Gateway(self, pace)
        self.runner.run(gateway.start())
        self.gateways.append(gateway)
        return gateway

    @rule(
        n=st.integers(0, 3),
        which=st.sets(st.integers(0, 2), min_size=1),
        amount=st.sampled_from([0, 3, 20, 80]),
        output=st.sampled_from([0, 30, 200]),
        clamps=st.booleans(),
        count=st.sampled_from([1, 1, 4]),
    )
    def spend(self, n, which, amount, output, clamps, count):
        gateway = self.gateways[n % len(self.gateways)]
        claims = [claim for number, claim in enumerate(claims_of(amount, clamps)) if number in which]
        for _ in range(count):
            self.ask(gateway, claims, output)

    @rule(ns=st.lists(st.integers(0, 3), min_size=1, max_size=4), which=st.integers(0, 2), settles=st.booleans())
    def take_all(self, ns, which, settles):
        """Takes all that each of the gateways gives of one counter."""
        for n in ns:
            gateway, amount = self.gateways[n % len(self.gateways)], 1024
            while amount:
                claim = claims_of(amount if which != 1 else 4 * amount, clamps=False)[which]
                lease = self.ask(gateway, [claim], 0)
                if lease is None:
                    amount //= 4
                elif settles and which != 1:  # Of the pool it would come back for ever.
                    self.end(gateway, lease, 1.0)

    def ask(self, gateway, claims, output):
        """Reserves; returns the lease if it was granted."""
        lease = uuid4().hex
        asked = Reservation(lease, claims, output, min(output, 1), LEASE_S)
        try:
            answer = self.runner.run(gateway.counters.reserve(asked))
        except StoreUnavailable as refusal:
            self.refusals.append(refusal.retry_after_s)
            return None
        if not isinstance(answer, ReservationGranted):
            return None
        gateway.running[lease] = claims, answer.output, self.now_s
        for claim in claims:
            if claim.kind is CounterKind.BUCKET:
                self.refill()
                self.missing += claim.amount(answer.output)
        return lease

    def refill(self):
        self.missing = max(0.0, self.missing - (self.now_s - self.missing_at_s) * REFILL_PER_S)
        self.missing_at_s = self.now_s

    def end(self, gateway, lease, part):
        claims, output, _ = gateway.running.pop(lease)
        used = {c.counter: c.amount(output) for c in claims}
        if "budget" in used:
            used["budget"] = int(used["budget"] * part)
            self.charged += used["budget"]
        used.pop("pool", None)
        gateway.journal[lease] = used
        self.runner.run(gateway.counters.settle(lease, used))

    @rule(n=st.integers(0, 3), which=st.integers(0, 9), part=st.sampled_from([0.0, 0.5, 1.0]))
    def settle(self, n, which, part):
        gateway = self.gateways[n % len(self.gateways)]
        if gateway.running:
            self.end(gateway, list(gateway.running)[which % len(gateway.running)], part)

    @rule(seconds=st.sampled_from([0.5, 1.0, 8.0, 30.0, 70.0]))
    def wait(self, seconds):
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(self.now_s + STEP_S, until_s)
            for gateway in self.gateways:
                for lease, (_, _, began_s) in list(gateway.running.items()):
                    if self.now_s - began_s >= LONGEST_REQUEST_S - STEP_S:
                        self.end(gateway, lease, 1.0)
                self.runner.run(gateway.counters.renew(list(gateway.running), LEASE_S))
                self.runner.run(gateway.upkeep())

    @rule(n=st.integers(0, 3))
    def cut(self, n):
        self.gateways[n % len(self.gateways)].is_cut = True

    @rule(
        n=st.integers(0, 3),
        which=st.integers(0, 2),
        seconds=st.sampled_from([0.5, 30.0, 70.0]),
        first=st.sampled_from(["nobody", "the one that is cut off", "all"]),
    )
    def cut_while_all_is_taken(self, n, which, seconds, first):
        """Cuts one off that holds slices, and takes all there is of one counter before and after a time."""
        everybody = [*range(len(self.gateways))]
        for gateway in self.gateways:
            self.ask(gateway, [claims_of(4, clamps=False)[which]], 0)
            self.runner.run(gateway.upkeep())
        one = n % len(self.gateways)
        self.gateways[one].is_cut = True
        if first != "nobody":
            self.take_all([one] if first != "all" else everybody, which, settles=True)
        self.wait(seconds)
        self.take_all([*(each for each in everybody if each != one), one], which, settles=False)

    @rule(seconds=st.sampled_from([30.0, 50.0]))
    def cut_all(self, seconds):
        """Cuts all off that have a slice of the rate, which they take as it is refilled."""
        everybody = [*range(len(self.gateways))]
        for gateway in self.gateways:
            self.ask(gateway, [claims_of(4, clamps=False)[2]], 0)
        for gateway in self.gateways:
            self.runner.run(gateway.upkeep())
        for gateway in self.gateways:
            gateway.is_cut = True
        self.take_all(everybody, 2, settles=True)
        self.wait(seconds)
        self.take_all(everybody, 2, settles=True)

    @rule(n=st.integers(0, 3))
    def heal(self, n):
        gateway = self.gateways[n % len(self.gateways)]
        gateway.is_cut = False
        self.runner.run(gateway.upkeep())

    @rule(n=st.integers(0, 3), answers=st.integers(1, 3))
    def heal_and_cut_again(self, n, answers):
        """Heals a line, which is cut again after a few answers, and takes what there is of each counter."""
        gateway = self.gateways[n % len(self.gateways)]
        gateway.is_cut, gateway.answers_left = False, answers
        self.runner.run(gateway.upkeep())
        gateway.is_cut, gateway.answers_left = True, None
        self.runner.run(gateway.upkeep())

    @rule(
        n=st.integers(0, 3),
        which=st.sampled_from([0, 2]),
        amount=st.sampled_from([20, 80, 300]),
        answers=st.integers(1, 3),
        part=st.sampled_from([None, 0.0, 1.0]),
    )
    def lose_a_grant_and_cut_again(self, n, which, amount, answers, part):
        """Loses the answer to a reservation out of a slice, ends it if it runs, and cuts the line twice."""
        everybody = [*range(len(self.gateways))]
        one = n % len(self.gateways)
        gateway = self.gateways[one]
        gateway.is_cut = False
        for _ in range(2):
            self.ask(gateway, [claims_of(4, clamps=False)[which]], 0)
            self.runner.run(gateway.upkeep())
        others = [each for each in everybody if each != one]
        self.take_all(others, which, settles=True)
        gateway.lost_replies = 1
        lease = self.ask(gateway, [claims_of(amount, clamps=False)[which]], 0)
        if lease is not None and part is not None:
            self.end(gateway, lease, part)
        self.heal_and_cut_again(one, answers)
        self.take_all([*others, one], which, settles=False)

    @rule(n=st.integers(0, 3), replies=st.integers(1, 3))
    def lose_replies(self, n, replies):
        self.gateways[n % len(self.gateways)].lost_replies = replies

    @rule(n=st.integers(0, 3))
    def upkeep(self, n):
        self.runner.run(self.gateways[n % len(self.gateways)].upkeep())

    @rule(n=st.integers(0, 3), seconds=st.sampled_from([0.5, 40.0]), which=st.integers(0, 2))
    def take_over_and_cut(self, n, seconds, which):
        """A gateway dies while its requests go on at another one, which is cut off."""
        dead = self.gateways.pop(n % len(self.gateways))
        self.runner.run(dead.link.close())
        heir = self.add(1.0)
        heir.is_cut = dead.is_cut
        for lease, used in dead.journal.items():
            self.runner.run(heir.counters.settle_orphan(lease, used, dead.id))
        self.runner.run(heir.counters.release_gateway(dead.id, list(dead.running)))
        heir.journal = dead.journal
        for lease, (claims, output, _) in dead.running.items():
            self.runner.run(heir.counters.resume(Reservation(lease, claims, output, output, LEASE_S)))
        heir.running = dead.running
        self.runner.run(heir.upkeep())
        heir.is_cut = True
        self.wait(seconds)
        self.take_all([*range(len(self.gateways))], which, settles=False)

    @rule(n=st.integers(0, 3), adopted=st.booleans())
    def crash(self, n, adopted):
        dead = self.gateways.pop(n % len(self.gateways))
        self.runner.run(dead.link.close())
        restarted = self.add(1.0)
        restarted.is_cut = dead.is_cut
        if adopted:
            for lease, (claims, output, _) in dead.running.items():  # What fails costs nothing, but counts in rates.
                dead.journal[lease] = {c.counter: c.amount(output) for c in claims if c.kind is CounterKind.BUCKET}
            for lease, used in dead.journal.items():
                self.runner.run(restarted.counters.settle_orphan(lease, used, dead.id))
            self.runner.run(restarted.counters.release_gateway(dead.id))

    @invariant()
    def stays_within_every_limit(self):
        if not hasattr(self, "gateways"):
            return
        reserved = {"budget": 0, "pool": 0, "rate": 0}
        for gateway in self.gateways:
            for claims, output, _ in gateway.running.values():
                for claim in claims:
                    reserved[claim.counter] += claim.amount(output)
        assert all(self.refusals), "each says when to come back"
        assert self.charged + reserved["budget"] <= BUDGET
        assert reserved["pool"] <= POOL
        self.refill()
        # Clocks that run too fast refill slices too fast; and whole tokens are rounded once per gateway.
        most = max(self.share, self.busy_share)
        assert self.missing <= RATE + len(self.gateways) + DRIFT * min(1.0, most * 4) * REFILL_PER_S * self.now_s

    def teardown(self):
        if hasattr(self, "runner"):
            for gateway in self.gateways:
                self.runner.run(gateway.link.close())
            self.runner.close()


def test_no_cut_and_no_crash_passes_a_limit(server):
    class OnServer(Cuts):
        pass

    OnServer.server = server
    run_state_machine_as_test(
        OnServer,
        settings=settings(
            max_examples=80,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
