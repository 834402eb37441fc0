"""The scaler of one model: from what dispatch sees to the desired numbers of its pool."""

import asyncio
from contextlib import suppress

import msgspec
import pytest
from msgspec.structs import replace

from maitred.app.scaling.forecast_file import ForecastFile
from maitred.app.scaling.lease import LeaseClaim
from maitred.app.scaling.scaler import ModelScaler, RecordedDecision
from maitred.core.replica import StepTimes
from maitred.dispatch.config import DispatchConfig, TenantPoolConfig
from maitred.scaling.config import AutoscalingConfig
from maitred.scaling.decision import ScalingReason
from maitred.scaling.demand import ArrivalWindow, Demand
from maitred.scaling.replica_status import ReplicaPhase
from tests.support.dispatchers import DispatchSetup, enter, leave, make_dispatch_request
from tests.support.scaling.leases import PaperLeases
from tests.support.scaling.pools import TIMES, PaperPool


class Setup(DispatchSetup):
    """A scaler with a queue, a pool and a lease in memory."""

    def __init__(self, pools=None, **settings):
        super().__init__(pools=pools or {})
        self.replica.say(times=TIMES)
        self.leases = PaperLeases(self.clock)
        self.pool = PaperPool(self.clock)
        self.settings = {"enabled": True, "max_replicas": 4, "ttft_s": 1.0, "itl_s": 0.2} | settings
        self.lease = LeaseClaim(self.leases, "chat", "here", self.clock)
        self.scaler = ModelScaler(
            self.pool, self.dispatcher, self.lease, AutoscalingConfig(**self.settings), self.clock
        )
        self.sent = 0

    async def steps(self, count, arrivals=0, org="acme"):
        """Lets the scaler decide once a second, while requests come that the replica cannot take."""
        for _ in range(count):
            self.clock.now_s += 1.0
            self.replica.notify()
            for _ in range(arrivals):
                self.sent += 1
                request = make_dispatch_request(self.sent, org, max_tokens=100, arrived_s=self.clock.now_s)
                enter(self.dispatcher.enqueue(request))
            await self.scaler.step()
        return self.scaler.last.decision if self.scaler.last else None


async def test_a_backlog_brings_replicas():
    setup = Setup()
    await setup.steps(1)
    decision = await setup.steps(10, arrivals=3)
    assert setup.pool.orders[0] == (1, 0), "from the first decision on the pool is scaled"
    assert decision.desired > 1
    assert setup.pool.desired.serving == decision.desired
    assert decision.evidence.waiting > 0


@pytest.mark.parametrize(("org", "desired"), [("rich", 4), ("acme", 1)])
async def test_an_isolated_pool_that_is_full_brings_replicas_though_the_others_are_idle(org, desired):
    setup = Setup(pools={"gold": TenantPoolConfig(tenants=["rich"], share=0.25)})
    await setup.steps(1)
    decision = await setup.steps(3, arrivals=1, org=org)
    assert setup.core.running == (1 if org == "rich" else 3), "the pool has one of four slots"
    assert decision.desired == desired


async def test_the_share_of_a_pool_is_one_of_the_slots_that_there_are():
    config = DispatchConfig(headroom=0.0, pools={"gold": TenantPoolConfig(tenants=["rich"], share=0.25)})
    setup = DispatchSetup(config, replicas=3)
    all_endpoints = [state.endpoint for state in setup.core.endpoint_states]
    running = []
    for endpoints in (all_endpoints[:1], all_endpoints, all_endpoints[:2]):
        setup.dispatcher.reconfigure(endpoints, config, None)
        entries = [setup.enqueue(number, "rich") for number in range(4)]
        for entry in entries:
            enter(entry)
        running.append(setup.core.running)
        for entry in entries:
            leave(entry)
    assert running == [1, 3, 2]


async def test_what_tenants_can_use_now_counts_while_they_wait_and_the_mean_otherwise():
    setup = Setup(pools={"gold": TenantPoolConfig(tenants=["rich"], share=0.25)})
    await setup.steps(1)
    waits = Demand(waiting=3, running=1, confined_requests=12.0, window=ArrivalWindow(start_s=0.0, length_s=1.0))
    assert setup.scaler._usable(waits, setup.clock.now_s + 1.0) == 0.25
    assert setup.scaler._usable(replace(waits, waiting=0), setup.clock.now_s + 1.0) > 0.9
    assert setup.scaler._usable(replace(waits, waiting=0, running=4), setup.clock.now_s + 600.0) < 0.26


async def test_the_forecast_is_kept_where_the_run_ends(tmp_path):
    setup = Setup()
    file = ForecastFile(tmp_path, "chat@here", setup.clock)
    scaler = ModelScaler(
        setup.pool,
        setup.dispatcher,
        setup.lease,
        AutoscalingConfig(**setup.settings),
        setup.clock,
        forecast_file=file,
    )
    run = asyncio.create_task(scaler.run())
    await asyncio.sleep(0)
    scaler.autoscaler.forecast.observe(ArrivalWindow(start_s=setup.clock.now_s, length_s=60.0, requests=600.0))
    run.cancel()
    with suppress(asyncio.CancelledError):
        await run
    assert file.read().level == pytest.approx(10.0, rel=0.01)


async def test_what_changes_nothing_is_not_written():
    setup = Setup()
    await setup.steps(20)
    assert len(setup.leases.written) == len(setup.pool.orders) == 1
    assert [made.is_change for made in setup.scaler.decisions] == [True] + 19 * [False]
    (written,) = setup.leases.written
    assert msgspec.msgpack.decode(written[3], type=RecordedDecision) == setup.scaler.decisions[0]


async def test_while_the_database_is_away_the_fleet_stays_as_it_is_and_goes_on_after():
    setup = Setup()
    await setup.steps(2)
    setup.leases.away = True
    await setup.steps(30, arrivals=3)
    assert setup.pool.orders == [(1, 0)]
    setup.leases.away = False
    decision = await setup.steps(6)
    assert setup.pool.orders[-1] == (decision.desired, 0)
    assert decision.desired > 1, "the demand was observed meanwhile"
    assert decision.evidence.requests_per_s.mean > 1


async def test_who_lost_the_lease_changes_nothing_and_goes_on_observing():
    setup = Setup()
    await setup.steps(2)
    other = LeaseClaim(setup.leases, "chat", "there", setup.clock)
    await other.hold()
    setup.clock.now_s += 60.0
    assert await other.hold()
    await setup.steps(4, arrivals=3)
    for _ in range(10):
        await other.hold()
        await setup.steps(1, arrivals=3)
    assert setup.pool.orders == [(1, 0)]
    assert not setup.lease.is_held
    assert setup.scaler.autoscaler.forecast.level > 0.3


async def test_the_first_decision_of_an_epoch_is_always_carried_out():
    setup = Setup()
    await setup.steps(1)
    setup.lease._has_taken = False  # as if another one had been first, and had gone
    setup.clock.now_s += 60.0
    await setup.steps(1)
    assert [epoch for _, epoch, _, _ in setup.leases.written] == [1, 2]
    assert len(setup.pool.orders) == 2


async def test_an_override_holds_until_its_end():
    setup = Setup()
    await setup.steps(1)
    await setup.leases.set_override("chat", 3, setup.clock.wall_s() + 10.0)
    await setup.scaler.refresh()
    decision = await setup.steps(1)
    assert (decision.reason, decision.desired) == (ScalingReason.OVERRIDE, 3)
    assert setup.pool.desired.serving == 3
    decision = await setup.steps(12)
    assert decision.reason is not ScalingReason.OVERRIDE


async def test_other_limits_hold_from_the_next_decision_on():
    setup = Setup()
    assert (await setup.steps(10, arrivals=3)).desired > 2
    setup.scaler.reconfigure(AutoscalingConfig(**setup.settings | {"max_replicas": 2}))
    decision = await setup.steps(1)
    assert decision.desired == 2
    assert decision.reason is ScalingReason.LIMITED


async def test_the_price_of_the_backend_counts_unless_there_is_another():
    setup = Setup()
    await setup.steps(1)
    assert setup.scaler.autoscaler.objectives.usd_per_hour == 2.0
    setup.scaler.reconfigure(AutoscalingConfig(**setup.settings | {"usd_per_hour": 3.0}))
    await setup.steps(1)
    assert setup.scaler.autoscaler.objectives.usd_per_hour == 3.0


@pytest.mark.parametrize(
    "change",
    [
        {"since_s": 1_000_000.0 - 5.0},
        {"phase": ReplicaPhase.DRAINING},
        {"phase": ReplicaPhase.STARTING},
    ],
)
async def test_only_warm_replicas_that_serve_are_learned_from(change):
    setup = Setup()
    setup.pool.statuses = [msgspec.structs.replace(setup.pool.statuses[0], **change)]
    decision = await setup.steps(3, arrivals=3)
    assert decision.reason is ScalingReason.UNKNOWN_CAPACITY
    assert decision.evidence.replica_requests_per_s is None


async def test_a_report_that_is_late_is_not_learned_from():
    setup = Setup()
    setup.replica.say(times=StepTimes())
    await setup.steps(1, arrivals=1)
    setup.replica.say(times=TIMES, running=1)
    setup.dispatcher.core.refresh(setup.clock.now_s)
    setup.clock.now_s += 60.0
    await setup.scaler.step()
    assert setup.scaler.last.decision.reason is ScalingReason.UNKNOWN_CAPACITY


async def test_an_objective_that_no_number_reaches_is_said_and_not_chased():
    setup = Setup(itl_s=0.001)
    await setup.steps(2, arrivals=1)
    decision = await setup.steps(10)
    assert decision.reason is ScalingReason.UNREACHABLE
    assert setup.pool.desired.serving == 1


async def test_first_tokens_are_measured_and_still_told_to_others():
    setup = Setup()
    told = []
    setup.dispatcher.notify_first_token = None
    setup = Setup()
    setup.scaler._notify_first_token = told.append
    entry = setup.dispatcher.enqueue(make_dispatch_request(1))
    enter(entry)
    setup.clock.now_s += 0.5
    entry.on_first_token()
    leave(entry)
    assert told == [0.5]
    await setup.steps(61)
    assert setup.scaler.outcomes.last[0].measured_s == 0.5


async def test_requests_that_begin_to_wait_bring_a_decision_at_once():
    setup = Setup()
    task = asyncio.create_task(setup.scaler.run())
    try:
        async with asyncio.timeout(300):
            while not setup.scaler.decisions:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)
            made = len(setup.scaler.decisions)
            setup.clock.now_s += 5.0
            for number in range(8):
                enter(setup.dispatcher.enqueue(make_dispatch_request(number)))
            assert setup.scaler._wanted.is_set()
            while len(setup.scaler.decisions) == made:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.001)
    finally:
        task.cancel()
    assert setup.scaler.last.decision.evidence.waiting > 0


async def test_a_decision_that_fails_is_logged_and_the_next_one_is_made(caplog):
    setup = Setup()
    failures = iter([RuntimeError("broken")])
    step = setup.scaler.step

    async def fail_once():
        for failure in failures:
            raise failure
        await step()

    setup.scaler.step = fail_once
    task = asyncio.create_task(setup.scaler.run())
    async with asyncio.timeout(300):
        while not setup.scaler.decisions:
            setup.scaler._wanted.set()
            await asyncio.sleep(0.001)
    task.cancel()
    assert "stay as they are" in caplog.text


@pytest.mark.parametrize(("took_s", "more"), [(0.0, False), (3.0, True)])
async def test_requests_that_take_longer_than_their_steps_need_more_replicas(took_s, more):
    """A replica whose steps explain a part of the time only has a queue that does not drain."""
    setup = Setup(ttft_s=2.0)
    await setup.steps(1)
    entries = []
    for _ in range(120):
        setup.clock.now_s += 1.0
        setup.replica.notify()
        for entry in list(entries):
            if entry.queued.dispatched_s and setup.clock.now_s - entry.queued.dispatched_s >= took_s:
                entry.charge_tokens(output_tokens=10)
                leave(entry)
                entries.remove(entry)
        for _ in range(2):
            setup.sent += 1
            request = make_dispatch_request(setup.sent, max_tokens=10, arrived_s=setup.clock.now_s)
            entries.append(setup.dispatcher.enqueue(request))
            enter(entries[-1])
        await setup.scaler.step()
    assert (setup.scaler.last.decision.desired > 1) is more
    assert (setup.scaler._overhead.mean_s > 1.0) is more


class Crowd:
    """Another gateway of the pool, which gets so many requests per second."""

    def __init__(self, requests_per_s):
        self._requests_per_s = requests_per_s

    async def add_others(self, own):
        window = own.window
        return replace(own, window=replace(window, requests=window.requests + self._requests_per_s * window.length_s))


@pytest.mark.parametrize("others_per_s", [0.0, 8.0])
async def test_what_other_gateways_send_to_a_replica_delays_the_requests_of_this_one(others_per_s, monkeypatch):
    setup = Setup()
    setup.scaler.shared = Crowd(others_per_s)
    got = []
    monkeypatch.setattr(
        setup.scaler._overhead, "observe", lambda *work, requests_per_s, **_: got.append(requests_per_s)
    )
    await setup.steps(1)
    for _ in range(5):
        setup.clock.now_s += 1.0
        setup.replica.notify()
        for _ in range(2):
            setup.sent += 1
            entry = setup.dispatcher.enqueue(make_dispatch_request(setup.sent, arrived_s=setup.clock.now_s))
            enter(entry)
            entry.charge_tokens(output_tokens=10)
            leave(entry)
        await setup.scaler.step()
    assert got[-3:] == pytest.approx([2.0 + others_per_s] * 3)
