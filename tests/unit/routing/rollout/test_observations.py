"""The trial hears of requests in the order in which they began."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.rollout import RolloutVersion
from maitred.routing.rollout.observations import OrderedObservations, PendingObservation
from maitred.routing.rollout.trial import TrialObservation


def entry(number, began_s=0.0):
    return PendingObservation(
        RolloutVersion.CANARY, began_s, lambda now_s: TrialObservation(ttft_s=now_s - began_s, tokens=number)
    )


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_whatever_the_order_of_their_ends(ends, mute):
    observed = []
    lane = OrderedObservations(lambda version, seen: observed.append(seen.tokens), max_wait_s=1.0)
    entries = [entry(number) for number in range(8)]
    for each in entries:
        lane.add(each)
    for number in ends:
        entries[number].end(None if number in mute else TrialObservation(tokens=number))
        lane.advance(0.0)
    assert observed == [number for number in range(8) if number not in mute]
    assert len(lane) == 0


def test_a_request_that_takes_too_long_is_observed_with_what_is_known_by_then():
    observed = []
    lane = OrderedObservations(lambda version, seen: observed.append((seen.tokens, seen.ttft_s)), max_wait_s=5.0)
    slow, quick = entry(1), entry(2, began_s=1.0)
    lane.add(slow)
    lane.add(quick)
    quick.end(TrialObservation(tokens=2))
    assert lane.advance(4.9) == 0
    assert lane.advance(6.0) == 2
    slow.end(TrialObservation(tokens=3))
    assert lane.advance(9.0) == 0
    assert observed == [(1, 6.0), (2, None)]
