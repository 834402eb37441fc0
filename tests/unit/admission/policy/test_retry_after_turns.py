import pytest

from maitred.admission.policy.retries import RetryTurns
from maitred.core.counters import CounterKind, LimitClaim

SIXTY_A_MINUTE = LimitClaim("requests|key:a|*", CounterKind.BUCKET, 60, 1, refill_per_s=1.0)
OTHER = LimitClaim("requests|key:b|*", CounterKind.BUCKET, 60, 1, refill_per_s=1.0)


def test_each_one_is_put_behind_those_before():
    turns = RetryTurns()
    assert [turns.take(SIXTY_A_MINUTE, 1, 0.5, now_s=100.0) for _ in range(3)] == [0.5, 1.5, 2.5]
    assert turns.take(SIXTY_A_MINUTE, 4, 1.0, now_s=101.0) == 5.5  # four requests' worth, behind the turn at 102.5
    assert turns.take(OTHER, 1, 0.5, now_s=101.0) == 0.5


def test_turns_that_have_passed_put_nobody_off():
    turns = RetryTurns()
    turns.take(SIXTY_A_MINUTE, 1, 5.0, now_s=100.0)
    assert turns.take(SIXTY_A_MINUTE, 1, 1.0, now_s=200.0) == 1.0


def test_many_callers_that_never_come_back_delay_nobody_for_long():
    turns = RetryTurns()
    waits = [turns.take(SIXTY_A_MINUTE, 1, 1.0, now_s=0.0) for _ in range(1000)]
    assert max(waits) == pytest.approx(31.0)
    assert waits == sorted(waits)


def test_what_has_passed_is_forgotten():
    turns = RetryTurns()
    for number in range(5000):
        claim = LimitClaim(f"requests|key:{number}|*", CounterKind.BUCKET, 60, 1, refill_per_s=1.0)
        turns.take(claim, 1, 1.0, now_s=float(number))
    assert len(turns) <= 1024
