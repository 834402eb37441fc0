"""What counts for an objective, what goes well, and what is left of the budget."""

import pytest
from prometheus_client import CollectorRegistry

from maitred.core.context import Outcome, RequestContext
from maitred.core.flow import PriorityClass
from maitred.observe.config import SloConfig, slo_faults
from maitred.observe.slos import SloMetrics
from tests.support.clock import FakeClock

DAY_S = 86_400


def ended(
    *,
    outcome=Outcome.FINISHED,
    status=200,
    model="m",
    priority=PriorityClass.STANDARD,
    first_s=1.0,
    gaps=(),
    end_s=10.0,
    refused_by="",
):
    context = RequestContext("req-1", 0.0, model=model, priority=priority, gaps_s=list(gaps), refused_by=refused_by)
    context.first_token_s = first_s
    context.close(outcome, status, end_s)
    return context


def kept(slo, *contexts, clock=None):
    """Good, total and budget of one objective."""
    registry = CollectorRegistry()
    metrics = SloMetrics({"one": slo}, clock or FakeClock())
    registry.register(metrics)
    for context in contexts:
        metrics.on_request_end(context)
    labels = {"slo": "one", "model": slo.model or "*", "class": slo.priority or "*", "indicator": slo.indicator}
    names = ("maitred_slo_good_total", "maitred_slo_events_total", "maitred_slo_error_budget_left")
    return tuple(registry.get_sample_value(name, labels) for name in names)


AVAILABILITY = SloConfig(indicator="availability", objective=0.9)
TTFT = SloConfig(indicator="ttft", objective=0.9, within_s=2.0)


@pytest.mark.parametrize(
    ("context", "good", "total"),
    [
        (ended(), 1, 1),
        (ended(outcome=Outcome.FAILED, status=200), 0, 1),
        (ended(outcome=Outcome.FAILED, status=502), 0, 1),
        (ended(outcome=Outcome.REFUSED, status=503, first_s=None), 0, 1),
        (ended(outcome=Outcome.REFUSED, status=429, first_s=None), 0, 1),
        (ended(outcome=Outcome.REFUSED, status=429, first_s=None, refused_by="requests_per_minute"), 0, 0),
        (ended(outcome=Outcome.REFUSED, status=400, first_s=None), 0, 0),
        (ended(outcome=Outcome.CANCELLED, status=499, first_s=None), 0, 0),
        (ended(model=""), 0, 0),
    ],
)
def test_the_service_is_not_blamed_for_what_others_did(context, good, total):
    assert kept(AVAILABILITY, context)[:2] == (good, total)


def test_a_first_token_is_in_time_or_not():
    assert kept(TTFT, ended(first_s=2.0), ended(first_s=2.1))[:2] == (1, 2)


def test_who_loses_patience_has_waited_too_long_and_who_leaves_at_once_says_nothing():
    patient = ended(outcome=Outcome.CANCELLED, status=499, first_s=None, end_s=2.5)
    hasty = ended(outcome=Outcome.CANCELLED, status=499, first_s=None, end_s=0.5)
    assert kept(TTFT, patient, hasty)[:2] == (0, 1)


def test_every_delivery_counts():
    slo = SloConfig(indicator="itl", objective=0.9, within_s=0.1)
    assert kept(slo, ended(gaps=(0.05, 0.1, 0.2)), ended())[:2] == (2, 3)


def test_an_objective_is_about_its_model_and_its_class():
    slo = SloConfig(indicator="availability", objective=0.9, model="m", priority=PriorityClass.INTERACTIVE)
    other_class, other_model = ended(), ended(model="n", priority=PriorityClass.INTERACTIVE)
    assert kept(slo, other_class, other_model, ended(priority=PriorityClass.INTERACTIVE))[:2] == (1, 1)


def test_the_budget_is_the_share_that_may_go_wrong():
    bad = ended(outcome=Outcome.FAILED, status=502)
    assert kept(AVAILABILITY)[2] == 1.0
    assert kept(AVAILABILITY, *[ended()] * 39, bad)[2] == pytest.approx(0.75)
    assert kept(AVAILABILITY, *[ended()] * 9, bad)[2] == pytest.approx(0.0)
    assert kept(AVAILABILITY, bad)[2] == pytest.approx(-9.0)


def test_what_has_left_the_window_is_forgiven():
    clock = FakeClock()
    registry = CollectorRegistry()
    metrics = SloMetrics({"one": SloConfig(indicator="availability", objective=0.9, window_days=10)}, clock)
    registry.register(metrics)

    def left():
        labels = {"slo": "one", "model": "*", "class": "*", "indicator": "availability"}
        return registry.get_sample_value("maitred_slo_error_budget_left", labels)

    metrics.on_request_end(ended(outcome=Outcome.FAILED, status=502))
    clock.now_s += 5 * DAY_S
    for _ in range(9):
        metrics.on_request_end(ended())
    assert left() == pytest.approx(0.0)
    clock.now_s += 4.9 * DAY_S
    assert left() == pytest.approx(0.0)
    clock.now_s += 0.2 * DAY_S
    assert left() == pytest.approx(1.0)
    clock.now_s += 5 * DAY_S
    assert left() == 1.0


def test_a_time_belongs_to_objectives_about_time():
    assert [key for key, _ in slo_faults({"a": SloConfig(indicator="ttft", objective=0.9)})] == ["slos.a.indicator"]
    wrong = SloConfig(indicator="availability", objective=0.9, within_s=1.0)
    assert [key for key, _ in slo_faults({"a": wrong})] == ["slos.a.within_s"]
    assert list(slo_faults({"a": TTFT, "b": AVAILABILITY})) == []
