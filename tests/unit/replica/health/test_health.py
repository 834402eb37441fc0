import pytest

from maitred.replica.health.breaker import AttemptOutcome, BreakerState
from maitred.replica.health.config import BreakerConfig, HealthConfig, OutlierConfig
from maitred.replica.health.pool import PoolHealth
from maitred.replica.health.replica import ReplicaHealth
from maitred.replica.health.window import OutcomeWindow

CONFIG = HealthConfig(
    breaker=BreakerConfig(max_fails=3, least_requests=4, first_open_s=8.0, most_open_s=30.0),
    outliers=OutlierConfig(share=0.5, least_requests=4),
    slow_start_s=10.0,
    slow_start_least=0.2,
)


def fresh(name="a", draw=0.5):
    return ReplicaHealth(name, CONFIG, lambda: draw)


def send(health, outcome, now_s, times=1, took_s=None):
    for _ in range(times):
        attempt = health.start_attempt(now_s)
        assert attempt is not None
        if took_s is not None:
            health.on_first_token(attempt, now_s + took_s)
        health.on_end(attempt, outcome, now_s + (took_s or 0.0))


def test_failures_in_a_row_open_it_and_one_trial_closes_it():
    health = fresh()
    send(health, AttemptOutcome.FAILURE, 100.0, times=2)
    send(health, AttemptOutcome.SUCCESS, 100.0)
    send(health, AttemptOutcome.NEUTRAL, 100.0)
    assert health.availability(100.0).weight == 1.0
    health = fresh()
    send(health, AttemptOutcome.FAILURE, 100.0, times=3)
    assert not health.availability(101.0).is_available
    assert health.breaker.remaining_s(101.0) == 3.0
    assert health.start_attempt(103.9) is None
    assert health.availability(104.0).is_trial
    trial = health.start_attempt(104.0)
    assert trial is not None
    assert health.start_attempt(104.0) is None
    assert not health.availability(104.0).is_available, "it is tried with one request"
    health.on_end(trial, AttemptOutcome.SUCCESS, 105.0)
    assert [round(health.availability(at_s).weight, 3) for at_s in (105.0, 110.0, 115.0, 200.0)] == [0.2, 0.6, 1.0, 1.0]


def test_a_rate_of_failures_opens_it_though_never_many_in_a_row():
    health = fresh()
    for at_s in range(100, 102):
        send(health, AttemptOutcome.FAILURE, at_s)
        send(health, AttemptOutcome.SUCCESS, at_s)
    assert health.breaker.state(102.0) is BreakerState.CLOSED, "a success is no cause, whatever came before"
    send(health, AttemptOutcome.FAILURE, 102.0)
    assert health.breaker.state(102.0) is BreakerState.OPEN


def test_it_stays_open_for_longer_each_time_until_there_was_peace():
    health, now_s, opened = fresh(draw=1.0), 100.0, []
    send(health, AttemptOutcome.FAILURE, now_s, times=3)
    for _ in range(4):
        opened.append(health.breaker.remaining_s(now_s))
        now_s += opened[-1]
        send(health, AttemptOutcome.FAILURE, now_s)
    assert opened == [8, 16, 30, 30]
    now_s += 30
    send(health, AttemptOutcome.SUCCESS, now_s)
    send(health, AttemptOutcome.FAILURE, now_s + 29, times=3)
    assert health.breaker.remaining_s(now_s + 29) == 30, "it was not closed for long"
    send(health, AttemptOutcome.SUCCESS, now_s + 60)
    send(health, AttemptOutcome.FAILURE, now_s + 100, times=3)
    assert health.breaker.remaining_s(now_s + 100) == 8


def test_the_first_token_of_a_trial_is_enough():
    health = fresh(draw=0.0)
    send(health, AttemptOutcome.FAILURE, 100.0, times=3)
    trial = health.start_attempt(100.0)
    health.on_first_token(trial, 101.0)
    assert health.breaker.state(101.0) is BreakerState.CLOSED
    send(health, AttemptOutcome.FAILURE, 102.0, times=2)
    health.on_end(trial, AttemptOutcome.FAILURE, 102.0)
    assert health.breaker.state(100.0) is not BreakerState.CLOSED, "its failure is the third in a row"


def test_what_was_sent_before_says_nothing_of_after():
    health = fresh(draw=1.0)
    early = [health.start_attempt(100.0) for _ in range(5)]
    send(health, AttemptOutcome.FAILURE, 100.0, times=3)
    health.on_end(early.pop(), AttemptOutcome.SUCCESS, 101.0)
    assert not health.availability(101.0).is_available
    send(health, AttemptOutcome.SUCCESS, 108.0)
    for attempt in early:
        health.on_end(attempt, AttemptOutcome.FAILURE, 109.0)
    assert health.availability(109.0).is_available


def test_who_is_out_of_service_gets_nothing_and_comes_back_as_it_was():
    away = []
    health = ReplicaHealth("r", CONFIG, lambda: 0.0, lambda: bool(away))
    away.append(True)
    assert not health.availability(100.0).is_available
    assert health.start_attempt(100.0) is not None, "what was released to it before is sent"
    away.clear()
    assert health.availability(100.0).weight == 1.0


def pool(*names):
    members = [fresh(name) for name in names]
    peers = PoolHealth(CONFIG.outliers)
    for member in members:
        peers.add(member)
    return peers, members


def test_who_is_slower_than_the_others_is_left_out_and_comes_back_slowly():
    peers, members = pool("a", "b", "c")
    for member, took_s in zip(members, (0.1, 0.11, 0.9), strict=True):
        send(member, AttemptOutcome.SUCCESS, 100.0, times=4, took_s=took_s)
    assert peers.eject_outliers(105.0) == ["c"]
    assert not peers.availability("c", 105.0).is_available
    assert peers.eject_outliers(106.0) == [], "not before the interval is over"
    assert peers.availability("c", 135.0).weight == pytest.approx(0.2)
    assert peers.availability("c", 145.0).weight == 1.0


def test_who_fails_more_than_the_others_is_left_out_for_longer_each_time():
    peers, members = pool("a", "b", "c", "d")
    for round_s in (100.0, 140.0):
        for member in members:
            send(member, AttemptOutcome.SUCCESS, round_s, times=6)
        send(members[0], AttemptOutcome.FAILURE, round_s, times=2)
        assert peers.eject_outliers(round_s + 1) == ["a"]
    assert [peers.availability("a", at_s).is_available for at_s in (200.0, 201.0)] == [False, True]


def test_no_more_than_the_share_is_left_out_the_worst_first():
    peers, members = pool("a", "b", "c", "d", "e")
    for member, took_s in zip(members, (0.1, 0.1, 0.1, 2.0, 9.0), strict=True):
        send(member, AttemptOutcome.SUCCESS, 100.0, times=4, took_s=took_s)
    assert peers.eject_outliers(110.0) == ["e", "d"]
    peers, members = pool("a", "b")
    send(members[0], AttemptOutcome.SUCCESS, 100.0, times=4, took_s=0.1)
    send(members[1], AttemptOutcome.SUCCESS, 100.0, times=4, took_s=1.0)
    assert peers.eject_outliers(110.0) == ["b"]
    members[0]._is_out_of_service = lambda: True
    assert peers.in_panic_mode(111.0)
    assert peers.availability("b", 111.0).is_available, "the slow one is better than none"
    assert peers.start_attempt("b", 111.0) is not None


def test_a_window_forgets():
    window = OutcomeWindow(10.0)
    window.record_outcome(100.0, failed=True)
    window.record_latency(101.0, 4.0)
    window.record_latency(101.0, 1.0)
    assert (window.stats(105.0).failed, window.stats(105.0).mean_latency_s) == (1, pytest.approx(2.0))
    assert (window.stats(110.0).failed, window.stats(110.0).latency_count) == (0, 2)
    assert window.stats(111.5).mean_latency_s == 0.0
