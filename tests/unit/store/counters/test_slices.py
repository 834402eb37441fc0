"""What a gateway may give without the shared counters."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.counters import CounterKind, LimitClaim, Reservation
from maitred.core.errors import StoreUnavailable
from maitred.store.counters.slices import SliceBook


def claim(kind, fixed, *, capacity=1000, **changes):
    return LimitClaim(counter=kind.value, kind=kind, capacity=capacity, fixed=fixed, **changes)


def pool(fixed, **changes):
    return claim(CounterKind.POOL, fixed, **changes)


def budget(fixed, **changes):
    return claim(CounterKind.BUDGET, fixed, **changes)


def bucket(fixed, **changes):
    return claim(CounterKind.BUCKET, fixed, **changes)


def reservation(*claims, output=0, least=None):
    return Reservation("lease", claims, output, output if least is None else least, 30.0)


def book_of(*claims, amount=100, share=0.1):
    book = SliceBook()
    book.keep_until(math.inf, math.inf)
    for claim in claims:
        book.update(claim, amount, 0.0, share=share)
    return book


def test_gives_what_it_holds_and_no_more():
    book = book_of(pool(0), budget(0))
    granted = book.reserve(reservation(pool(60), budget(100)), 0.0)
    assert [reading.remaining for reading in granted.readings] == [40, 0]
    with pytest.raises(StoreUnavailable):
        book.reserve(reservation(pool(41)), 0.0)
    with pytest.raises(StoreUnavailable):
        book.reserve(reservation(pool(1), budget(1)), 0.0)
    assert book.states([pool(0)], 0.0)[0].remaining == 40, "all or nothing"


def test_gives_nothing_of_a_counter_without_a_slice():
    book = book_of(pool(0))
    book.update(budget(0), 0, 0.0, share=0.1)
    for without in (budget(1), bucket(1)):
        with pytest.raises(StoreUnavailable, match="Try again"):
            book.reserve(reservation(without), 0.0)
    book.drop("pool")
    with pytest.raises(StoreUnavailable):
        book.reserve(reservation(pool(1)), 0.0)
    book.reserve(reservation(pool(0), budget(5, hard=False)), 0.0)


def test_clamps_as_the_shared_counters_do():
    book = book_of(budget(0))
    clamping = budget(10, per_output=3, divisor=2, clamps=True)
    with pytest.raises(StoreUnavailable):
        book.reserve(reservation(clamping, output=200, least=64), 0.0)
    granted = book.reserve(reservation(clamping, output=200, least=63), 0.0)
    assert (granted.output, granted.readings[0].remaining) == (63, 0), "63 * 3 + 10 is at most 100 * 2"


def test_rates_refill_at_their_share_up_to_it():
    rate = bucket(0, refill_per_s=50.0)
    book = book_of(rate)
    book.reserve(reservation(bucket(100, refill_per_s=50.0)), 0.0)
    assert book.states([rate], 2.0)[0].remaining == 10
    assert book.states([rate], 1000.0)[0].remaining == 100


def test_gives_nothing_once_others_may_have_its_slices():
    book = book_of(pool(0), budget(0))
    book.keep_until(20.0, 9.0)
    assert book.reserve(reservation(pool(10)), 8.9).output == 0
    book.reserve(reservation(budget(10)), 9.0)
    with pytest.raises(StoreUnavailable, match="so long"):
        book.reserve(reservation(budget(10)), 20.0)
    for now_s in (9.0, 1000.0):
        with pytest.raises(StoreUnavailable, match="so long") as refusal:
            book.reserve(reservation(pool(10)), now_s)
        assert refusal.value.retry_after_s
        assert book.states([pool(0)], now_s)[0].remaining == 0
        book.reserve(reservation(budget(5, hard=False)), now_s)
    assert book.amount_of(pool(0), 9.0) == 90
    book.keep_until(2000.0, 2000.0)
    book.reserve(reservation(pool(90)), 1000.0)


def test_lowering_raises_nothing():
    book = book_of(pool(0))
    for amount, held in ((200, 100), (30, 30), (60, 30), (0, 0)):
        book.lower("pool", amount)
        assert book.amount_of(pool(0), 0.0) == held
    assert "pool" not in book
    book.lower("other", 5)
    assert "other" not in book


def test_settling_returns_what_was_not_used():
    claims = (pool(40), budget(40), bucket(40))
    book = book_of(*claims)
    book.reserve(reservation(*claims), 0.0)
    book.settle(claims, 0, {"pool": 40, "budget": 15, "bucket": 55}, 0.0)
    assert [reading.remaining for reading in book.states(claims, 0.0)] == [100, 85, 45]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.booleans()), max_size=40))
def test_a_budget_gives_its_slice_once(requests):
    book, used = book_of(budget(0)), 0
    for asked, wanted, settles in requests:
        one = budget(0, per_output=1, clamps=True)
        try:
            granted = book.reserve(reservation(one, output=asked, least=0), 0.0)
        except StoreUnavailable:
            continue
        spent = min(wanted, granted.output)
        if settles:
            book.settle([one], granted.output, {"budget": spent}, 0.0)
            used += spent
        else:
            used += granted.output
    assert used <= 100
    assert book.states([budget(0)], 0.0)[0].remaining == 100 - used
