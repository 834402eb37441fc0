"""When a request leaves its gateway's region, where it goes, and who comes back."""

import pytest
from msgspec.structs import replace

from maitred.core.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    ModelHeld,
    ModelLoadFailed,
    ModelLoading,
    ReplicaUnavailable,
)
from maitred.core.flow import PriorityClass
from maitred.core.replica import StepTimes
from maitred.dispatch.config import DispatchConfig, RegionsConfig
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.queue import QueueState, SpillReason
from maitred.dispatch.request import Endpoint
from tests.support.clock import FakeClock
from tests.support.dispatchers import CARD, EMPTY, ScriptedReplica, enter, make_dispatch_request

STEP_S = 0.1
TIMES = StepTimes(fixed_s=STEP_S)
SLOTS = EMPTY.free_sequences


class Setup:
    """A gateway in `eu` with a replica for each region; a step takes a tenth of a second."""

    def __init__(self, *regions, round_trips=(), region="eu", **settings):
        self.clock = FakeClock()
        settings = {"ttft_s": {PriorityClass.STANDARD: 2.0}} | settings
        self.config = DispatchConfig(headroom=0.0, unknown_output_share=1.0, regions=RegionsConfig(**settings))
        self.replicas = {
            name: ScriptedReplica(replace(CARD, region=name), replace(EMPTY, times=TIMES)) for name in regions
        }
        seconds = dict(round_trips)
        endpoints = [
            Endpoint(f"at-{name}", replica, round_trip_s=lambda name=name: seconds.get(name))
            for name, replica in self.replicas.items()
        ]
        self.dispatcher = Dispatcher("m", endpoints, self.config, self.clock, draw=lambda: 0.0, region=region)
        self.core = self.dispatcher.core
        self.made = 0

    def send(self, org="acme", *, max_tokens=40, **fields):
        """Sends a request; returns its entry."""
        self.made += 1
        fields = {"arrived_s": self.clock.monotonic_s(), "max_tokens": max_tokens} | fields
        entry = self.dispatcher.enqueue(make_dispatch_request(self.made, org, **fields))
        enter(entry)
        return entry

    def fill(self, region="eu", org="acme", **fields):
        """Takes all places of a region."""
        return [self.send(org, regions=frozenset({region}), **fields) for _ in range(SLOTS)]

    def end(self, *entries):
        for entry in entries:
            self.core.leave(entry.queued, self.clock.monotonic_s(), finished=True)

    def pass_s(self, seconds):
        self.clock.now_s += seconds
        self.dispatcher.refresh_and_dispatch()

    def check(self, **fields):
        fields = {"arrived_s": self.clock.monotonic_s()} | fields
        return self.dispatcher.load_shedder.check(make_dispatch_request(**fields), self.clock.monotonic_s())


def test_replicas_in_the_own_region_need_no_planner():
    setup = Setup("eu")
    assert setup.send().region == "eu"
    assert setup.core.regions is None
    assert Setup("us", region="us").core.regions is None


def test_a_free_home_keeps_every_request_whatever_it_costs():
    setup = Setup("us", "eu", usd_per_mtok={"eu": 1_000.0})
    entries = [setup.send() for _ in range(SLOTS)]
    assert [entry.region for entry in entries] == ["eu"] * SLOTS
    assert not setup.core.counters.spills


def test_who_would_be_late_goes_to_the_least_of_first_token_round_trip_and_price():
    setup = Setup("eu", "us", "ap", round_trips={"us": 0.1, "ap": 0.3})
    setup.fill()
    entry = setup.send()
    assert (entry.region, entry.queued.spill_reason) == ("us", SpillReason.OBJECTIVE)
    assert setup.core.counters.spills == {("us", SpillReason.OBJECTIVE): 1}

    # 56 tokens for 10 USD a million are 0.56 thousandths of a dollar, and these 0.56 s.
    setup = Setup("eu", "us", "ap", round_trips={"us": 0.1, "ap": 0.3}, usd_per_mtok={"eu": 2.0, "us": 12.0, "ap": 2.0})
    setup.fill()
    assert setup.send().region == "ap"


def test_who_is_in_time_at_home_waits_there():
    setup = Setup("eu", "us")
    setup.fill(max_tokens=5)
    entry = setup.send(max_tokens=5)
    assert entry.queued.state is QueueState.WAITING


def test_nobody_leaves_for_a_gain_below_the_margin():
    setup = Setup("eu", "us", round_trips={"us": 30.0}, margin_s=1.0)
    setup.fill()
    assert setup.send().queued.state is QueueState.WAITING


def test_a_class_without_an_objective_does_not_leave():
    setup = Setup("eu", "us")
    setup.fill()
    entry = setup.send(priority=PriorityClass.BATCH)
    setup.pass_s(500.0)
    assert entry.queued.state is QueueState.WAITING


def test_those_of_the_same_tenant_may_leave_until_home_has_been_fast_for_a_while():
    setup = Setup("eu", "us", back_after_s=5.0)
    at_home = setup.fill(org="globex")
    late = setup.send()
    assert late.region == "us"
    group = ("acme", PriorityClass.STANDARD)
    assert group in setup.core.regions.spilling
    setup.end(*at_home)
    for _ in range(4):
        setup.clock.now_s += 2.0
        assert setup.send().region == "eu", "home has room, and is faster"
    assert group not in setup.core.regions.spilling


def test_a_session_stays_where_its_prefix_is_until_home_is_fast_again():
    setup = Setup("eu", "us", back_after_s=5.0)
    at_home = setup.fill(org="globex")
    assert setup.send(session="s").region == "us"
    setup.end(*at_home)
    stays = setup.send(session="s")
    assert (stays.region, stays.queued.spill_reason) == ("us", SpillReason.SESSION)
    assert setup.send(session="t").region == "eu"
    setup.replicas["us"].say(times=StepTimes(fixed_s=10.0))
    assert setup.send(session="s").region == "eu", "it would be late there"


def test_the_last_of_a_tenant_leave_and_the_first_are_served_at_home():
    setup = Setup("eu", "us")
    setup.fill(max_tokens=6)
    waiting = [setup.send(max_tokens=6) for _ in range(20)]
    setup.pass_s(0.2)
    where = [entry.region for entry in waiting]
    assert where.count("us") == SLOTS
    assert where.index("us") > 0, "the first are in time at home"


def test_who_waits_for_one_region_holds_up_nobody():
    setup = Setup("eu", "us")
    setup.fill("us", org="globex")
    bound = [setup.send("globex", regions=frozenset({"us"})) for _ in range(3)]
    assert setup.send().region == "eu"
    setup.fill("eu", org="acme")
    at_home = setup.send("initech", regions=frozenset({"eu"}))
    assert [entry.queued.state for entry in (*bound, at_home)] == [QueueState.WAITING] * 4


def test_a_request_that_needs_much_of_a_region_is_not_passed_there():
    setup = Setup("eu", "us")
    first, *_ = setup.fill("us", org="globex")
    large = setup.send("globex", regions=frozenset({"us"}), choices=3)
    small = setup.send("globex", regions=frozenset({"us"}))
    setup.end(first)
    setup.pass_s(0.01)
    assert [entry.queued.state for entry in (large, small)] == [QueueState.WAITING] * 2


def test_without_a_replica_at_home_requests_leave_at_once_and_those_that_may_not_are_told():
    setup = Setup("eu", "us")
    setup.send()
    setup.replicas["eu"].set_up(False)
    entry = setup.send()
    assert (entry.region, entry.queued.spill_reason) == ("us", SpillReason.NO_REPLICA)
    with pytest.raises(ReplicaUnavailable, match=r"\(eu\), and it may not leave"):
        setup.check(regions=frozenset({"eu"}))
    assert setup.check(regions=frozenset({"us"})).wait_s == 0.0


def test_requests_that_may_not_leave_wait_for_a_replica_that_comes():
    setup = Setup("eu", "us")
    setup.send()

    def loading():
        raise ModelLoading("It loads.", retry_after_s=4.0)

    card, setup.replicas["eu"].card = setup.replicas["eu"].card, loading
    assert setup.check(regions=frozenset({"eu"})).wait_s >= 4.0
    bound = setup.send(regions=frozenset({"eu"}))
    assert setup.send().region == "us"
    setup.pass_s(4.0)
    assert bound.queued.state is QueueState.WAITING
    setup.replicas["eu"].card = card
    setup.pass_s(0.1)
    assert bound.region == "eu"


def test_who_waits_too_long_for_its_region_fails():
    setup = Setup("eu", "us")
    setup.send()
    setup.replicas["eu"].set_up(False)
    bound = setup.send(regions=frozenset({"eu"}), priority=PriorityClass.INTERACTIVE)
    setup.pass_s(31.0)
    assert isinstance(bound.queued.failure, ReplicaUnavailable)
    assert setup.core.waiting == 0


def test_a_request_whose_replica_was_lost_goes_on_only_where_it_may():
    setup = Setup("eu", "us", "ap")
    bound = setup.send(regions=frozenset({"us"}))
    free = setup.send(regions=frozenset({"us", "ap"}))
    setup.fill("eu")
    setup.replicas[free.region].set_up(False)
    assert bound.region == "us"
    moved = [entry for entry in (bound, free) if entry.region == free.region]
    for entry in moved:
        setup.core.requeue(entry.queued, setup.clock.monotonic_s(), prompts=[0], answer_by_s=None, draw=0.0)
    setup.core.run_dispatch_pass(setup.clock.monotonic_s())
    assert free.region in {"us", "ap"}
    assert bound.region in {"us", None}


def test_a_hedge_stays_in_the_allowed_regions():
    setup = Setup("eu", "us")
    bound = setup.send(regions=frozenset({"eu"}))
    assert setup.core.hedge(bound.queued, setup.clock.monotonic_s()) is None
    assert not bound.has_other_replica
    free = setup.send()
    assert setup.core.hedge(free.queued, setup.clock.monotonic_s()).endpoint_state.region == "us"


def test_demand_is_that_of_the_own_region():
    setup = Setup("eu", "us")
    meter = setup.dispatcher.meter_demand(lambda: None)
    setup.fill("us")
    assert meter.read(setup.clock.monotonic_s()).running == 0
    setup.fill("eu")
    setup.send("globex", regions=frozenset({"us"}))
    late = setup.send("globex", regions=frozenset({"eu"}))
    assert late.queued.state is QueueState.WAITING
    setup.clock.now_s += 1.0
    demand = meter.read(setup.clock.monotonic_s())
    assert (demand.running, demand.waiting, demand.window.requests) == (SLOTS, 1, SLOTS + 1)
    setup = Setup("eu", "us")
    meter = setup.dispatcher.meter_demand(lambda: None)
    setup.fill("eu")
    assert setup.send().region == "us"
    assert meter.read(setup.clock.monotonic_s()).running == SLOTS + 1, "or the own region would never grow"


def _serve(setup, *regions):
    """Keeps the replicas in these regions and removes the others."""
    endpoints = [state.endpoint for state in setup.core.endpoint_states if state.region in regions]
    setup.core.reconfigure(endpoints, setup.config, None, setup.clock.monotonic_s())
    setup.pass_s(0.1)


def test_who_waits_for_a_region_does_not_run_at_home_when_its_last_replica_is_removed():
    setup = Setup("eu", "us")
    setup.fill("us")
    waiting = setup.send(regions=frozenset({"us"}))
    _serve(setup, "eu")
    assert waiting.queued.state is QueueState.WAITING
    assert setup.send().region == "eu"  # it is in nobody's way
    setup.end(waiting)
    setup.pass_s(0.1)
    assert setup.core.regions is not None  # those which run there are bound as well


def test_who_runs_at_a_removed_replica_goes_on_nowhere_but_in_its_regions():
    setup = Setup("eu", "us")
    entry = setup.send(regions=frozenset({"us"}))
    _serve(setup, "eu")
    assert not entry.has_other_replica
    setup.core.requeue(entry.queued, setup.clock.monotonic_s(), prompts=[0], answer_by_s=None, draw=0.0)
    setup.pass_s(0.1)
    assert entry.queued.state is QueueState.WAITING
    setup.end(entry)
    setup.pass_s(0.1)
    assert setup.core.regions is None


def test_a_request_for_other_regions_finds_nothing_where_all_replicas_are_at_home():
    setup = Setup("eu")
    setup.send()
    with pytest.raises(ReplicaUnavailable, match="may not leave"):
        setup.check(regions=frozenset({"us"}))
    entry = setup.send(regions=frozenset({"us"}))
    assert entry.queued.state is QueueState.WAITING
    assert setup.send(regions=frozenset({"eu", "us"})).region == "eu"


@pytest.mark.parametrize("first", ["eu", "us"])
def test_requests_that_take_turns_in_two_regions_wait_for_their_own(first):
    regions = sorted(["eu", "us"], reverse=first == "us")
    setup = Setup("eu", "us")
    running = {region: setup.send(region, choices=3 * SLOTS, regions=frozenset({region})) for region in regions}
    aside = {region: setup.send(region, choices=3 * SLOTS, regions=frozenset({region})) for region in regions}
    setup.pass_s(1.0)
    assert {entry.queued.state for entry in aside.values()} == {QueueState.WAITING}
    last = regions[1]
    setup.end(running[last])
    setup.pass_s(1.0)
    assert aside[last].region == last
    assert aside[first].queued.state is QueueState.WAITING
    setup.end(running[first])
    setup.pass_s(1.0)
    assert aside[first].region == first


def test_a_large_request_for_another_region_is_not_passed_by_those_that_leave_theirs():
    setup = Setup("eu", "us")
    setup.fill("eu", max_tokens=300)
    there = setup.fill("us", max_tokens=300)
    large = setup.send("large", choices=SLOTS, regions=frozenset({"us"}))
    small = [setup.send("small") for _ in range(10)]
    setup.pass_s(3.0)  # they are late
    for entry in there:
        setup.end(entry)
        setup.pass_s(0.5)
    assert large.region == "us"
    assert {entry.queued.state for entry in small} == {QueueState.WAITING}


def test_many_tenants_that_wait_for_one_region_do_not_hide_who_waits_for_an_idle_one():
    setup = Setup("eu", "us", "ap", "in")
    setup.fill("ap")
    there = setup.fill("us")
    for tenant in range(70):
        setup.send(f"of-{tenant}", regions=frozenset({"ap"}), priority=PriorityClass.INTERACTIVE)
    waiting = setup.send("other", regions=frozenset({"us"}))
    setup.end(*there)
    setup.pass_s(1.0)
    assert waiting.region == "us"


def test_many_late_tenants_do_not_hide_who_waits_for_an_idle_region():
    setup = Setup("eu", "us", "ap", ttft_s={PriorityClass.INTERACTIVE: 2.0}, margin_s=1e9)  # none gains enough
    setup.fill("eu", max_tokens=300)
    for tenant in range(70):
        setup.send(f"of-{tenant}", priority=PriorityClass.INTERACTIVE)
    setup.pass_s(3.0)
    assert setup.send("other", regions=frozenset({"us"})).region == "us"


def test_a_region_that_is_down_says_when_to_try_again_whatever_is_ready_elsewhere():
    setup = Setup("eu", "us")
    setup.send()
    setup.replicas["us"].card = _raise(ReplicaUnavailable())
    with pytest.raises(ReplicaUnavailable) as raised:
        setup.check(regions=frozenset({"us"}))
    assert raised.value.retry_after_s == 1.0


@pytest.mark.parametrize("outage", [ModelLoadFailed, ModelHeld])
def test_who_waits_for_a_region_fails_at_once_when_no_replica_will_be_ready_there(outage):
    setup = Setup("eu", "us")
    setup.fill("us")
    waiting = setup.send(regions=frozenset({"us"}))
    setup.replicas["us"].card = _raise(outage("It cannot."))
    setup.pass_s(0.1)
    assert isinstance(waiting.queued.failure, outage)


def test_who_waits_for_a_region_does_not_fail_for_an_outage_of_another_one():
    setup = Setup("eu", "us")
    setup.fill("us")
    waiting = setup.send(regions=frozenset({"us"}))
    setup.replicas["eu"].card = _raise(ModelLoadFailed("It cannot."))
    setup.replicas["us"].card = _raise(ModelLoading("It comes."))
    setup.pass_s(0.1)
    assert waiting.queued.state is QueueState.WAITING


def _raise(error):
    def card():
        raise error

    return card


def test_the_round_trip_counts_in_the_predicted_first_token():
    near, far = (Setup("us", round_trips={"us": seconds}).check() for seconds in (0.0, 0.3))
    assert far.ttft_s == pytest.approx(near.ttft_s + 0.3)
    assert far.wait_s == near.wait_s == 0.0


def test_the_round_trip_in_the_own_region_is_part_of_what_prefills_take():
    near, far = (Setup("eu", round_trips={"eu": seconds}).check() for seconds in (0.0, 0.3))
    assert far == near


def test_a_request_is_predicted_for_the_nearest_replica_that_can_take_it():
    setup = Setup("us", "eu", round_trips={"us": 5.0})
    at_home = setup.check().ttft_s
    assert at_home < 5.0
    setup.fill()
    assert setup.check().ttft_s > at_home


def test_a_deadline_that_the_round_trip_alone_breaks_is_refused_before_the_request_waits():
    setup = Setup("us", round_trips={"us": 0.5})
    now_s = setup.clock.monotonic_s()
    with pytest.raises(DeadlineUnmeetable):
        setup.check(ttft_deadline_s=now_s + 0.4)
    assert setup.check(ttft_deadline_s=now_s + 0.9).ttft_s < 0.9


def test_a_waiting_request_whose_deadline_is_nearer_than_its_region_fails_instead_of_coming_late():
    setup = Setup("eu", "us", round_trips={"us": 0.5})
    others = setup.fill("us")
    bound = setup.send(regions=frozenset({"us"}), ttft_deadline_s=setup.clock.monotonic_s() + 2.0)
    assert bound.queued.state is QueueState.WAITING
    setup.clock.now_s += 1.7
    setup.end(*others)
    setup.pass_s(0.0)
    assert isinstance(bound.queued.failure, DeadlineExceeded)


def test_a_request_waits_at_home_while_the_other_region_is_too_far_for_its_deadline():
    setup = Setup("eu", "us", round_trips={"us": 30.0})
    at_home = setup.fill()
    entry = setup.send(ttft_deadline_s=setup.clock.monotonic_s() + 20.0)
    assert entry.queued.state is QueueState.WAITING
    setup.end(*at_home)
    setup.pass_s(0.1)
    assert entry.region == "eu"


def test_a_first_token_from_far_away_does_not_make_prefills_seem_slower():
    setup = Setup("us", round_trips={"us": 5.0})
    before_s = setup.check().ttft_s
    for _ in range(30):
        entry = setup.send()
        setup.clock.now_s += 5.0 + entry.queued.prefill_s
        entry.on_first_token()
        setup.end(entry)
    assert setup.check().ttft_s == pytest.approx(before_s, rel=0.01)
