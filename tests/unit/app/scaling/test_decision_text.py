"""Each reason of a decision is a sentence with its numbers."""

import math

import pytest
from msgspec.structs import replace

from maitred.app.scaling.decision_text import explain_decision
from maitred.scaling.decision import ScalingDecision, ScalingEvidence, ScalingLimit, ScalingReason
from maitred.scaling.forecast import ForecastRange
from maitred.scaling.objectives import ScalingObjectives

OBJECTIVES = ScalingObjectives(ttft_s=2.0, itl_s=0.1, min_replicas=1, max_replicas=4)
EVIDENCE = ScalingEvidence(
    objectives=OBJECTIVES,
    ready=1,
    coming=0,
    ttft_s=1.5,
    ttft_with_one_less_s=6.25,
    itl_s=0.05,
    utilisation=0.5,
    replica_requests_per_s=3.0,
    requests_per_s=ForecastRange(low=1.0, mean=2.0, high=4.0),
    forecast_coverage=0.9,
    waiting=8,
    running=4,
    lead_time_s=30.0,
)


def text_of(reason, **evidence):
    decision = ScalingDecision(at_s=0.0, desired=2, asleep=0, reason=reason, evidence=replace(EVIDENCE, **evidence))
    return explain_decision(decision)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (ScalingReason.BACKLOG, "8 requests wait, and with one less the first token would take 6.25 s of 2 s."),
        (ScalingReason.FORECAST, "2 requests/s are forecast (1 to 4) in 30 s"),
        (ScalingReason.UTILISATION, "busier than 95%"),
        (ScalingReason.MINIMUM, "fewer replicas than min_replicas, 1"),
        (ScalingReason.UNREACHABLE, "(2 s to the first token, 0.1 s between tokens), so none are added for them."),
        (ScalingReason.STEADY, "with one less the first token would take 6.25 s"),
    ],
)
def test_a_reason_has_its_numbers(reason, words):
    assert words in text_of(reason)


@pytest.mark.parametrize("reason", ScalingReason)
def test_every_reason_is_one_sentence(reason):
    text = text_of(reason, ttft_s=None, ttft_with_one_less_s=None)
    assert text.endswith(".")
    assert "None" not in text


def test_a_queue_without_end_is_said_so():
    assert "ever longer" in text_of(ScalingReason.LIMITED, ttft_s=math.inf)


def test_limits_that_bind_are_named():
    limits = (ScalingLimit.MAX_REPLICAS, ScalingLimit.USD_PER_HOUR)
    text = text_of(ScalingReason.LIMITED, limits=limits)
    assert text.endswith("; max_replicas allows no more; max_usd_per_hour allows no more.")
