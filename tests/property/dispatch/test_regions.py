"""Replicas in three regions: whatever comes, ends, dies, is removed and returns, no request runs where it may not, none
waits beside an idle replica of its own region, none leaves its region without need or takes a place there for which
another one waits, and in the end nothing is left of any.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from maitred.core.flow import PriorityClass
from maitred.dispatch.config import DispatchConfig, RegionsConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.queue import QueueState, SpillReason
from maitred.dispatch.request import Endpoint
from maitred.fairness.config import QueueOrderConfig
from tests.support.dispatchers import CARD, EMPTY, ScriptedReplica, make_dispatch_request

OBJECTIVE_S = 2.0
CROWD = 70
REGIONS = ("eu", "us", "ap")
ALLOWED = st.none() | st.frozensets(st.sampled_from(REGIONS), min_size=1)
CONFIGS = [
    DispatchConfig(headroom=headroom, line=QueueOrderConfig(policy=policy), regions=regions, max_wait_s={})
    for headroom, policy in ((0.0, "fifo"), (0.25, "fair"), (0.0, "priority"))
    for regions in [RegionsConfig(ttft_s=dict.fromkeys(PriorityClass, OBJECTIVE_S), back_after_s=5.0)]
]


class Engine(ScriptedReplica):
    """Reports at once what runs there."""

    def __init__(self, region, load=EMPTY):
        super().__init__(replace(CARD, region=region), load)
        self.runs = {}

    def hear(self):
        slots = sum(queued.cost.slots for queued in self.runs)
        blocks = sum(queued.cost.blocks for queued in self.runs)
        running = min(slots, EMPTY.free_sequences)
        self._load = replace(
            EMPTY,
            running=running,
            waiting=slots - running,
            free_sequences=EMPTY.free_sequences - running,
            free_blocks=max(0, EMPTY.total_blocks - blocks),
        )


class RegionMachine(RuleBasedStateMachine):
    @initialize(config=st.sampled_from(CONFIGS), engines=st.lists(st.sampled_from(REGIONS), min_size=1, max_size=4))
    def start(self, config, engines):
        self.engines = {f"{region}-{number}": Engine(region) for number, region in enumerate([*engines, "us"])}
        self.endpoints = {name: Endpoint(name, engine) for name, engine in self.engines.items()}
        """Those of the engines that were not removed; requests may still run at the others."""
        self.config = config
        self.core = DispatchCore(list(self.endpoints.values()), config, region="eu")
        self.now_s = 1_000_000.0
        self.made = 0
        self.waiting = []
        self.running = []
        self.missed = set()
        """Tenants and classes of which a request has waited for too long."""
        self.is_crowded = False

    @rule(
        org=st.integers(0, 2),
        tokens=st.integers(1, 300),
        max_tokens=st.integers(1, 300),
        choices=st.sampled_from([1, 1, 2, 3, 4, 12]),
        priority=st.sampled_from([PriorityClass.STANDARD, PriorityClass.BACKGROUND]),
        session=st.sampled_from([None, None, "a", "b"]),
        regions=ALLOWED,
    )
    def join(self, org, **fields):
        self.made += 1
        queued = self.core.new_entry(make_dispatch_request(self.made, f"org-{org}", arrived_s=self.now_s, **fields))
        if self.core.dispatch_now(queued, self.now_s):
            self._on_dispatched(queued)
        else:
            self.core.join(queued, self.now_s)
            self.waiting.append(queued)

    @precondition(lambda self: not self.is_crowded)
    @rule(regions=st.permutations(REGIONS[1:]))
    def crowd(self, regions):
        """Many tenants come at once for one region, and behind them one for another that is full."""
        self.is_crowded = True
        crowded, other = regions
        self.join("large", choices=4, regions=frozenset({other}))
        for tenant in range(CROWD):
            self.join(f"of-{tenant}", max_tokens=300, regions=frozenset({crowded}))
        self.join("last", regions=frozenset({other}))

    @rule(regions=st.permutations(REGIONS))
    def come_by_turns(self, regions):
        """In two regions, two requests have more sequences than there are slots."""
        for region in 2 * regions[:2]:
            self.join("of-turns", choices=12, regions=frozenset({region}))

    @rule(passes_s=st.sampled_from([0.0, 0.2, OBJECTIVE_S, 7.0]))
    def turn(self, passes_s):
        self.now_s += passes_s
        for queued in self.waiting:
            if self.now_s - queued.request.arrived_s > OBJECTIVE_S:
                self.missed.add((queued.tenant.id, queued.flow.priority))
        away = [queued for queued in self.waiting if queued in queued.queue.away]
        for queued in self.core.run_dispatch_pass(self.now_s):
            self.waiting.remove(queued)
            assert queued.state is QueueState.DISPATCHED
            self._on_dispatched(queued)
            if queued.spill_reason in (SpillReason.OBJECTIVE, SpillReason.SESSION):
                region = queued.allocation.endpoint_state.region
                passed = [other for other in away if other in other.queue.away]
                assert not any(_may_run_in(region, other) for other in passed), "it has passed one who waits for this"

    def _on_dispatched(self, queued):
        state = queued.allocation.endpoint_state
        engine = self.engines[state.endpoint.name]
        regions = queued.request.regions
        assert engine.up
        assert state.endpoint.name in self.endpoints
        assert regions is None or state.region in regions, "it runs where it may not"
        if state.region == "eu":
            assert queued.spill_reason is None
        elif queued.spill_reason is SpillReason.OBJECTIVE:
            assert (queued.tenant.id, queued.flow.priority) in self.missed, "it has left without need"
        elif queued.spill_reason is SpillReason.NO_REPLICA:
            assert not any(engine.up for engine in self._at("eu"))
        elif queued.spill_reason is SpillReason.RESIDENCY:
            assert regions is not None
            assert "eu" not in regions
        else:
            assert queued.requeues or queued.request.session is not None
        self.running.append(queued)
        engine.runs[queued] = None
        self.core.on_submitted(queued)
        engine.hear()

    def _at(self, region):
        return [engine for engine in self.served if engine.card_region == region]

    @property
    def served(self):
        return [self.engines[name] for name in self.endpoints]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), finished=st.booleans())
    def end(self, data, finished):
        queued = data.draw(st.sampled_from(self.running))
        self._end(queued, finished=finished)

    @rule(data=st.data())
    def end_all(self, data):
        for queued in list(self.engines[data.draw(st.sampled_from(sorted(self.engines)))].runs):
            self._end(queued)

    def _end(self, queued, *, finished=True):
        self.running.remove(queued)
        engine = self.engines[queued.allocation.endpoint_state.endpoint.name]
        del engine.runs[queued]
        engine.hear()
        self.core.leave(queued, self.now_s, finished=finished)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data):
        queued = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(queued)
        self.core.leave(queued, self.now_s, finished=False)

    @rule(data=st.data())
    def die(self, data):
        engine = self.engines[data.draw(st.sampled_from(sorted(self.engines)))]
        engine.up = False
        for queued in list(engine.runs):
            self.running.remove(queued)
            self.core.requeue(queued, self.now_s, prompts=[0], answer_by_s=None, draw=0.0)
            self.waiting.append(queued)
        engine.runs.clear()
        engine.hear()

    @rule()
    def revive(self):
        for engine in self.engines.values():
            engine.up = True

    @precondition(lambda self: len(self.endpoints) > 1)
    @rule(data=st.data())
    def remove(self, data):
        del self.endpoints[data.draw(st.sampled_from(sorted(self.endpoints)))]
        self._reconfigure()

    @precondition(lambda self: len(self.endpoints) < 5)
    @rule(region=st.sampled_from(REGIONS))
    def add(self, region):
        name = f"{region}-{len(self.engines)}"
        self.engines[name] = Engine(region)
        self.endpoints[name] = Endpoint(name, self.engines[name])
        self._reconfigure()

    def _reconfigure(self):
        self.core.reconfigure(list(self.endpoints.values()), self.config, None, self.now_s)

    @invariant()
    def nobody_waits_beside_an_idle_replica(self):
        if not hasattr(self, "core"):
            return
        self.turn(0.0)
        for queued in self.waiting:
            permitted = [engine for engine in self.served if engine.up and _may_run_in(engine.card_region, queued)]
            at_home = [engine for engine in permitted if engine.card_region == "eu"]
            assert all(engine.runs for engine in at_home or permitted)

    @invariant()
    def credits_match_the_running_requests(self):
        if hasattr(self, "core"):
            assert self.core.waiting == len(self.waiting)
            assert self.core.running == len(self.running)
            for state in self.core.endpoint_states:
                assert state.credits.request_count == len(self.engines[state.endpoint.name].runs)

    def teardown(self):
        if not hasattr(self, "core"):
            return
        self.revive()
        for _ in range(len(self.waiting) + len(self.running) + 1):
            self.turn(0.0)
            if self.running:
                self._end(self.running[0])
        reachable = {engine.card_region for engine in self.served}
        for queued in self.waiting:
            assert queued.request.regions is not None
            assert not reachable & queued.request.regions, "it was never served"
        for queued in self.waiting:
            self.core.leave(queued, self.now_s, finished=False)
        for queued in self.running:
            self.core.leave(queued, self.now_s, finished=True)
        for state in self.core.endpoint_states:
            assert state.credits.unreported == state.credits.outstanding == (0, 0, 0)
            assert state.credits.request_count == 0
        assert self.core.running == self.core.waiting == self.core.allocator.holdings.slots == 0
        assert all(not (queue.lanes or queue.away or queue.requeued or queue.aside) for queue in self.core.queues)
        assert all(quota.used == (0, 0, 0) for quota in self.core.allocator.quotas.all)


def _may_run_in(region, queued):
    return queued.request.regions is None or region in queued.request.regions


Engine.card_region = property(lambda engine: engine._card.region)

TestRegions = RegionMachine.TestCase
TestRegions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
