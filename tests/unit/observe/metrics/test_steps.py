"""Every step is counted once, and what a gateway has not seen is not made up."""

from prometheus_client import CollectorRegistry

from maitred.core.replica import LoadReport
from maitred.observe.metrics.steps import StepMetrics

WHERE = ("m", "local")


def heard(*reports):
    registry = CollectorRegistry()
    steps = StepMetrics(registry)
    for report in reports:
        steps.on_report(WHERE, report)
    labels = {"model": "m", "replica": "local"}
    return lambda name: registry.get_sample_value(f"maitred_step_{name}", labels)


def test_the_difference_between_two_reports_is_a_step():
    value = heard(
        LoadReport(steps=7, step_s=1.0, batched=10, prefill_tokens=100, decode_tokens=50),
        LoadReport(steps=8, step_s=1.25, batched=14, prefill_tokens=120, decode_tokens=53),
        LoadReport(steps=8, step_s=1.25, batched=14, prefill_tokens=120, decode_tokens=53),  # news without a step
    )
    assert value("seconds_count") == 1
    assert value("seconds_sum") == 0.25
    assert value("sequences_sum") == 4
    assert value("tokens_sum") == 23


def test_steps_that_were_not_seen_and_another_life_of_the_engine_are_left_out():
    value = heard(LoadReport(steps=1), LoadReport(steps=5, step_s=9.0), LoadReport(steps=1), LoadReport(steps=2))
    assert value("seconds_count") == 1
    assert value("seconds_sum") == 0
