"""Whoever walks in where nobody waits fares as if it had joined the line and been taken in the same moment."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from maitred.core.flow import PriorityClass
from maitred.core.replica import StepTimes
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.pool_queue import QueueState
from maitred.dispatch.request import Endpoint
from tests.property.dispatch.test_dispatch import CONFIGS, Engine
from tests.support.dispatchers import EMPTY, errand

TIMES = StepTimes(0.01, 0.0001, 0.0, 0.0, 0.001)
MOVES = st.lists(
    st.fixed_dictionaries(
        {
            "org": st.integers(0, 2),
            "tokens": st.integers(1, 300),
            "max_tokens": st.integers(1, 200),
            "choices": st.integers(1, 3),
            "weight": st.sampled_from([1.0, 1.0, 3.0]),
            "priority": st.sampled_from(PriorityClass),
            "deadline_s": st.none() | st.floats(0.001, 100),
            "passes_s": st.floats(0, 5),
            "leaves": st.booleans(),
            "output_tokens": st.integers(0, 50),
            "asks": st.booleans(),
            "dies": st.sampled_from([False] * 9 + [True]),
        }
    ),
    min_size=1,
    max_size=25,
)


class House:
    """A floor, and all who have come."""

    def __init__(self, config, posts, *, walks_in):
        self.walks_in = walks_in
        self.engines = [Engine() for _ in posts]
        for engine in self.engines:
            engine._load = replace(EMPTY, times=TIMES)
        posts = [Endpoint(f"post-{n}", self.engines[n], exact=exact) for n, exact in enumerate(posts)]
        self.floor = DispatchCore(posts, config)
        self.tickets = []

    def come(self, made, now_s, *, asks, dies):
        ticket = self.floor.new_entry(made)
        if asks:  # what would become of it, and then something may happen before it joins
            ready = self.floor.refresh(now_s)
            self.floor.forecast_cache.predict(ticket, ready, now_s)
            assert self.floor.new_entry(made) is ticket
        if dies:
            self.engines[0].up = not self.engines[0].up
            self.floor.refresh(now_s)  # as at its news
        self.tickets.append(ticket)
        if not (self.walks_in and self.floor.dispatch_now(ticket, now_s)):
            self.floor.dispatch_ready(now_s, self.floor.join(ticket, now_s))

    def serve(self, output_tokens, now_s):
        for ticket in self.tickets:
            if ticket.state is QueueState.RELEASED and not ticket.begun:
                self.floor.on_first_token(ticket, now_s)
                self.floor.charge_tokens(ticket, ticket.request.prompt_tokens, 0, output_tokens)

    def leave(self, now_s):
        first = next((one for one in self.tickets if one.state in (QueueState.RELEASED, QueueState.FAILED)), None)
        if first is not None:
            self.floor.leave(first, now_s, finished=True)
        self.floor.dispatch_ready(now_s)

    def told(self):
        line, tickets = self.floor.queues[-1].fair_queue, self.tickets
        return {
            "tickets": [
                (one.state, one.waited_ms, one.predicted_position, one.raw_wait_s, one.prefill_s) for one in tickets
            ],
            "times": [(one.joined_s, one.dispatched_s) for one in tickets],
            "ahead": [(line.lead(one.flow), line.over_service(one.flow)) for one in tickets],
            "credits": [
                (one.credits.free, one.credits.outstanding, one.endpoint.admin_state.running)
                for one in self.floor.endpoint_states
            ],
            "held": [quota.used for quota in self.floor.allocator.quotas.all],
            "learnt": (self.floor.predictor.typical_service, self.floor.predictor.calibration.compared),
            "served": self.floor.predictor.served,
            "refusals": self.floor.counters.rejections,
            "queue_s": {key: waits.counts for key, waits in self.floor.counters.queue_s.items()},
        }


@settings(max_examples=200)
@given(
    config=st.sampled_from(CONFIGS),
    posts=st.lists(st.booleans(), min_size=1, max_size=2),
    moves=MOVES,
)
def test_to_walk_in_is_to_join_and_be_taken(config, posts, moves):
    short, long = House(config, posts, walks_in=True), House(config, posts, walks_in=False)
    now_s = 1_000_000.0
    for number, move in enumerate(moves):
        fields = dict(move)
        now_s += fields.pop("passes_s")
        leaves, output_tokens, deadline_s = (fields.pop(name) for name in ("leaves", "output_tokens", "deadline_s"))
        way = {name: fields.pop(name) for name in ("asks", "dies")}
        made = errand(
            str(number), arrived_s=now_s, deadline_s=None if deadline_s is None else now_s + deadline_s, **fields
        )
        for house in (short, long):
            house.come(made, now_s, **way)
            house.serve(output_tokens, now_s)
            if leaves:
                house.leave(now_s)
        assert short.told() == long.told()
