"""What was predicted of the time to first token, beside what was measured."""

import math

from maitred.app.scaling.ttft_outcome import TTFTRecorder


def test_a_minute_has_the_highest_prediction_and_the_measured_percentile():
    outcomes = TTFTRecorder(0.0)
    for number in range(100):
        outcomes.on_first_token(number / 100)
    outcomes.on_decision(0.3, 1.0, 1001.0)
    outcomes.on_decision(0.9, 2.0, 1002.0)
    outcomes.on_decision(None, 3.0, 1003.0)
    assert not outcomes.last, "the minute is not over"
    outcomes.on_decision(0.1, 60.0, 1060.0)
    (outcome,) = outcomes.last
    assert (outcome.at_s, outcome.predicted_s, outcome.measured_s, outcome.requests) == (1060.0, 0.9, 0.94, 100)


def test_each_minute_stands_alone():
    outcomes = TTFTRecorder(0.0)
    outcomes.on_first_token(5.0)
    outcomes.on_decision(math.inf, 1.0, 1.0)
    outcomes.on_decision(0.1, 61.0, 61.0)
    outcomes.on_decision(0.2, 122.0, 122.0)
    assert [outcome.measured_s for outcome in outcomes.last] == [5.0, None]
    assert [outcome.predicted_s for outcome in outcomes.last] == [math.inf, 0.1]


def test_a_minute_of_many_requests_is_sampled_evenly():
    outcomes = TTFTRecorder(0.0)
    for number in range(100_000):
        outcomes.on_first_token(number / 100_000)
    assert len(outcomes._times) <= 4_096
    outcomes.on_decision(None, 60.0, 60.0)
    (outcome,) = outcomes.last
    assert outcome.requests == 100_000
    assert abs(outcome.measured_s - 0.95) < 0.01


def test_the_last_hour_is_kept():
    outcomes = TTFTRecorder(0.0)
    for minute in range(1, 100):
        outcomes.on_decision(None, 60.0 * minute, 60.0 * minute)
    assert len(outcomes.last) == 60
