"""Opinions are counted by model, side of a rollout and verdict, each as often as it is a new one."""

from prometheus_client import CollectorRegistry

from maitred.core.usage import Feedback, FeedbackReceipt
from maitred.observe.metrics.rollouts import FeedbackMetrics

GOOD, BAD = Feedback(score=0.75), Feedback(score=0.25, text="wrong year")


def test_changes_count_and_repeats_do_not():
    registry = CollectorRegistry()
    metrics = FeedbackMetrics(registry)
    for feedback, before in ((GOOD, None), (GOOD, GOOD), (BAD, GOOD), (BAD, BAD)):
        metrics.on_feedback(FeedbackReceipt(feedback, "v2", "chat=canary", before))
    metrics.on_feedback(FeedbackReceipt(Feedback(score=0.5), "v1", "", None))

    def value(name, **labels):
        return registry.get_sample_value(name, labels)

    canary = {"model": "v2", "rollout": "chat", "version": "canary"}
    assert value("maitred_feedback_total", **canary, verdict="good") == 1
    assert value("maitred_feedback_total", **canary, verdict="bad") == 1
    assert value("maitred_feedback_score_sum", **canary) == 1.0
    assert value("maitred_feedback_score_count", **canary) == 2
    assert value("maitred_feedback_total", model="v1", rollout="", version="", verdict="neutral") == 1


def test_no_text_becomes_a_label():
    registry = CollectorRegistry()
    FeedbackMetrics(registry).on_feedback(FeedbackReceipt(BAD, "v2", "a=b=stable", None))
    labels = [sample.labels for family in registry.collect() for sample in family.samples]
    assert {tuple(label.values())[:3] for label in labels} == {("v2", "a=b", "stable")}
    assert "wrong year" not in str(labels)
