"""What holds for every demand, every fleet and every order of events."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maitred.scaling.autoscaler import Autoscaler, ScalingOverride
from maitred.scaling.demand import ArrivalWindow, Demand
from maitred.scaling.fluid_queue import FluidQueue
from maitred.scaling.forecast import DemandForecast
from maitred.scaling.replica_status import ReplicaPhase, ReplicaStatus
from maitred.scaling.startup_times import StartKind, StartupTimes
from tests.support.scaling.scaled_model import CAPACITY, OUTPUT, PROMPT, autoscaler, objectives, serving, window


def first_decision(*, rate, lead_s=30.0, replicas=2, waiting=0, running=20, seconds=60):
    """Returns the first decision of an autoscaler whose forecast has seen a steady rate."""
    forecast = DemandForecast()
    for second in range(1, seconds):
        forecast.observe(window(float(second), rate))
    scaler = Autoscaler(objectives(), StartupTimes({StartKind.COLD: lead_s}), forecast)
    demand = Demand(waiting=waiting, running=running, window=window(float(seconds), rate))
    return scaler.decide(demand, serving(replicas), CAPACITY, float(seconds))


@given(
    rate=st.floats(0.1, 40.0),
    more=st.floats(1.0, 3.0),
    waiting=st.integers(0, 300),
    more_waiting=st.integers(0, 300),
    replicas=st.integers(1, 10),
)
@settings(max_examples=30, deadline=None)
def test_more_demand_never_lowers_the_number(rate, more, waiting, more_waiting, replicas):
    running = min(32 * replicas, round(4 * rate))
    less = first_decision(rate=rate, waiting=waiting, running=running, replicas=replicas)
    longer_queue = first_decision(rate=rate, waiting=waiting + more_waiting, running=running, replicas=replicas)
    higher_rate = first_decision(rate=rate * more, waiting=waiting, running=running, replicas=replicas)
    if not waiting:
        assert longer_queue.desired >= less.desired
        assert higher_rate.desired >= less.desired
    assert higher_rate.evidence.utilisation * higher_rate.desired >= less.evidence.utilisation * less.desired - 1e-9


@given(
    rate=st.floats(0.1, 60.0),
    lead_s=st.sampled_from([1.0, 5.0, 20.0, 60.0]),
    longer=st.sampled_from([1.0, 2.0, 5.0, 10.0]),
)
@settings(max_examples=30, deadline=None)
def test_a_longer_lead_time_never_lowers_the_number(rate, lead_s, longer):
    running = min(32 * 10, round(4.5 * rate))
    short = first_decision(rate=rate, lead_s=lead_s, replicas=10, running=running)
    long = first_decision(rate=rate, lead_s=lead_s * longer, replicas=10, running=running)
    assert long.desired >= short.desired


EVENTS = st.lists(
    st.tuples(
        st.floats(0.0, 100.0),  # requests per second
        st.integers(0, 200),  # waiting
        st.integers(0, 100),  # running
        st.lists(st.tuples(st.sampled_from(ReplicaPhase), st.floats(0.0, 600.0)), max_size=8),
        st.sampled_from([1.0, 1.0, 5.0, 120.0]),  # seconds since the last decision
        st.booleans(),  # whether the capacity is known
    ),
    min_size=1,
    max_size=30,
)


@given(
    events=EVENTS,
    least=st.integers(0, 3),
    most=st.integers(3, 12),
    usd=st.floats(0.5, 5.0),
    gpus=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    sleeping=st.integers(0, 3),
    override=st.none() | st.tuples(st.integers(0, 30), st.floats(0.0, 300.0)),
)
@settings(max_examples=150, deadline=None)
def test_limits_hold_in_every_state(events, least, most, usd, gpus, sleeping, override):
    scaler = autoscaler(
        min_replicas=least,
        max_replicas=most,
        usd_per_hour=usd,
        max_usd_per_hour=20.0,
        gpus_per_replica=gpus,
        max_gpus=8.0,
        sleeping_replicas=sleeping,
    )
    if override is not None:
        scaler.override = ScalingOverride(replicas=override[0], until_s=override[1])
    now_s = 0.0
    for rate, waiting, running, phases, length_s, is_known in events:
        now_s += length_s
        statuses = [
            ReplicaStatus(name=str(index), phase=phase, since_s=now_s - age_s)
            for index, (phase, age_s) in enumerate(phases)
        ]
        demand = Demand(waiting=waiting, running=running, window=window(now_s, rate * length_s, length_s))
        decision = scaler.decide(demand, statuses, CAPACITY if is_known else None, now_s)
        affordable = min(int(20.0 / usd + 1e-9), int(8.0 / gpus) if gpus else 1000)
        assert min(least, affordable) <= decision.desired <= min(most, affordable)
        assert 0 <= decision.asleep <= sleeping
        assert (decision.desired + decision.asleep) * usd <= 20.0 + 1e-6
        assert (decision.desired + decision.asleep) * gpus <= 8.0
        if override is not None:
            assert (decision.override_until_s is not None) == (now_s < override[1])
        if not decision.desired:
            assert not demand.any or min(most, affordable) == 0 or (override is not None and override[0] == 0)


@given(phases=st.lists(st.sampled_from([ReplicaPhase.DRAINING, ReplicaPhase.FAILED]), max_size=6))
@settings(max_examples=30, deadline=None)
def test_replicas_that_go_or_have_failed_do_not_serve_the_demand(phases):
    others = [ReplicaStatus(name=f"x{index}", phase=phase, since_s=0.0) for index, phase in enumerate(phases)]
    forecast = DemandForecast()
    for second in range(1, 60):
        forecast.observe(window(float(second), 20.0))
    scaler = Autoscaler(objectives(), StartupTimes({StartKind.COLD: 30.0}), forecast)
    demand = Demand(running=32, waiting=60, window=window(60.0, 20.0))
    decision = scaler.decide(demand, [*serving(1), *others], CAPACITY, 60.0)
    assert (decision.evidence.ready, decision.evidence.coming) == (1, 0)
    assert decision.desired >= 3


class CountingQueue(FluidQueue):
    """A queue that counts how many replicas are played in all, and how often."""

    numbers: list[int]

    def _play(self, ready_s):
        self.numbers.append(len(ready_s))
        return super()._play(ready_s)


WORK = st.tuples(
    st.integers(0, 10_000_000),  # arrivals
    st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 0.3, 1.0, 5.0, 600.0]),  # seconds in which they came
    st.integers(0, 10_000_000),  # waiting
    st.integers(0, 100_000),  # running
    st.integers(0, 64),  # replicas that serve
)


@given(work=st.lists(WORK, min_size=1, max_size=12), most=st.integers(1, 5_000), lead_s=st.floats(0.1, 3_600.0))
@example(work=[(4, 1.0, 0, 0, 1)] * 7 + [(40, 1e-6, 40, 32, 1)], most=64, lead_s=30.0)
@settings(max_examples=60, deadline=None)
def test_the_work_of_a_decision_is_bounded_whatever_the_demand(work, most, lead_s):
    scaler, now_s, most_requests = autoscaler(lead_s=lead_s, max_replicas=most), 0.0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maitred.scaling.prediction.FluidQueue", CountingQueue)
        for requests, length_s, waiting, running, replicas in work:
            arrived = ArrivalWindow(
                start_s=now_s,
                length_s=length_s,
                requests=requests,
                prompt_tokens=PROMPT * requests,
                output_tokens=OUTPUT * requests,
            )
            now_s, most_requests = now_s + length_s, most_requests + requests
            CountingQueue.numbers = []
            decision = scaler.decide(
                Demand(waiting=waiting, running=running, window=arrived), serving(replicas), CAPACITY, now_s
            )
            assert decision.desired <= most
            assert len(CountingQueue.numbers) <= 100
            assert max(CountingQueue.numbers, default=0) <= max(most + 1, replicas)
            assert decision.evidence.requests_per_s.mean <= 2 * most_requests + 1


@given(rate=st.floats(1.0, 60.0), lead_s=st.floats(1.0, 3_600.0))
@example(rate=58.0, lead_s=600.0)
@settings(max_examples=30, deadline=None)
def test_a_load_within_the_capacity_makes_no_queue_however_long_a_start_takes(rate, lead_s):
    """The steps of the queue that is played are then many times as long as a request runs."""
    decision = first_decision(rate=rate, lead_s=lead_s, replicas=10, running=round(4.5 * rate))
    assert decision.evidence.utilisation * decision.desired < 10
    assert decision.desired <= 10
    assert decision.evidence.ttft_s < 2.0
