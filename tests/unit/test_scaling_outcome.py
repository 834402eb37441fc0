"""What `benchmarks.scaling` makes of outcomes: reactions, the frontier of others, and the policies of others."""

import numpy as np
import pytest

from benchmarks.scaling.autoscaling import ITL_S, MOST_REACTION_S, TTFT_S, WORKLOADS
from benchmarks.support.scaling.fleet import Observation
from benchmarks.support.scaling.outcome import Setting, least_on_hull, play, reactions
from benchmarks.support.scaling.policies import KedaMetric, KnativeConcurrency, RayOngoingRequests, UtilisationHpa
from benchmarks.support.scaling.production import ProductionPolicy
from benchmarks.support.scaling.traces import planted

LATE = np.arange(100.0, 200.0)


def seen(now_s, ongoing, serving, *, starting=0, slots=10):
    running = min(ongoing, serving * slots)
    return Observation(
        now_s=now_s,
        waiting=ongoing - running,
        oldest_wait_s=0.0,
        running=running,
        serving=serving,
        starting=starting,
        slots=slots,
        running_s=now_s * running,
        serving_s=now_s * serving,
        arrived=0,
        finished=0,
    )


@pytest.mark.parametrize(
    ("orders_s", "found"),
    [
        ([164.0], [60.0]),  # the fifth late request arrives at 104
        ([104.5, 130.0, 160.0, 190.0], [0.5]),
        ([99.0, 129.0, 159.0, 189.0], []),  # made for it, and so are the next ones
        ([60.0, 105.0, 130.0, 160.0], [1.0]),
        ([], [95.0]),  # nobody ordered until the last late request
    ],
)
def test_a_reaction_is_the_time_to_the_next_order_unless_there_was_one(orders_s, found):
    assert reactions(LATE, orders_s, lead_s=30.0, ttft_s=3.0) == found


def test_a_few_late_requests_are_no_signal():
    assert reactions(np.array([1.0, 2.0, 3.0, 4.0, 50.0]), [60.0], lead_s=2.0, ttft_s=3.0) == []


@pytest.mark.parametrize(("seconds", "is_signal"), [(20.0, False), (40.0, True)])
def test_a_queue_that_is_gone_before_a_replica_could_serve_is_no_signal(seconds, is_signal):
    late_s = np.concatenate([np.arange(100.0, 100.0 + seconds), [400.0]])
    assert bool(reactions(late_s, [500.0], lead_s=30.0, ttft_s=3.0)) is is_signal


class SlowPolicy:
    """Orders 40 s after the end of a flank."""

    at_wait, interval_s = True, 1.0

    def desired(self, observation):
        return 4 if observation.now_s < 700 else 16


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_slow_policy_has_a_long_reaction(is_slow):
    """The load rises to four times within a minute."""
    trace = planted("flank", [(0.0, 6.0), (600.0, 6.0), (660.0, 24.0), (900.0, 24.0)], seed=1)
    setting = Setting(WORKLOADS["waves"].kind, TTFT_S, ITL_S, 4, 32)

    def make(fleet):
        return SlowPolicy() if is_slow else ProductionPolicy(fleet, setting, interval_s=1.0)

    outcome, _ = play(trace, setting, make, lead_s=30.0)
    assert (max(outcome.reaction_s, default=0.0) > MOST_REACTION_S) is is_slow


def test_the_hull_is_what_two_settings_in_turns_can_have():
    points = [(0.0, 10.0), (0.02, 6.0), (0.01, 9.9), (0.04, 5.0), (0.05, 7.0)]
    assert least_on_hull(points, 0.01) == pytest.approx(8.0)
    assert least_on_hull(points, 0.03) == pytest.approx(5.5)
    assert least_on_hull(points, 0.5) == 5.0
    assert least_on_hull(points[1:], 0.0) == pytest.approx(9.9)


def test_knative_panics_and_does_not_go_down_then():
    policy = KnativeConcurrency(5.0)
    for now_s in range(0, 60, 2):
        assert policy.desired(seen(float(now_s), 10, 2)) == 2
    assert policy.desired(seen(60.0, 100, 2)) >= 4
    assert policy.desired(seen(62.0, 100, 2)) >= 8
    assert policy.desired(seen(64.0, 0, 20)) == 20


def test_ray_waits_for_its_delays():
    policy = RayOngoingRequests(5.0)
    assert [policy.desired(seen(10.0 * n, 40, 2)) for n in range(5)] == [2, 2, 2, 8, 2]
    policy = RayOngoingRequests(5.0, down_delay_s=600.0)
    assert {policy.desired(seen(10.0 * n, 5, 8)) for n in range(60)} == {8}
    assert policy.desired(seen(600.0, 5, 8)) == 1


def test_the_pod_autoscaler_doubles_at_most_and_holds_for_its_window():
    policy = KedaMetric(5.0, running_too=True)
    assert policy.desired(seen(0.0, 200, 5)) == 10
    assert policy.desired(seen(15.0, 200, 2)) == 6
    policy = KedaMetric(5.0, running_too=True)
    assert policy.desired(seen(0.0, 25, 5)) == 5
    assert {policy.desired(seen(15.0 * n, 5, 5)) for n in range(1, 20)} == {5}
    assert policy.desired(seen(300.0, 5, 5)) == 1


def test_pods_that_are_not_ready_count_as_idle():
    policy = UtilisationHpa(0.5)
    assert policy.desired(seen(15.0, 40, 4)) == 8
    policy = UtilisationHpa(0.5)
    assert policy.desired(seen(15.0, 40, 4, starting=4)) == 8
