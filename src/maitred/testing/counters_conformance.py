"""Conformance of counters: checks that apply to every implementation.

::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_counters(check):
        await exercise_counters(my_empty_counters_in_a_context, check)

Time passes only by `CountersUnderTest.advance`, apart from `SLACK_S`: an implementation whose clock cannot be stopped
may add an offset to it. The checks also decide these questions, which `core.counters.Counters` leaves open:

- The state of a bucket is its missing amount, not its remaining amount: a raised capacity gives room at once.
- A claim that takes nothing always fits, even if settling took more than there was.
- A claim that does not clamp needs room for the requested output, and is charged for the granted output.
- In a denial, the time is unknown for a pool, and for a budget that only reservations of others fill, because the end
  of those requests is unknown. Such a claim is named only if no other claim denies. A claim that never fits is named
  before all others: it is larger than the capacity, or its budget is charged and has no end.
- An expired lease is remembered for at least `LATE_S`, so that late settling charges exactly once. An unknown lease is
  ignored.
- The counters of one reservation are distinct.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypedDict, Unpack

import msgspec

from maitred.core.counters import (
    CounterKind,
    Counters,
    CounterState,
    LimitClaim,
    RequestSize,
    Reservation,
    ReservationDenied,
    ReservationGranted,
)

LIMIT_S = 300.0
"""Time limit of each check; counters that hang fail."""

SLACK_S = 5.0
"""Time that may pass by itself during a check, on a crowded machine; the times of the checks are far longer."""

LATE_S = 60.0
"""Time after its end in which a lease can still be settled."""

LEASE_S = 3000.0


class CountersUnderTest(msgspec.Struct, frozen=True):
    """Counters that have counted nothing yet, and controls for their time."""

    counters: Counters
    advance: Callable[[float], Awaitable[None]]
    """Advances the time by some seconds, for leases, buckets and windows."""
    wall_s: Callable[[], float]
    """Wall time of the counters."""
    spent: dict[str, int]
    """Earlier charges of each budget, which a check sets before its first use; a missing budget has 0."""
    asked: list[str]
    """Budgets whose earlier charges the counters asked for."""


MakeCounters = Callable[[], AbstractAsyncContextManager[CountersUnderTest]]
Check = Callable[[CountersUnderTest], Awaitable[None]]


async def exercise_counters(make_counters: MakeCounters, check: Check) -> None:
    """Applies one check to new counters.

    Args:
        make_counters: Makes a context with counters that share nothing with those of an earlier call.
        check: Check from `CHECKS`.

    Raises:
        AssertionError: The counters fail the check.
    """
    async with make_counters() as subject, asyncio.timeout(LIMIT_S):
        await check(subject)


# --- taking ---------------------------------------------------------------------------------------------------------


async def starts_empty(subject: CountersUnderTest) -> None:
    """Checks that new counters are unused, and that reading takes nothing."""
    claims = [_bucket(10, 1, refill_per_s=1.0), _pool(20, 1), _budget(30, 1)]
    for _ in range(3):
        assert [(r.capacity, r.remaining, r.used, r.reserved) for r in await subject.counters.read(claims)] == [
            (10, 10, 0, 0),
            (20, 20, 0, 0),
            (30, 30, 0, 0),
        ]


async def takes_what_is_reserved(subject: CountersUnderTest) -> None:
    """Checks that a grant's readings include the grant, follow the claims' order, and match `read`."""
    claims = [_budget(100, 3, per_output=2), _bucket(10, 4), _pool(20, 5, per_output=1)]
    granted = await _expect_granted(subject, "a", claims, output=6)
    assert granted.output == 6
    assert [(r.remaining, r.used, r.reserved) for r in granted.readings] == [(85, 0, 15), (6, 4, 0), (9, 11, 0)]
    assert [(r.remaining, r.used) for r in await subject.counters.read(claims)] == [(85, 0), (6, 4), (9, 11)]


async def takes_all_or_nothing(subject: CountersUnderTest) -> None:
    """Checks that no claim takes anything if one has no room, and that readings show the state before."""
    await _expect_granted(subject, "a", [_pool(10, 8)])
    claims = [_bucket(10, 5), _budget(10, 5), _pool(10, 3)]
    denied = await _expect_denied(subject, "b", claims)
    assert denied.claim == 2
    assert [(r.remaining, r.reserved) for r in denied.readings] == [(10, 0), (10, 0), (2, 0)]
    assert [r.remaining for r in await subject.counters.read(claims)] == [10, 10, 2]


async def a_denied_lease_does_not_exist(subject: CountersUnderTest) -> None:
    """Checks that settling a denied lease charges nothing."""
    await _expect_denied(subject, "a", [_budget(10, 5), _pool(10, 11)])
    await subject.counters.settle("a", {"budget": 5})
    assert (await _read(subject, _budget(10, 0))).remaining == 10


async def grants_without_claims(subject: CountersUnderTest) -> None:
    """Checks that a reservation without claims is granted in full."""
    granted = await _expect_granted(subject, "a", [], output=77)
    assert (granted.output, granted.readings) == (77, [])
    await subject.counters.settle("a", {})


async def rounds_amounts_up(subject: CountersUnderTest) -> None:
    """Checks that a fraction of a unit counts as a whole unit."""
    claim = _budget(10, 1, per_output=1, divisor=4)
    assert (await _expect_granted(subject, "a", [claim], output=4)).readings[0].reserved == 2
    assert (await _expect_granted(subject, "b", [claim], output=3)).readings[0].reserved == 3


async def counts_the_size_of_a_request(subject: CountersUnderTest) -> None:
    """Checks that a claim counts the prompt's tokens and the output of every choice."""
    claims = [msgspec.structs.replace(_bucket(100, 1, per_output=2), per_prompt=3)]
    claims.append(msgspec.structs.replace(_budget(100, 0, per_output=1, divisor=4, clamps=True), per_prompt=2))
    size = RequestSize(prompt_tokens=4, choices=3)
    granted = await subject.counters.reserve(
        Reservation(lease="a", claims=claims, output=5, least_output=5, lease_s=LEASE_S, size=size)
    )
    assert isinstance(granted, ReservationGranted)
    assert [reading.remaining for reading in granted.readings] == [100 - (1 + 3 * 4 + 2 * 3 * 5), 100 - 6]
    claim = msgspec.structs.replace(_pool(50, 0, per_output=1, clamps=True), per_prompt=1)
    granted = await subject.counters.reserve(
        Reservation(lease="b", claims=[claim], output=100, least_output=1, lease_s=LEASE_S, size=size)
    )
    assert isinstance(granted, ReservationGranted)
    assert granted.output == (50 - 4) // 3
    assert granted.readings[0].remaining == 1
    denied = await subject.counters.reserve(
        Reservation(lease="c", claims=[claim], output=100, least_output=1, lease_s=LEASE_S, size=size)
    )
    assert isinstance(denied, ReservationDenied)
    await subject.counters.settle("b", {})
    assert (await _read(subject, claim)).remaining == 50


async def counts_large_amounts_exactly(subject: CountersUnderTest) -> None:
    """Checks that millions of dollars are still counted exactly in nano-dollars."""
    most = 5_000_000_000_000_000
    await _expect_granted(subject, "a", [_budget(most, most - 10)])
    await subject.counters.settle("a", {"budget": most - 10})
    claim = _budget(most, 1, per_output=3, clamps=True)
    assert (await _expect_granted(subject, "b", [claim], output=10, least=1)).output == 3
    assert (await _read(subject, claim)).remaining == 0
    await _expect_denied(subject, "c", [_budget(most, 1)])


async def never_overshoots_under_concurrency(subject: CountersUnderTest) -> None:
    """Checks that concurrent reservations are granted exactly as far as they fit."""
    claims = [_budget(100, 10), _pool(1000, 10)]
    answers = await asyncio.gather(*(subject.counters.reserve(_reservation(str(n), claims)) for n in range(40)))
    assert sum(isinstance(answer, ReservationGranted) for answer in answers) == 10
    assert [r.remaining for r in await subject.counters.read(claims)] == [0, 900]


# --- clamping -------------------------------------------------------------------------------------------------------


async def clamps_to_the_largest_output_that_fits(subject: CountersUnderTest) -> None:
    """Checks clamping in each kind of counter; the tightest claim decides."""
    claims = [
        _bucket(50, 10, per_output=1, clamps=True),
        _pool(100, 10, per_output=3, clamps=True),
        _budget(20, 5, per_output=7, divisor=3, clamps=True),
    ]
    # The largest output is 7, as 5 + 7 * 7 is at most 20 * 3. The claim takes 18 units; then an output of 0 fits, as 5
    # + 7 * 0 is at most 2 * 3. It takes 18, and 5 + 7 * 0 is at most the other 2 * 3.
    for lease, largest in (("a", 7), ("b", 0)):
        assert (await _expect_granted(subject, lease, claims, output=60, least=0)).output == largest
    assert [r.remaining for r in await subject.counters.read(claims)] == [50 - 17 - 10, 100 - 31 - 10, 20 - 18 - 2]
    for claim, largest in ((claims[0], 13), (claims[1], 16)):
        assert (await _expect_granted(subject, f"c{largest}", [claim], output=60, least=1)).output == largest


async def denies_below_the_least_output(subject: CountersUnderTest) -> None:
    """Checks that exactly the least output is granted, and one token more is denied."""
    claim = _budget(100, 40, per_output=2, clamps=True)
    assert (await _expect_denied(subject, "a", [claim], output=60, least=31)).claim == 0
    assert (await _expect_granted(subject, "b", [claim], output=60, least=30)).output == 30


async def asks_rigid_claims_for_all_and_charges_them_for_less(subject: CountersUnderTest) -> None:
    """Checks that a rigid claim needs room for the requested output, but takes the clamped output."""
    budget = _budget(100, 0, per_output=10, clamps=True)
    assert (await _expect_denied(subject, "a", [_pool(49, 0, per_output=1), budget], output=50, least=1)).claim == 0
    granted = await _expect_granted(subject, "b", [_pool(50, 0, per_output=1), budget], output=50, least=1)
    assert (granted.output, [r.remaining for r in granted.readings]) == (10, [40, 0])


async def soft_claims_only_count(subject: CountersUnderTest) -> None:
    """Checks that soft claims neither deny nor clamp, however much was charged."""
    soft = [
        _bucket(10, 8, per_output=1, clamps=True, hard=False),
        _pool(10, 8, per_output=1, clamps=True, hard=False),
        _budget(10, 8, per_output=1, clamps=True, hard=False),
    ]
    for lease in ("a", "b"):
        assert (await _expect_granted(subject, lease, soft, output=4, least=1)).output == 4
    assert [r.remaining for r in await subject.counters.read(soft)] == [-14, -14, -14]
    await _expect_denied(subject, "c", [_budget(10, 1)])


async def nothing_always_fits(subject: CountersUnderTest) -> None:
    """Checks that a claim of nothing is not refused by a budget that is overspent."""
    await _expect_granted(subject, "a", [_budget(10, 10), _bucket(10, 10)])
    await subject.counters.settle("a", {"budget": 15, "bucket": 15})
    await _expect_granted(subject, "b", [_budget(10, 0), _bucket(10, 0)])
    clamped = [_budget(10, 0, per_output=2, clamps=True)]
    assert (await _expect_granted(subject, "c", clamped, output=9, least=0)).output == 0
    await _expect_denied(subject, "d", clamped, output=9, least=1)


async def follows_a_changed_capacity(subject: CountersUnderTest) -> None:
    """Checks that taken amounts stay taken when the capacity changes."""
    await _expect_granted(subject, "a", [_bucket(10, 6), _pool(10, 6), _budget(10, 6)])
    for capacity in (20, 8, 3):
        claims = [_bucket(capacity, 0), _pool(capacity, 0), _budget(capacity, 0)]
        assert [r.remaining for r in await subject.counters.read(claims)] == [capacity - 6] * 3
    await _expect_granted(subject, "b", [_bucket(20, 14), _pool(20, 14), _budget(20, 14)])


# --- buckets --------------------------------------------------------------------------------------------------------


async def buckets_refill(subject: CountersUnderTest) -> None:
    """Checks that buckets refill continuously, up to their capacity."""
    claim = _bucket(10, 10, refill_per_s=0.005)
    await _expect_granted(subject, "a", [claim])
    await subject.counters.settle("a", {"bucket": 10})
    await _expect_denied(subject, "b", [_bucket(10, 1, refill_per_s=0.005)])
    await subject.advance(300.0)
    assert (await _read(subject, claim)).remaining == 1
    await subject.advance(310.0)
    assert (await _read(subject, claim)).remaining == 3
    await subject.advance(100_000.0)
    assert (await _read(subject, claim)).remaining == 10
    await _expect_granted(subject, "c", [claim])
    await _expect_denied(subject, "d", [_bucket(10, 1, refill_per_s=0.005)])


async def buckets_take_back_what_was_not_used(subject: CountersUnderTest) -> None:
    """Checks that unused amounts return at once, but never above the capacity."""
    claim = _bucket(100, 60, refill_per_s=0.01)
    await _expect_granted(subject, "a", [claim])
    await subject.counters.settle("a", {"bucket": 20})
    assert (await _read(subject, claim)).remaining == 80
    await _expect_granted(subject, "b", [claim])
    await subject.advance(2510.0)
    assert (await _read(subject, claim)).remaining == 45
    await subject.counters.settle("b", {})
    assert (await _read(subject, claim)).remaining == 100


async def buckets_go_below_zero(subject: CountersUnderTest) -> None:
    """Checks that a bucket goes below zero when an estimate was too low, and must refill first."""
    claim = _bucket(10, 10, refill_per_s=0.01)
    await _expect_granted(subject, "a", [claim])
    await subject.counters.settle("a", {"bucket": 15})
    reading = await _read(subject, claim)
    assert -5 <= reading.remaining <= -4
    assert abs(reading.reset_s - 1500.0) <= SLACK_S
    denied = await _expect_denied(subject, "b", [_bucket(10, 1, refill_per_s=0.01)])
    assert denied.retry_after_s is not None
    assert abs(denied.retry_after_s - 600.0) <= SLACK_S
    await subject.advance(550.0)
    await _expect_denied(subject, "b", [_bucket(10, 1, refill_per_s=0.01)])
    await subject.advance(60.0)
    await _expect_granted(subject, "b", [_bucket(10, 1, refill_per_s=0.01)])


# --- pools and budgets ----------------------------------------------------------------------------------------------


async def pools_are_freed_by_settling(subject: CountersUnderTest) -> None:
    """Checks that settling frees all of a pool, whatever was used."""
    await _expect_granted(subject, "a", [_pool(10, 4)])
    await _expect_granted(subject, "b", [_pool(10, 6)])
    await _expect_denied(subject, "c", [_pool(10, 1)])
    await subject.counters.settle("a", {"pool": 9})
    assert (await _read(subject, _pool(10, 0))).used == 6
    await _expect_granted(subject, "c", [_pool(10, 4)])
    await subject.counters.settle("b", {})
    await subject.counters.settle("c", {})
    assert (await _read(subject, _pool(10, 0))).remaining == 10


async def budgets_are_charged_and_the_rest_returned(subject: CountersUnderTest) -> None:
    """Checks that a charge stays when the rest of a reservation is returned."""
    await _expect_granted(subject, "a", [_budget(100, 60)])
    await _expect_denied(subject, "b", [_budget(100, 60)])
    await subject.counters.settle("a", {"budget": 10})
    await subject.advance(100 * LEASE_S)
    reading = await _read(subject, _budget(100, 0))
    assert (reading.remaining, reading.used, reading.reserved) == (90, 10, 0)
    await _expect_granted(subject, "b", [_budget(100, 90)])


async def budgets_are_charged_more_than_was_reserved(subject: CountersUnderTest) -> None:
    """Checks that a charge above the reservation counts, and that nothing more is granted then."""
    await _expect_granted(subject, "a", [_budget(100, 60)])
    await subject.counters.settle("a", {"budget": 130})
    reading = await _read(subject, _budget(100, 0))
    assert (reading.remaining, reading.used, reading.reserved) == (-30, 130, 0)
    await _expect_denied(subject, "b", [_budget(100, 1)])


async def budgets_begin_with_what_was_spent(subject: CountersUnderTest) -> None:
    """Checks that earlier charges are asked for once, at the first use of a budget, and only for budgets."""
    subject.spent["budget"] = 70
    claims = [_budget(100, 30), _pool(10, 1), _bucket(10, 1)]
    assert [r.remaining for r in await subject.counters.read(claims)] == [30, 10, 10]
    await _expect_denied(subject, "a", [_budget(100, 31)])
    await _expect_granted(subject, "b", claims)
    await subject.counters.settle("b", {"budget": 30})
    assert (await _read(subject, claims[0])).used == 100
    assert subject.asked == ["budget"]


async def budgets_met_by_many_at_once_are_counted_once(subject: CountersUnderTest) -> None:
    """Checks that concurrent first uses of a budget lose nothing and count nothing twice."""
    subject.spent.update(day=50, month=20)
    both = [_budget(100, 10, counter="day"), _budget(100, 10, counter="month")]
    one = [_budget(100, 10, counter="day"), _pool(1000, 1)]
    answers = await asyncio.gather(
        *(subject.counters.reserve(_reservation(str(n), both if n % 2 else one)) for n in range(20)),
        subject.counters.read(both),
    )
    granted = [n for n in range(20) if isinstance(answers[n], ReservationGranted)]
    assert len(granted) == 5
    day, month, pool = await subject.counters.read([*both, _pool(1000, 1)])
    assert (day.used, day.reserved) == (50, 50)
    assert (month.used, month.reserved) == (20, 10 * sum(n % 2 for n in granted))
    assert pool.used == sum(1 - n % 2 for n in granted)


async def a_new_window_is_a_new_budget(subject: CountersUnderTest) -> None:
    """Checks that running requests settle in the window that they began in."""
    old = _budget(10, 10, counter="day-1", ends_s=subject.wall_s() + 600.0)
    await _expect_granted(subject, "a", [old])
    await subject.counters.renew(["a"], 2 * LEASE_S)
    await subject.advance(601.0)
    new = _budget(10, 10, counter="day-2", ends_s=subject.wall_s() + 600.0)
    await _expect_granted(subject, "b", [new])
    await subject.counters.settle("a", {"day-1": 10})
    reading = await _read(subject, new)
    assert (reading.used, reading.reserved) == (0, 10)


# --- settling -------------------------------------------------------------------------------------------------------


async def settling_twice_changes_nothing(subject: CountersUnderTest) -> None:
    """Checks that a second settling changes neither charges nor the reservations of others."""
    claims = [_budget(100, 40), _bucket(100, 40), _pool(100, 40)]
    await _expect_granted(subject, "a", claims)
    await _expect_granted(subject, "b", claims)
    for _ in range(3):
        await subject.counters.settle("a", {"budget": 5, "bucket": 6, "pool": 7})
    assert [(r.used, r.reserved) for r in await subject.counters.read(claims)] == [(5, 40), (46, 0), (40, 0)]


async def settling_an_unknown_lease_changes_nothing(subject: CountersUnderTest) -> None:
    """Checks that settling a lease that is unknown, perhaps settled long ago, changes nothing."""
    claims = [_budget(100, 40), _bucket(100, 40), _pool(100, 40)]
    await _expect_granted(subject, "a", claims)
    await subject.counters.settle("never-made", {"budget": 5, "bucket": 6, "pool": 7})
    assert [(r.used, r.reserved) for r in await subject.counters.read(claims)] == [(0, 40), (40, 0), (40, 0)]


async def what_is_not_named_was_not_used(subject: CountersUnderTest) -> None:
    """Checks that settling without amounts returns everything."""
    claims = [_budget(100, 40), _bucket(100, 40), _pool(100, 40)]
    await _expect_granted(subject, "a", claims)
    await subject.counters.settle("a", {})
    assert [r.remaining for r in await subject.counters.read(claims)] == [100, 100, 100]


# --- leases ---------------------------------------------------------------------------------------------------------


async def leases_expire(subject: CountersUnderTest) -> None:
    """Checks that the lease of a dead gateway returns everything, but only after its end."""
    claims = [_budget(100, 40), _bucket(100, 40), _pool(100, 40)]
    await _expect_granted(subject, "a", claims)
    await subject.advance(LEASE_S - 2 * SLACK_S)
    assert [r.remaining for r in await subject.counters.read(claims)] == [60, 60, 60]
    await subject.advance(2 * SLACK_S + 1.0)
    assert [(r.remaining, r.used, r.reserved) for r in await subject.counters.read(claims)] == [(100, 0, 0)] * 3
    await _expect_granted(subject, "b", [_pool(100, 100)])


async def an_expired_lease_is_charged_once(subject: CountersUnderTest) -> None:
    """Checks that late usage is charged, and that nothing is returned twice."""
    claims = [_budget(100, 40), _bucket(100, 40), _pool(100, 40)]
    await _expect_granted(subject, "a", claims)
    await subject.advance(LEASE_S + LATE_S - 2 * SLACK_S)
    await _expect_granted(subject, "b", [_pool(100, 90)])
    for _ in range(2):
        await subject.counters.settle("a", {"budget": 15, "bucket": 25, "pool": 40})
        readings = await subject.counters.read(claims)
        assert [(r.used, r.reserved) for r in readings] == [(15, 0), (25, 0), (90, 0)]


async def renewing_puts_off_the_end(subject: CountersUnderTest) -> None:
    """Checks that a renewed lease lasts from now on, and that an unknown lease is ignored."""
    await _expect_granted(subject, "a", [_pool(100, 40)])
    await _expect_granted(subject, "b", [_pool(100, 20)])
    for _ in range(3):
        await subject.advance(LEASE_S - 2 * SLACK_S)
        await subject.counters.renew(["never-made", "a"], LEASE_S)
    assert (await _read(subject, _pool(100, 0))).used == 40
    await _expect_granted(subject, "c", [_pool(100, 30)])
    await subject.counters.renew(["a", "c"], 500.0)
    await subject.advance(501.0)
    assert (await _read(subject, _pool(100, 0))).used == 0


async def renewing_does_not_revive(subject: CountersUnderTest) -> None:
    """Checks that an expired lease is not revived by renewing, but can still be settled."""
    await _expect_granted(subject, "a", [_pool(100, 40), _budget(100, 40)])
    await subject.advance(LEASE_S + 1.0)
    await subject.counters.renew(["a"], LEASE_S)
    assert [r.remaining for r in await subject.counters.read([_pool(100, 0), _budget(100, 0)])] == [100, 100]
    await subject.counters.settle("a", {"budget": 7})
    assert (await _read(subject, _budget(100, 0))).used == 7


# --- contents of denials and readings ---


async def says_when_a_bucket_has_refilled(subject: CountersUnderTest) -> None:
    """Checks that a denial names the exact time at which the least useful output fits."""
    claim = _bucket(100, 10, per_output=1, refill_per_s=0.02, clamps=True)
    await _expect_granted(subject, "a", [claim], output=80)
    await subject.counters.settle("a", {"bucket": 90})
    denied = await _expect_denied(subject, "b", [claim], output=90, least=20)
    assert denied.retry_after_s is not None
    assert abs(denied.retry_after_s - 1000.0) <= SLACK_S, "30 are wanted, 10 are left"
    await subject.advance(denied.retry_after_s - 3 * SLACK_S)
    await _expect_denied(subject, "b", [claim], output=90, least=20)
    await subject.advance(4 * SLACK_S)
    assert (await _expect_granted(subject, "b", [claim], output=90, least=20)).output == 20


async def says_when_the_window_of_a_budget_ends(subject: CountersUnderTest) -> None:
    """Checks that a charge ends only with the window of its budget."""
    claim = _budget(100, 60, ends_s=subject.wall_s() + 3600.0)
    await _expect_granted(subject, "a", [claim])
    await subject.counters.settle("a", {"budget": 60})
    denied = await _expect_denied(subject, "b", [claim])
    assert denied.retry_after_s is not None
    assert abs(denied.retry_after_s - 3600.0) <= SLACK_S


async def says_when_waiting_cannot_help(subject: CountersUnderTest) -> None:
    """Checks that a claim above the capacity, or on a charged endless budget, never fits."""
    ends_s = subject.wall_s() + 60.0
    for lease, claim in enumerate(
        [
            _bucket(10, 11, refill_per_s=1.0),
            _pool(10, 11),
            _budget(10, 11, counter="total"),
            _budget(10, 11, counter="day", ends_s=ends_s),
            _pool(10, 1, per_output=2, clamps=True),
        ]
    ):
        denied = await _expect_denied(subject, str(lease), [claim], output=9, least=5)
        assert (denied.claim, denied.retry_after_s) == (0, None)
    await _expect_granted(subject, "a", [_budget(10, 10), _bucket(10, 10, refill_per_s=0.0)])
    await subject.counters.settle("a", {"budget": 10, "bucket": 10})
    for claim in (_budget(10, 1), _bucket(10, 1, refill_per_s=0.0)):
        assert (await _expect_denied(subject, "b", [claim])).retry_after_s is None


async def knows_no_time_for_what_others_hold(subject: CountersUnderTest) -> None:
    """Checks that no time is given for what other requests hold, because their end is unknown."""
    day = _budget(10, 6, ends_s=subject.wall_s() + 3600.0)
    await _expect_granted(subject, "a", [_pool(10, 6), day])
    assert (await _expect_denied(subject, "b", [_pool(10, 6)])).retry_after_s is None
    assert (await _expect_denied(subject, "b", [day])).retry_after_s is None


async def names_the_claim_that_fits_last(subject: CountersUnderTest) -> None:
    """Checks the order in denials: never, then the later time, then unknown; fitting claims are omitted."""
    free = _pool(10, 1, counter="free")
    busy = _pool(10, 6, counter="busy")
    soon = _bucket(10, 10, counter="soon", refill_per_s=0.01)
    later = _bucket(10, 10, counter="later", refill_per_s=0.005)
    held = _budget(10, 6, counter="held", ends_s=subject.wall_s() + 9000.0)
    day = _budget(10, 6, counter="day", ends_s=subject.wall_s() + 3600.0)
    never = _budget(10, 6, counter="never")
    await _expect_granted(subject, "charged", [soon, later, day, never])
    await subject.counters.settle("charged", {"soon": 10, "later": 10, "day": 6, "never": 6})
    await _expect_granted(subject, "running", [busy, held])
    in_order: list[tuple[LimitClaim, float | None]] = [
        (busy, None),
        (soon, 1000.0),
        (later, 2000.0),
        (day, 3600.0),
        (never, None),
    ]
    for last in range(len(in_order)):
        expected, retry_after_s = in_order[last]
        for others in (in_order[:last], in_order[:last][::-1]):
            for claims in (
                [free, expected, *(claim for claim, _ in others)],
                [*(claim for claim, _ in others), free, expected],
            ):
                denied = await _expect_denied(subject, "b", claims)
                assert claims[denied.claim] is expected
                if retry_after_s is None:
                    assert denied.retry_after_s is None
                else:
                    assert denied.retry_after_s is not None
                    assert abs(denied.retry_after_s - retry_after_s) <= 20 * SLACK_S
    assert (await _expect_denied(subject, "b", [held, soon])).claim == 1


async def says_when_it_is_full_again(subject: CountersUnderTest) -> None:
    """Checks the time until full: of buckets by refill, of budgets by window; of pools it is unknown."""
    claims = [_bucket(10, 5, refill_per_s=0.005), _pool(10, 5), _budget(10, 5, ends_s=subject.wall_s() + 6000.0)]
    granted = await _expect_granted(subject, "a", claims)
    for readings in (granted.readings, await subject.counters.read(claims)):
        assert abs(readings[0].reset_s - 1000.0) <= SLACK_S
        assert readings[1].reset_s == 0.0
        assert abs(readings[2].reset_s - 6000.0) <= SLACK_S
    await subject.advance(2000.0)
    assert (await _read(subject, claims[0])).reset_s == 0.0
    assert (await _read(subject, _budget(10, 0, counter="endless"))).reset_s == 0.0


CHECKS: tuple[Check, ...] = (
    starts_empty,
    takes_what_is_reserved,
    takes_all_or_nothing,
    a_denied_lease_does_not_exist,
    grants_without_claims,
    rounds_amounts_up,
    counts_the_size_of_a_request,
    counts_large_amounts_exactly,
    never_overshoots_under_concurrency,
    clamps_to_the_largest_output_that_fits,
    denies_below_the_least_output,
    asks_rigid_claims_for_all_and_charges_them_for_less,
    soft_claims_only_count,
    nothing_always_fits,
    follows_a_changed_capacity,
    buckets_refill,
    buckets_take_back_what_was_not_used,
    buckets_go_below_zero,
    pools_are_freed_by_settling,
    budgets_are_charged_and_the_rest_returned,
    budgets_are_charged_more_than_was_reserved,
    budgets_begin_with_what_was_spent,
    budgets_met_by_many_at_once_are_counted_once,
    a_new_window_is_a_new_budget,
    settling_twice_changes_nothing,
    settling_an_unknown_lease_changes_nothing,
    what_is_not_named_was_not_used,
    leases_expire,
    an_expired_lease_is_charged_once,
    renewing_puts_off_the_end,
    renewing_does_not_revive,
    says_when_a_bucket_has_refilled,
    says_when_the_window_of_a_budget_ends,
    says_when_waiting_cannot_help,
    knows_no_time_for_what_others_hold,
    names_the_claim_that_fits_last,
    says_when_it_is_full_again,
)


class _More(TypedDict, total=False):
    counter: str
    per_output: int
    divisor: int
    refill_per_s: float
    ends_s: float | None
    hard: bool
    clamps: bool


def _bucket(capacity: int, fixed: int, **more: Unpack[_More]) -> LimitClaim:
    # The default refill is so slow that a check does not notice it. It is above zero, because a refill of zero has a
    # different meaning.
    return _claim(CounterKind.BUCKET, capacity, fixed, {"refill_per_s": 1e-6, **more})


def _pool(capacity: int, fixed: int, **more: Unpack[_More]) -> LimitClaim:
    return _claim(CounterKind.POOL, capacity, fixed, more)


def _budget(capacity: int, fixed: int, **more: Unpack[_More]) -> LimitClaim:
    return _claim(CounterKind.BUDGET, capacity, fixed, more)


def _claim(kind: CounterKind, capacity: int, fixed: int, more: _More) -> LimitClaim:
    more = {"counter": kind.value, **more}
    return LimitClaim(kind=kind, capacity=capacity, fixed=fixed, **more)


def _reservation(lease: str, claims: list[LimitClaim], output: int = 0, least: int | None = None) -> Reservation:
    return Reservation(
        lease=lease,
        claims=claims,
        output=output,
        least_output=output if least is None else least,
        lease_s=LEASE_S,
    )


async def _expect_granted(
    subject: CountersUnderTest, lease: str, claims: list[LimitClaim], *, output: int = 0, least: int | None = None
) -> ReservationGranted:
    answer = await subject.counters.reserve(_reservation(lease, claims, output, least))
    assert isinstance(answer, ReservationGranted), f"there is room, yet: {answer}"
    return answer


async def _expect_denied(
    subject: CountersUnderTest, lease: str, claims: list[LimitClaim], *, output: int = 0, least: int | None = None
) -> ReservationDenied:
    answer = await subject.counters.reserve(_reservation(lease, claims, output, least))
    assert isinstance(answer, ReservationDenied), f"there is no room, yet: {answer}"
    return answer


async def _read(subject: CountersUnderTest, claim: LimitClaim) -> CounterState:
    (reading,) = await subject.counters.read([claim])
    return reading
