"""Requests join, run, are put back, cut off and leave in every order, before a replica that hears late, refuses and
dies; then nothing is left of them, at no time was more released than the replica has, and each was charged what it got.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from maitred.core.errors import DeadlineExceeded, ReplicaUnavailable
from maitred.core.flow import PriorityClass
from maitred.dispatch.config import DispatchConfig, TenantPoolConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.queue import QueueState
from maitred.dispatch.request import Endpoint
from maitred.fairness.config import QueueOrderConfig
from tests.support.dispatchers import CARD, EMPTY, ScriptedReplica, make_dispatch_request

SLOTS, BLOCKS = EMPTY.free_sequences, EMPTY.total_blocks
CONFIGS = [
    DispatchConfig(headroom=0.0, line=QueueOrderConfig(policy="fifo")),
    DispatchConfig(headroom=0.25),
    DispatchConfig(headroom=0.25, reserved={"org-1": 0.25}),
    DispatchConfig(headroom=0.0, pools={"own": TenantPoolConfig(tenants=["org-1"], share=0.5)}),
]


class Engine(ScriptedReplica):
    """Holds what was submitted and received, and reports it when the test calls `hear`."""

    def __init__(self):
        super().__init__()
        self.underway = []
        """Messages that it has not read: (queued, cost), or (queued, None) for a cancellation."""
        self.runs = []

    weight = 1.0

    def count_unreported(self):
        return sum(cost is not None for _, cost in self.underway)

    def hear(self, count):
        for queued, cost in self.underway[:count]:
            if cost is None:
                self.runs = [run for run in self.runs if run[0] is not queued]
            else:
                self.runs.append((queued, cost))
        del self.underway[:count]
        self._load = replace(
            self._load,
            running=sum(cost.slots for _, cost in self.runs),
            free_sequences=SLOTS - sum(cost.slots for _, cost in self.runs),
            free_blocks=BLOCKS - sum(cost.blocks for _, cost in self.runs),
        )

    def die(self):
        self.up = False
        self.underway.clear()
        self.runs.clear()
        self._load = EMPTY


class DispatchMachine(RuleBasedStateMachine):
    @initialize(config=st.sampled_from(CONFIGS))
    def start(self, config):
        self.config = config
        self.engine = Engine()
        self.core = DispatchCore([Endpoint("replica", self.engine)], config)
        self.now_s = 1_000_000.0
        self.made = 0
        self.waiting = []
        self.running = []
        self.ended = []
        self.unsent = {}
        self.got = 0.0

    @rule(
        org=st.integers(0, 3),
        tokens=st.integers(1, 300),
        max_tokens=st.integers(1, 300),
        prompts=st.integers(1, 2),
        choices=st.integers(1, 3),
        priority=st.sampled_from(PriorityClass),
        ttft_deadline_s=st.none() | st.floats(0.1, 100),
    )
    def join(self, org, ttft_deadline_s, prompts, choices, **fields):
        self.made += 1
        ttft_deadline_s = None if ttft_deadline_s is None else self.now_s + ttft_deadline_s
        made = make_dispatch_request(
            self.made,
            f"org-{org}",
            prompts=prompts,
            choices=prompts * choices,
            arrived_s=self.now_s,
            ttft_deadline_s=ttft_deadline_s,
            **fields,
        )
        queued = self.core.new_entry(made)
        self.core.join(queued, self.now_s)
        self.waiting.append(queued)

    @rule(passes_s=st.sampled_from([0.0, 0.0, 0.1, 5.0, 70.0]))
    def turn(self, passes_s):
        self.now_s += passes_s
        idle = not (self.running or self.engine.runs or self.engine.underway)
        for queued in self.core.run_dispatch_pass(self.now_s):
            self.waiting.remove(queued)
            if queued.state is QueueState.FAILED:
                assert isinstance(queued.failure, DeadlineExceeded | ReplicaUnavailable)
                self.ended.append(queued)
            else:
                assert self.engine.up
                self.running.append(queued)
                self.unsent[queued] = list(queued.costs)
                assert idle or self._fits(), "more was released than there is"
                idle = False

    def _fits(self):
        return (
            sum(queued.cost.slots for queued in self.running) <= SLOTS
            and sum(queued.cost.blocks for queued in self.running) <= BLOCKS
        ) or any(queued.cost.slots > SLOTS or queued.cost.blocks > BLOCKS for queued in self.running)

    @precondition(lambda self: self.waiting or self.running or self.ended)
    @rule(data=st.data(), finished=st.booleans(), again=st.booleans())
    def leave(self, data, finished, again):
        queued = data.draw(st.sampled_from(self.waiting + self.running + self.ended))
        for group in (self.waiting, self.running, self.ended):
            if queued in group:
                group.remove(queued)
        if self.unsent.pop(queued, None) is not None and self.engine.up:
            self.engine.underway.append((queued, None))
        self.core.leave(queued, self.now_s, finished=finished)
        if again:
            self.core.leave(queued, self.now_s, finished=finished)

    @precondition(lambda self: self.running and self.engine.up)
    @rule(data=st.data())
    def submit(self, data):
        queued = data.draw(st.sampled_from(self.running))
        if self.unsent[queued]:
            self.engine.underway.append((queued, self.unsent[queued].pop(0)))
            self.core.on_submitted(queued)

    @precondition(lambda self: self.engine.underway)
    @rule(data=st.data())
    def hear(self, data):
        self.engine.hear(data.draw(st.integers(1, len(self.engine.underway))))

    @precondition(lambda self: self.engine.runs)
    @rule(data=st.data(), tokens=st.integers(1, 50))
    def answer(self, data, tokens):
        weights = self.core.weights
        queued = data.draw(st.sampled_from([run[0] for run in self.engine.runs]))
        if queued in self.running and not self.unsent[queued]:
            prompt_tokens = 0 if queued.has_output else queued.request.prompt_tokens
            if not queued.has_output:
                self.core.on_first_token(queued, self.now_s)
            self.core.charge_tokens(queued, prompt_tokens, 0, tokens)
            self.got += weights.prompt * prompt_tokens + weights.output * tokens

    @precondition(lambda self: self.running)
    @rule(data=st.data(), in_s=st.none() | st.floats(0.1, 100))
    def put_back(self, data, in_s):
        queued = data.draw(st.sampled_from(self.running))
        prompts = data.draw(st.sets(st.sampled_from(range(len(queued.request.prompts))), min_size=1))
        self._put_back(queued, prompts, in_s=in_s)
        if self.engine.up:
            self.engine.underway.append((queued, None))

    def _put_back(self, queued, prompts, *, in_s=None):
        self.running.remove(queued)
        self.unsent.pop(queued)
        answer_by_s = None if in_s is None else self.now_s + in_s
        self.core.requeue(queued, self.now_s, prompts=sorted(prompts), answer_by_s=answer_by_s, draw=0.0)
        self.waiting.append(queued)

    @precondition(lambda self: self.engine.up)
    @rule(again=st.booleans())
    def die(self, again):
        self.engine.die()
        for queued in list(self.running):
            if again:
                self._put_back(queued, range(len(queued.request.prompts)))
            else:
                self.core.leave(queued, self.now_s, finished=False, lost=True)
        self.running.clear()
        self.unsent.clear()

    @precondition(lambda self: not self.engine.up)
    @rule()
    def revive(self):
        self.engine.up = True

    @invariant()
    def credits_match_the_running_requests(self):
        if not hasattr(self, "core"):
            return
        assert self.core.waiting == len(self.waiting)
        assert self.core.running == len(self.running)
        assert self.core.endpoint_states[0].credits.request_count == len(self.running)
        assert self.core.allocator.holdings.slots == sum(queued.cost.slots for queued in self.running)

    @invariant()
    def nobody_waits_beside_an_empty_replica(self):
        if hasattr(self, "core") and self.engine.up and not self.running:
            self.engine.hear(len(self.engine.underway))
            if not self.config.pools and not self.config.reserved:
                self.turn(0.0)
                assert self.running or not self.waiting

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for queued in self.waiting + self.running + self.ended:
            self.core.leave(queued, self.now_s, finished=False)
        account = self.core.endpoint_states[0].credits
        assert account.unreported == account.outstanding == (0, 0, 0)
        assert (
            account.request_count == self.core.running == self.core.waiting == self.core.allocator.holdings.slots == 0
        )
        assert all(quota.used == (0, 0, 0) for quota in self.core.allocator.quotas.all)
        assert all(len(queue.wait_account) == 0 and queue.wait_account.weight == 0 for queue in self.core.queues)
        assert all(not queue.requeued for queue in self.core.queues)
        assert self.core.predictor.served == pytest.approx(self.got), "charged otherwise than computed"
        assert CARD.max_sequences == SLOTS


TestDispatch = DispatchMachine.TestCase
TestDispatch.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
