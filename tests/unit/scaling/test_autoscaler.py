import pytest

from maitred.core.replica import StepTimes
from maitred.scaling.autoscaler import ScalingOverride
from maitred.scaling.capacity import ReplicaCapacity
from maitred.scaling.decision import ScalingLimit, ScalingReason
from maitred.scaling.demand import Demand
from maitred.scaling.replica_status import ReplicaPhase, ReplicaStatus
from maitred.scaling.startup_times import StartKind
from tests.support.scaling.scaled_model import CAPACITY, ScaledModel, autoscaler, serving, window


def decide(scaler, now_s, *, requests=0.0, waiting=0, running=0, replicas=1, capacity=CAPACITY, others=()):
    demand = Demand(waiting=waiting, running=running, window=window(now_s, requests))
    return scaler.decide(demand, [*serving(replicas), *others], capacity, now_s)


def warmed(rate=5.0, seconds=120, replicas=1, **changed):
    """An autoscaler that has seen a steady rate, and the time."""
    scaler = autoscaler(**changed)
    for now_s in range(1, seconds + 1):
        decide(scaler, float(now_s), requests=rate, running=round(4 * rate), replicas=replicas)
    return scaler, float(seconds)


@pytest.mark.parametrize("rate", [4.0, 22.5])
def test_a_constant_load_changes_nothing_in_a_day(rate):
    model = ScaledModel(autoscaler())
    model.play(1_200, lambda now_s: rate)
    model.changes.clear()
    model.play(86_400, lambda now_s: rate, every_s=10.0)
    assert model.changes == []
    assert model.waiting == 0


def test_more_load_needs_more_replicas_and_less_load_fewer():
    model = ScaledModel(autoscaler())
    model.play(600, lambda now_s: 4.0, every_s=2.0)
    assert model.decision.desired == 1
    model.play(600, lambda now_s: 40.0, every_s=2.0)
    # Those that worked off the queue are held for a while: the demand has just shown that it can rise.
    assert 40 / 7.2 < model.decision.desired <= 16
    model.play(1_800, lambda now_s: 4.0, every_s=2.0)
    assert model.decision.desired == 1
    assert model.decision.evidence.utilisation < 0.9


def test_a_crowd_is_seen_within_a_second():
    scaler, now_s = warmed()
    decision = decide(scaler, now_s + 1, requests=60.0, waiting=35, running=32)
    assert decision.desired >= 4
    assert decision.reason in (ScalingReason.BACKLOG, ScalingReason.UTILISATION, ScalingReason.FORECAST)
    assert decision.evidence.lead_time_s == 30.0


def test_fewer_only_if_those_would_bear_the_whole_load():
    model = ScaledModel(autoscaler(), replicas=3)
    model.play(900, lambda now_s: 10.5, every_s=2.0)
    # One replica serves 7.2 requests a second.
    assert model.decision.desired == 2
    evidence = model.decision.evidence
    assert evidence.ttft_with_one_less_s > 2.0 > evidence.ttft_s
    assert evidence.utilisation < 0.95


def test_an_objective_out_of_reach_is_said_and_not_chased():
    slow = ReplicaCapacity(times=StepTimes(fixed_s=0.2, token_s=1e-4), max_sequences=32, kv_tokens=10_000_000)
    scaler = autoscaler()
    for now_s in range(1, 300):
        decision = decide(scaler, float(now_s), requests=0.5, running=20, capacity=slow)
    assert decision.reason is ScalingReason.UNREACHABLE
    assert decision.desired == 1
    assert decision.evidence.itl_s > 0.05


def test_waiting_requests_that_no_start_could_save_start_none():
    scaler, now_s = warmed(rate=1.0, lead_s=300.0)
    decision = decide(scaler, now_s + 1, requests=1.0, waiting=6, running=32)
    assert decision.desired == 1


class TestLimits:
    def test_the_most_replicas(self):
        scaler, now_s = warmed(rate=200.0, max_replicas=5)
        decision = decide(scaler, now_s + 1, requests=200.0, waiting=500, running=32)
        assert (decision.desired, decision.reason) == (5, ScalingReason.LIMITED)
        assert decision.evidence.limits == (ScalingLimit.MAX_REPLICAS,)

    def test_dollars(self):
        scaler, now_s = warmed(rate=200.0, usd_per_hour=2.5, max_usd_per_hour=10.0, sleeping_replicas=2)
        decision = decide(scaler, now_s + 1, requests=200.0, waiting=500, running=32)
        assert (decision.desired, decision.asleep) == (4, 0)
        assert decision.evidence.limits == (ScalingLimit.USD_PER_HOUR,)

    def test_gpus(self):
        limits = {"gpus_per_replica": 2.0, "max_gpus": 7.0, "usd_per_hour": 1.0, "max_usd_per_hour": 4.0}
        scaler, now_s = warmed(rate=200.0, sleeping_replicas=2, **limits)
        decision = decide(scaler, now_s + 1, requests=200.0, waiting=500, running=32)
        assert (decision.desired, decision.asleep) == (3, 0)
        assert decision.evidence.limits == (ScalingLimit.GPUS,)

    def test_the_fewest_replicas(self):
        scaler, now_s = warmed(rate=1.0, min_replicas=3, replicas=2)
        decision = decide(scaler, now_s + 1, requests=1.0, replicas=2)
        assert (decision.desired, decision.reason) == (3, ScalingReason.MINIMUM)
        assert decision.evidence.limits == (ScalingLimit.MIN_REPLICAS,)

    def test_sleeping_replicas_are_kept_beside_those_that_serve(self):
        scaler, now_s = warmed(sleeping_replicas=2)
        assert decide(scaler, now_s + 1, requests=5.0).asleep == 2


class TestOverride:
    def test_it_holds_until_its_end(self):
        scaler, now_s = warmed()
        scaler.override = ScalingOverride(replicas=7, until_s=now_s + 60)
        decision = decide(scaler, now_s + 1, requests=5.0)
        assert (decision.desired, decision.reason) == (7, ScalingReason.OVERRIDE)
        assert decision.override_until_s == now_s + 60
        after = decide(scaler, now_s + 60, requests=5.0)
        assert after.override_until_s is None
        assert after.reason is not ScalingReason.OVERRIDE
        assert scaler.override is None

    def test_the_limits_hold_for_it_too(self):
        scaler, now_s = warmed(max_replicas=5)
        scaler.override = ScalingOverride(replicas=9, until_s=now_s + 60)
        assert decide(scaler, now_s + 1).desired == 5


class TestUnknownCapacity:
    def test_something_that_is_asked_for_has_one_replica(self):
        scaler = autoscaler(min_replicas=0)
        decision = decide(scaler, 1.0, requests=500.0, waiting=500, replicas=0, capacity=None)
        assert (decision.desired, decision.reason) == (1, ScalingReason.UNKNOWN_CAPACITY)
        assert decision.evidence.ttft_s is None

    def test_nothing_goes(self):
        assert decide(autoscaler(), 1.0, replicas=4, capacity=None).desired == 4


class TestZero:
    def test_a_model_without_demand_goes_to_zero_when_holding_costs_more_than_a_start(self):
        model = ScaledModel(autoscaler(min_replicas=0), replicas=1)
        model.play(600, lambda now_s: 2.0, every_s=2.0)
        model.play(200, lambda now_s: 0.0, every_s=2.0)
        assert (model.decision.desired, model.decision.reason) == (1, ScalingReason.HOLDING)
        model.play(1_200, lambda now_s: 0.0, every_s=5.0)
        assert (model.decision.desired, model.decision.reason) == (0, ScalingReason.IDLE)

    def test_the_first_request_brings_it_back_at_once(self):
        model = ScaledModel(autoscaler(min_replicas=0), replicas=0)
        model.play(100, lambda now_s: 0.0)
        assert model.decision.desired == 0
        model.play(1, lambda now_s: 3.0)
        assert model.decision.desired == 1

    def test_what_runs_is_not_left_alone(self):
        scaler, now_s = warmed(rate=0.0, min_replicas=0)
        decision = decide(scaler, now_s + 10_000, running=1)
        assert decision.desired == 1


class TestFailedStarts:
    def failed(self, since_s):
        return ReplicaStatus(name="new", phase=ReplicaPhase.FAILED, since_s=since_s)

    def test_the_number_stays_what_is_needed(self):
        """The backend tries the start again by itself: a failure neither lowers the number nor moves the lead time."""
        scaler, now_s = warmed(rate=20.0)
        for _ in range(12):
            now_s += 1
            decision = decide(scaler, now_s, requests=20.0, waiting=50, running=32, others=[self.failed(now_s)])
            assert decision.desired > 1
            assert decision.evidence.limits == ()
            assert decision.evidence.lead_time_s == 30.0

    def test_a_failed_replica_is_no_capacity(self):
        scaler, now_s = warmed(rate=13.0, replicas=2)
        with_two = decide(scaler, now_s + 1, requests=13.0, running=55, replicas=2)
        without = decide(scaler, now_s + 2, requests=13.0, running=55, replicas=1, others=[self.failed(now_s)])
        assert with_two.evidence.ready == 2
        assert (without.evidence.ready, without.evidence.coming) == (1, 0)
        assert without.desired >= with_two.desired


class TestReserve:
    def reserve(self, phase):
        return [ReplicaStatus(name=f"{phase}-{index}", phase=phase, since_s=0.0) for index in range(4)]

    def test_replicas_that_sleep_shorten_the_lead_time(self):
        scaler, now_s = warmed(lead_s=300.0)
        scaler.startup_times.observe(StartKind.ASLEEP, 3.0)
        decision = decide(scaler, now_s + 1, requests=5.0, others=self.reserve(ReplicaPhase.ASLEEP))
        assert decision.evidence.lead_time_s == 3.0
        assert decision.evidence.ready == 1

    def test_replicas_that_drain_can_be_taken_back_at_once(self):
        scaler, now_s = warmed(lead_s=300.0)
        decision = decide(scaler, now_s + 1, requests=5.0, others=self.reserve(ReplicaPhase.DRAINING))
        assert decision.evidence.lead_time_s == 0.0
        assert decision.evidence.ready == 1


def test_replicas_that_start_are_not_ordered_again():
    model = ScaledModel(autoscaler(lead_s=120.0), lead_s=120.0)
    model.play(300, lambda now_s: 5.0)
    model.play(100, lambda now_s: 20.0)
    ordered = len(model.since_s)
    assert 4 <= ordered <= 40 / 7 * 4
    model.play(10, lambda now_s: 20.0)
    assert len(model.since_s) <= ordered + 1
