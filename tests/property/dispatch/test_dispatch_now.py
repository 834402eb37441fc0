"""`dispatch_now` in an empty queue does the same as joining the queue and being dispatched in the same moment."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from maitred.core.flow import PriorityClass
from maitred.core.replica import StepTimes
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.queue import QueueState
from maitred.dispatch.request import Endpoint
from tests.property.dispatch.test_dispatch import CONFIGS, Engine
from tests.support.dispatchers import EMPTY, make_dispatch_request

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
            "ttft_deadline_s": st.none() | st.floats(0.001, 100),
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


class Simulation:
    """A dispatch core, and all requests that arrived."""

    def __init__(self, config, exact_replicas, *, dispatches_now):
        self.dispatches_now = dispatches_now
        self.engines = [Engine() for _ in exact_replicas]
        for engine in self.engines:
            engine._load = replace(EMPTY, times=TIMES)
        exact_replicas = [
            Endpoint(f"replica-{n}", self.engines[n], reports_capacity=exact) for n, exact in enumerate(exact_replicas)
        ]
        self.core = DispatchCore(exact_replicas, config)
        self.queued = []

    def arrive(self, made, now_s, *, asks, dies):
        queued = self.core.new_entry(made)
        if asks:  # what would become of it, and then something may happen before it joins
            ready = self.core.refresh(now_s)
            self.core.forecast_cache.forecast_and_store(queued, ready, now_s)
            assert self.core.new_entry(made) is queued
        if dies:
            self.engines[0].up = not self.engines[0].up
            self.core.refresh(now_s)  # as at its news
        self.queued.append(queued)
        if not (self.dispatches_now and self.core.dispatch_now(queued, now_s)):
            self.core.run_dispatch_pass(now_s, self.core.join(queued, now_s))

    def serve(self, output_tokens, now_s):
        for queued in self.queued:
            if queued.state is QueueState.DISPATCHED and not queued.has_output:
                self.core.on_first_token(queued, now_s)
                self.core.charge_tokens(queued, queued.request.prompt_tokens, 0, output_tokens)

    def leave(self, now_s):
        first = next(
            (request for request in self.queued if request.state in (QueueState.DISPATCHED, QueueState.FAILED)), None
        )
        if first is not None:
            self.core.leave(first, now_s, finished=True)
        self.core.run_dispatch_pass(now_s)

    def state(self):
        queue, requests = self.core.queues[-1].fair_queue, self.queued
        return {
            "requests": [
                (request.state, request.waited_ms, request.predicted_position, request.raw_wait_s, request.prefill_s)
                for request in requests
            ],
            "times": [(request.joined_s, request.dispatched_s) for request in requests],
            "ahead": [(queue.lead(request.flow), queue.over_service(request.flow)) for request in requests],
            "credits": [
                (
                    endpoint_state.credits.free,
                    endpoint_state.credits.outstanding,
                    endpoint_state.endpoint.admin_state.running,
                )
                for endpoint_state in self.core.endpoint_states
            ],
            "held": [quota.used for quota in self.core.allocator.quotas.all],
            "learnt": (self.core.predictor.typical_service, self.core.predictor.calibration.compared),
            "served": self.core.predictor.served,
            "refusals": self.core.counters.rejections,
            "queue_s": {key: waits.counts for key, waits in self.core.counters.queue_s.items()},
        }


@settings(max_examples=100)
@given(
    config=st.sampled_from(CONFIGS),
    exact_replicas=st.lists(st.booleans(), min_size=1, max_size=2),
    moves=MOVES,
)
def test_dispatch_now_equals_joining_and_being_dispatched(config, exact_replicas, moves):
    short, long = (
        Simulation(config, exact_replicas, dispatches_now=True),
        Simulation(config, exact_replicas, dispatches_now=False),
    )
    now_s = 1_000_000.0
    for number, move in enumerate(moves):
        fields = dict(move)
        now_s += fields.pop("passes_s")
        leaves, output_tokens, ttft_deadline_s = (
            fields.pop(name) for name in ("leaves", "output_tokens", "ttft_deadline_s")
        )
        arrival = {name: fields.pop(name) for name in ("asks", "dies")}
        made = make_dispatch_request(
            str(number),
            arrived_s=now_s,
            ttft_deadline_s=None if ttft_deadline_s is None else now_s + ttft_deadline_s,
            **fields,
        )
        for simulation in (short, long):
            simulation.arrive(made, now_s, **arrival)
            simulation.serve(output_tokens, now_s)
            if leaves:
                simulation.leave(now_s)
        assert short.state() == long.state()
