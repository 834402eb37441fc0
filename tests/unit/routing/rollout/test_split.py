"""Who is served by which version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.rollout import RolloutVersion
from maitred.routing.rollout.split import TrafficSplit

KEYS = [f"key-{number}" for number in range(4000)]
weights = st.floats(0, 1)


def on_canary(split):
    return {key for key in KEYS if split.version_for(key) is RolloutVersion.CANARY}


def test_the_share_is_the_weight():
    assert abs(len(on_canary(TrafficSplit(rollout="r", weight=0.1))) - 400) < 60
    shadowed = sum(TrafficSplit(rollout="r", shadow=0.25).is_shadowed(key) for key in KEYS)
    assert abs(shadowed - 1000) < 90


@given(weights, weights, st.text(max_size=5))
def test_who_has_seen_the_canary_keeps_seeing_it_while_it_grows(first, second, rollout):
    low, high = sorted((first, second))
    split = TrafficSplit(rollout=rollout, weight=low)
    for key in KEYS[:50]:
        if split.version_for(key) is RolloutVersion.CANARY:
            assert split.with_weight(high).version_for(key) is RolloutVersion.CANARY


def test_rollouts_and_shadows_draw_places_of_their_own():
    one, other = on_canary(TrafficSplit(rollout="a", weight=0.5)), on_canary(TrafficSplit(rollout="b", weight=0.5))
    assert abs(len(one & other) - 1000) < 110
    shadows = {key for key in KEYS if TrafficSplit(rollout="a", shadow=0.5).is_shadowed(key)}
    assert abs(len(one & shadows) - 1000) < 110


@given(st.text(), weights)
def test_switch_and_roll_back(key, weight):
    split = TrafficSplit(rollout="r", weight=weight, shadow=0.5)
    assert split.to_canary().version_for(key) is RolloutVersion.CANARY
    back = split.to_canary().to_stable()
    assert back.version_for(key) is RolloutVersion.STABLE
    assert not back.is_shadowed(key)


def test_the_places_are_those_of_every_process_and_release():
    """Known answers, so that an update does not move callers from one version to the other in the middle of a trial."""
    served = "".join(TrafficSplit(rollout="r", weight=0.5).version_for(key)[0] for key in KEYS[:16])
    assert served == "sccscscccsccsscc"


@pytest.mark.parametrize("fields", [{"weight": 1.5}, {"weight": -0.1}, {"shadow": 2}])
def test_shares_lie_between_0_and_1(fields):
    with pytest.raises(ValueError, match="between 0 and 1"):
        TrafficSplit(rollout="r", **fields)
