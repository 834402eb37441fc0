"""Messages that are alike, many at a time."""

from maitred.observe.log_limit import LogRateLimiter

A, B = ("maitred.a", 30, "%s is away"), ("maitred.a", 30, "%s is back")


def test_so_many_pass_in_a_second_and_the_others_are_counted():
    flood = LogRateLimiter(3)
    assert [flood.allow(A, 10.0 + 0.1 * step) for step in range(9)] == [True] * 3 + [False] * 6
    assert flood.take_expired(10.9) == []
    assert flood.take_expired(11.0) == [(A, 6)]
    assert flood.take_expired(11.0) == []
    assert flood.allow(A, 11.0)


def test_one_kind_does_not_hold_back_another():
    flood = LogRateLimiter(1)
    assert flood.allow(A, 1.0)
    assert not flood.allow(A, 1.1)
    assert flood.allow(B, 1.2)
    assert flood.take_expired(2.0) == [(A, 1)]
    assert not flood.allow(B, 2.1)
    assert flood.take_all() == [(B, 1)]


def test_no_summary_is_logged_where_every_line_passed():
    flood = LogRateLimiter(2)
    assert flood.allow(A, 1.0)
    assert flood.take_all() == []


def test_all_pass_where_nothing_is_to_be_held_back():
    flood = LogRateLimiter(0)
    assert all(flood.allow(A, 1.0) for _ in range(1000))
    assert flood.take_all() == []


def test_kinds_that_never_end_are_forgotten():
    flood = LogRateLimiter(1)
    for number in range(5000):
        flood.allow(("maitred.a", 30, f"{number}"), 1.0)
        flood.take_expired(1.0)
    assert len(flood._windows) <= 1025
