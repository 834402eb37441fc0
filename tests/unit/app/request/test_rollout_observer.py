"""What a trial sees of a request."""

from types import SimpleNamespace

import pytest

from maitred.app.request.rollout_observer import observation_from
from maitred.core.context import RequestContext
from maitred.core.rollout import RolloutArm, RolloutVersion

CANARY = RolloutArm(rollout="chat", version=RolloutVersion.CANARY)


def make_context(**known):
    one = RequestContext(request_id="r", route="/v1/chat/completions", started_s=10.0)
    one.arm = CANARY
    for name, value in known.items():
        setattr(one, name, value)
    return one


def seen(of, now_s=20.0):
    return observation_from(CANARY, SimpleNamespace(first_failure=None), of, now_s)


def test_a_wait_in_our_own_queue_says_nothing_of_the_version():
    assert seen(make_context()).ttft_s is None
    assert seen(make_context(dispatched_s=14.0)).ttft_s == 6.0
    assert seen(make_context(dispatched_s=14.0, first_token_s=14.5)).ttft_s == 0.5


def test_what_a_lost_replica_has_cost_is_counted():
    assert seen(make_context(dispatched_s=14.0, first_token_s=14.5, recoveries=1)).ttft_s == 4.5


def test_the_time_between_tokens_is_a_mean_over_tokens_and_not_over_pieces():
    one = make_context(dispatched_s=10.0, first_token_s=10.1, gaps_s=[0.2, 0.4])
    one.completion_tokens = 7
    assert seen(one).itl_s == pytest.approx(0.1)
