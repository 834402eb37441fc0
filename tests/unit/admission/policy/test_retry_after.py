"""How fast places come free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.admission.policy.retries import SlotReleaseRate


def after(*times_s, opened_s=0.0):
    departures = SlotReleaseRate()
    departures.restart(opened_s)
    for time_s in times_s:
        departures.on_release(time_s)
    return departures


def test_before_anybody_has_left_it_is_a_guess_that_grows_with_the_evidence_against_it():
    assert after().gap_s(0.1) == 1.0
    assert after().gap_s(7.0) == 7.0


def test_it_is_the_mean_of_what_was_seen():
    assert after(0.5, 1.0, 1.5, 2.0).gap_s(2.0) == 0.5
    assert after(0.5, 1.0, 1.5, 2.0).gap_s(4.0) == 1.0, "that nobody has left since counts too"


def test_what_is_long_past_does_not_count():
    slow_then_fast = after(*range(10, 60, 10), *(60 + step / 10 for step in range(100)))
    assert slow_then_fast.gap_s(70.05) == pytest.approx(0.1, rel=0.02)


def test_the_first_departure_after_an_empty_queue_begins_anew():
    departures = after(1.0, 100.0)
    departures.restart(200.0)
    departures.on_release(200.2)
    assert departures.gap_s(200.2) == pytest.approx(0.2)


@given(st.lists(st.floats(0, 5), max_size=600), st.floats(0, 30))
def test_it_is_the_time_that_the_last_departures_took(gaps_s, later_s):
    departures, times_s = after(), [0.0]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
        departures.on_release(times_s[-1])
    now_s = times_s[-1] + later_s
    counted = [time_s for time_s in times_s[1:][-256:] if time_s >= now_s - 10.0]
    elapsed_s = now_s - times_s[len(times_s) - len(counted) - 1]
    assert departures.gap_s(now_s) == (elapsed_s / len(counted) if counted else max(1.0, elapsed_s))
