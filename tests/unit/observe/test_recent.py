"""The last minutes: what is counted, what is bounded, and how exact times are."""

import random

import pytest

from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import QueueFull, Saturated
from maitred.core.tenancy import Principal
from maitred.observe.recent import MAX_POINTS, RecentTraffic
from tests.support.clock import FakeClock


def of(tenant="acme", *, model="tiny", outcome=Outcome.FINISHED, failure=None, gaps_s=(), **more):
    principal = Principal(key=f"{tenant}key", tenants=("team", tenant), scopes=frozenset())
    context = RequestContext("req-1", 0.0, route="/v1/chat/completions", principal=principal, model=model)
    context.outcome, context.failure, context.gaps_s = outcome, failure, list(gaps_s)
    for name, value in more.items():
        setattr(context, name, value)
    return context


def test_a_second_counts_what_ended_in_it():
    recent = RecentTraffic(FakeClock())
    for outcome in (Outcome.FINISHED, Outcome.FINISHED, Outcome.CANCELLED):
        recent.on_request_end(of(outcome=outcome, prompt_tokens=10, completion_tokens=3))
    recent.on_request_end(of(model="", outcome=Outcome.FINISHED))  # a list of models, say
    point = recent.tick(waiting=4, running=2)
    assert point.ended == {Outcome.FINISHED: 2, Outcome.CANCELLED: 1}
    assert (point.prompt_tokens, point.output_tokens, point.waiting, point.running) == (30, 9, 4, 2)
    assert recent.tick(0, 0).ended == {}


def test_ten_minutes_are_kept_and_no_more():
    recent = RecentTraffic(FakeClock())
    for number in range(MAX_POINTS + 50):
        recent.tick(number, 0)
    assert len(recent.points) == MAX_POINTS
    assert recent.points[0].waiting == 50


def test_times_are_those_of_ten_seconds_and_as_exact_as_a_chart_shows():
    recent, chance = RecentTraffic(FakeClock()), random.Random(7)
    times_s = sorted(chance.lognormvariate(-2, 1) for _ in range(4000))
    for time_s in times_s:
        recent.on_first_token(time_s)
    median_s, tail_s = recent.tick(0, 0).ttft_s
    assert median_s == pytest.approx(times_s[2000], rel=0.08)
    assert tail_s == pytest.approx(times_s[3800], rel=0.08)
    for _ in range(9):
        assert recent.tick(0, 0).ttft_s == (median_s, tail_s)
    assert recent.tick(0, 0).ttft_s is None


def test_a_long_answer_counts_with_some_of_its_gaps():
    recent = RecentTraffic(FakeClock())
    recent.on_request_end(of(gaps_s=[0.02] * 10_000))
    recent.on_request_end(of(gaps_s=[0.2] * 70))
    assert recent.tick(0, 0).itl_s == pytest.approx((0.02, 0.2), rel=0.15)


def test_times_beyond_every_bound_count_too():
    recent = RecentTraffic(FakeClock())
    recent.on_first_token(10_000.0)
    recent.on_first_token(0.0)
    assert recent.tick(0, 0).ttft_s[1] > 100


def test_refusals_for_one_reason_are_one_entry_and_the_newest_is_last():
    clock = FakeClock()
    recent = RecentTraffic(clock)
    for number in range(100):
        clock.now_s += 1
        failure = Saturated(f"No room {number}.", retry_after_s=3.0)
        recent.on_request_end(
            of(
                outcome=Outcome.REFUSED,
                failure=failure,
                status=429,
                refused_by="tokens_per_minute",
                ended_s=clock.monotonic_s(),
            )
        )
        if number == 50:
            recent.on_request_end(of("other", outcome=Outcome.FAILED, failure=QueueFull()))
    other, acme = recent.rejections.values()
    assert (acme.count, acme.message, acme.at, acme.retry_after_s) == (100, "No room 99.", clock.now_s, 3.0)
    assert (other.tenant, other.code, other.count) == ("other", "queue_full", 1)


def test_what_is_known_of_tenants_and_refusals_is_bounded():
    recent = RecentTraffic(FakeClock())
    for number in range(2000):
        recent.on_request_end(of(f"t{number}", outcome=Outcome.REFUSED, failure=QueueFull()))
    assert len(recent.rejections) == 50
    assert len(recent.tenants) == 500
    assert recent.tenants["team"].requests == recent.tenants["team"].rejected == 2000  # a team is in each of them
    assert "t1999" in recent.tenants
    assert "t0" not in recent.tenants


def test_who_is_refused_before_a_model_is_known_is_seen():
    recent = RecentTraffic(FakeClock())
    recent.on_request_end(of(model="", outcome=Outcome.REFUSED, failure=Saturated(), principal=None))
    assert [rejection.tenant for rejection in recent.rejections.values()] == [""]
