"""The round-trip time: the shortest of the last ones, and nothing from answers that came too late."""

import pytest

from maitred.replica.engine.round_trip import RoundTrip


def measure(round_trip, seconds, at_s=100.0):
    round_trip.on_pong(round_trip.on_ping(at_s), at_s + seconds)


def test_the_shortest_of_the_last_counts():
    round_trip = RoundTrip()
    assert round_trip.seconds is None
    for seconds in (0.3, 0.08, 0.5):
        measure(round_trip, seconds)
    assert round_trip.seconds == pytest.approx(0.08)


def test_a_route_that_has_become_longer_is_noticed():
    round_trip = RoundTrip()
    measure(round_trip, 0.01)
    for _ in range(16):
        measure(round_trip, 0.2)
    assert round_trip.seconds == pytest.approx(0.2)


def test_an_answer_to_an_earlier_ping_does_not_count():
    round_trip = RoundTrip()
    first = round_trip.on_ping(0.0)
    second = round_trip.on_ping(5.0)
    round_trip.on_pong(first, 5.001)
    assert round_trip.seconds is None
    round_trip.on_pong(second, 5.1)
    round_trip.on_pong(second, 9.0)
    assert round_trip.seconds == pytest.approx(0.1)
