"""Table of all counters and leases of one process; callers pass the time, so it is deterministic.

The table has no background task. Each call first ends the expired leases, and then checks a few counters that may be
removable: full buckets, free pools, and budgets whose window has passed. The size of the table therefore depends on the
counters in use and the running leases, and not on all counters that were ever used.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import msgspec

from maitred.core.counters import (
    CounterKind,
    CounterState,
    LimitClaim,
    Reservation,
    ReservationDenied,
    ReservationGranted,
)
from maitred.store.counters.tallies import BudgetTally, Tally, new_tally, restore_bucket
from maitred.store.counters.tally_group import TallyGroup

LATE_SETTLE_S = 3600.0
"""Time after its end in which a lease can be settled; later, only the ledger counts its usage."""

_IDLE_CHECK_US = 60_000_000
"""Shortest time between two checks whether a counter can be removed."""
_MAX_IDLE_CHECKS = 16
"""Largest number of counters that one call checks, because many windows end at midnight.

The bound keeps any one request from waiting for all these checks.
"""
_MAX_STALE_ENDS = 64
_MAX_GROUPS = 4096
"""Largest number of cached groups; above this number the cache is cleared."""
_NEVER_US = 2**62

_BUDGET = CounterKind.BUDGET
_BUCKET = CounterKind.BUCKET


class CounterTableSize(msgspec.Struct, frozen=True):
    """Size of a counter table."""

    counters: int
    leases: int
    """Number of leases that are running."""
    expired: int
    """Number of leases that expired without a settlement, and can still be settled."""
    ends: int
    """Number of entries of the heap of lease ends."""


class _Lease(msgspec.Struct):
    ends_us: int
    group: TallyGroup
    amounts: Sequence[int]


class CounterTable:
    """Table of counters, in which every method is one atomic step.

    Times must not decrease from call to call.

    Args:
        opens_budgets: True: an unknown budget begins with a charged total of 0; False: it must be opened first.
    """

    def __init__(self, *, opens_budgets: bool = True) -> None:
        self._opens_budgets = opens_budgets
        self._tallies: dict[str, Tally] = {}
        self._groups: dict[int, TallyGroup] = {}
        """Cached groups by the identity of the claims object, for claims that are used repeatedly.

        While a group is cached, each of its counter states is the one in `_tallies`.
        """
        self._next_check_us = 0
        """Time before which no lease ends and no counter is checked."""
        self._leases: dict[str, _Lease] = {}
        self._end_heap: list[tuple[int, str]] = []
        """Heap of the times at which leases are checked, at the latest at their ends.

        A renewal leaves the earlier entry in the heap.
        """
        self._expired: dict[str, Sequence[LimitClaim]] = {}
        self._expired_ends: deque[tuple[int, str]] = deque()
        """Expired leases, and some settled ones, each with the last time at which it can be settled."""
        self._idle_heap: list[tuple[int, str]] = []
        """Heap of the times at which counters are checked for removal; one entry for each counter."""
        self._restored_usage: dict[str, Sequence[tuple[int, int]]] = {}
        self._restored_since_us = self._restored_until_us = -(2**62)

    def size(self) -> CounterTableSize:
        """Returns the current size of the table."""
        return CounterTableSize(len(self._tallies), len(self._leases), len(self._expired), len(self._end_heap))

    def unopened_budgets(self, claims: Sequence[LimitClaim]) -> list[LimitClaim]:
        """Returns the claims whose budgets must be opened before amounts of them can be reserved."""
        if self._opens_budgets:
            return []
        return [claim for claim in claims if claim.kind is _BUDGET and claim.counter not in self._tallies]

    def open_budget(self, claim: LimitClaim, charged: int, now_us: int) -> None:
        """Opens a budget that is new in this table, with its earlier charged total."""
        self._add_tally(claim.counter, BudgetTally(claim, charged), now_us)

    def restore_buckets(self, taken: Mapping[str, Sequence[tuple[int, int]]], since_us: int, until_us: int) -> None:
        """Restores what was taken from buckets before this table was made.

        Args:
            taken: Maps each bucket to ascending times with the amount that was taken at each time.
            since_us: Time at which all buckets count as empty.
            until_us: Time at which all buckets are full again, independent of the taken amounts.
        """
        self._restored_usage, self._restored_since_us, self._restored_until_us = dict(taken), since_us, until_us
        self._next_check_us = since_us

    def reserve(
        self, reservation: Reservation, now_us: int, wall_s: float
    ) -> ReservationGranted | ReservationDenied | None:
        """Reserves all claims or none, as `core.counters.Counters.reserve` does.

        Returns:
            The grant or the denial, or None if a budget is unknown and must be opened first.

        Raises:
            ValueError: The lease exists already, or two claims use the same counter.
        """
        if now_us >= self._next_check_us:
            self._advance(now_us, wall_s)
        lease, output, size = reservation.lease, reservation.output, reservation.size
        if lease in self._leases or lease in self._expired:
            raise ValueError(f"The lease {lease!r} exists. Each reservation needs an id of its own.")
        group = self._groups.get(id(reservation.claims))
        is_new = group is None
        if group is None and (group := self._make_group(reservation.claims, now_us)) is None:
            return None
        remaining, amounts = group.refresh_remaining(now_us), group.amounts(output, size)
        for claim, available, amount in zip(group.claims, remaining, amounts, strict=True):
            if amount > available and amount > 0 and claim.hard:
                output = _fitting_output(reservation, remaining)
                amounts = group.amounts(output, size)
                break
        if output < reservation.least_output:
            return _make_denied(reservation, group, remaining, wall_s)
        group.take(amounts, now_us)
        if is_new:
            self._add_group(group, now_us)
        ends_us = now_us + int(reservation.lease_s * 1e6)
        self._leases[lease] = _Lease(ends_us, group, amounts)
        self._schedule_end(ends_us, lease)
        return ReservationGranted(output, group.states(wall_s))

    def settle(self, lease: str, amounts: Mapping[str, int], now_us: int, wall_s: float) -> None:
        """Ends a lease and charges what was used, as `core.counters.Counters.settle` does."""
        if now_us >= self._next_check_us:
            self._advance(now_us, wall_s)
        running = self._leases.pop(lease, None)
        if running is not None:
            running.group.settle(running.amounts, amounts, now_us)
            if len(self._end_heap) > 2 * len(self._leases) + _MAX_STALE_ENDS:
                self._end_heap = [(kept.ends_us, id_) for id_, kept in self._leases.items()]
                heapify(self._end_heap)
            return
        expired = self._expired.pop(lease, None)
        if expired is not None:
            self._charge_late(expired, amounts, now_us)

    def renew(self, leases: Sequence[str], lease_s: float, now_us: int, wall_s: float) -> None:
        """Extends the end of the leases, as `core.counters.Counters.renew` does."""
        self._advance(now_us, wall_s)
        ends_us = now_us + int(lease_s * 1e6)
        for id_ in leases:
            lease = self._leases.get(id_)
            if lease is None:
                continue
            if ends_us < lease.ends_us:
                self._schedule_end(ends_us, id_)
            lease.ends_us = ends_us

    def read(self, claims: Sequence[LimitClaim], now_us: int, wall_s: float) -> list[CounterState]:
        """Returns the state of counters, as `core.counters.Counters.read` does."""
        self._advance(now_us, wall_s)
        group = TallyGroup(
            claims, [self._tallies.get(claim.counter) or self._make_tally(claim, now_us) for claim in claims]
        )
        group.refresh_remaining(now_us)
        return group.states(wall_s)

    def _make_group(self, claims: Sequence[LimitClaim], now_us: int) -> TallyGroup | None:
        """Makes the group of claims that are new, or whose counters have changed.

        Returns:
            The group, or None if a budget must be opened first.

        Raises:
            ValueError: Two claims use the same counter.
        """
        tallies: list[Tally] = []
        for claim in claims:
            tally = self._tallies.get(claim.counter)
            if tally is None:
                if claim.kind is _BUDGET and not self._opens_budgets:
                    return None
                tally = self._make_tally(claim, now_us)
            tallies.append(tally)
        if len({claim.counter for claim in claims}) < len(claims):
            raise ValueError("Two claims of one reservation are on the same counter. Make them one.")
        return TallyGroup(claims, tallies)

    def _make_tally(self, claim: LimitClaim, now_us: int) -> Tally:
        """Makes the state of a counter that has none.

        A bucket that is not full is added to the table at once.
        """
        if claim.kind is not _BUCKET or self._restored_until_us <= now_us:
            return new_tally(claim, now_us)
        bucket = restore_bucket(claim, self._restored_since_us, self._restored_usage.pop(claim.counter, ()), now_us)
        if bucket.keep_for_us(now_us, 0.0) is not None:
            self._add_tally(claim.counter, bucket, now_us)
        return bucket

    def _add_tally(self, counter: str, tally: Tally, now_us: int) -> None:
        self._tallies[counter] = tally
        heappush(self._idle_heap, (now_us + _IDLE_CHECK_US, counter))
        self._next_check_us = min(self._next_check_us, now_us + _IDLE_CHECK_US)

    def _add_group(self, group: TallyGroup, now_us: int) -> None:
        """Adds the counter states of a group from which an amount was taken, and caches the group."""
        for claim, tally in zip(group.claims, group.tallies, strict=True):
            if claim.counter not in self._tallies:
                self._add_tally(claim.counter, tally, now_us)
        if isinstance(group.claims, tuple):
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            self._groups[id(group.claims)] = group

    def _schedule_end(self, ends_us: int, lease: str) -> None:
        """Schedules the check of a lease at the given time."""
        heappush(self._end_heap, (ends_us, lease))
        if ends_us < self._next_check_us:
            self._next_check_us = ends_us

    def _charge_late(self, claims: Sequence[LimitClaim], amounts: Mapping[str, int], now_us: int) -> None:
        for claim in claims:
            used = amounts.get(claim.counter, 0)
            tally = self._tallies.get(claim.counter)
            if tally is None and used and claim.kind is _BUCKET:
                tally = self._make_tally(claim, now_us)
                if claim.counter not in self._tallies:
                    self._add_tally(claim.counter, tally, now_us)
            # A budget without a state ended with its window; a pool needs no charge.
            if tally is not None:
                tally.charge(used, now_us)

    def _advance(self, now_us: int, wall_s: float) -> None:
        end_heap = self._end_heap
        while end_heap and end_heap[0][0] <= now_us:
            noted_end_us, id_ = heappop(end_heap)
            lease = self._leases.get(id_)
            if lease is None:
                continue
            if lease.ends_us > noted_end_us:
                heappush(end_heap, (lease.ends_us, id_))
                continue
            del self._leases[id_]
            lease.group.settle(lease.amounts, {}, now_us)
            self._expired[id_] = lease.group.claims
            self._expired_ends.append((lease.ends_us + int(LATE_SETTLE_S * 1e6), id_))
        while self._expired_ends and self._expired_ends[0][0] <= now_us:
            self._expired.pop(self._expired_ends.popleft()[1], None)
        if self._restored_usage and self._restored_until_us <= now_us:
            self._restored_usage = {}
        idle_heap = self._idle_heap
        for _ in range(_MAX_IDLE_CHECKS):
            if not idle_heap or idle_heap[0][0] > now_us:
                break
            counter = heappop(idle_heap)[1]
            keep_for_us = self._tallies[counter].keep_for_us(now_us, wall_s)
            if keep_for_us is None:
                del self._tallies[counter]
                self._groups.clear()
            else:
                heappush(idle_heap, (now_us + max(keep_for_us, _IDLE_CHECK_US), counter))
        next_times_us = [queue[0][0] for queue in (end_heap, self._expired_ends, idle_heap) if queue]
        if self._restored_usage:
            next_times_us.append(self._restored_until_us)
        self._next_check_us = min(next_times_us, default=_NEVER_US)


def _fitting_output(reservation: Reservation, remaining: Sequence[int]) -> int:
    """Returns the largest output that fits, or -1 if a claim that cannot be reduced does not fit."""
    output, size = reservation.output, reservation.size
    for claim, available in zip(reservation.claims, remaining, strict=True):
        if claim.hard and max(available, 0) < claim.amount(reservation.output, size):
            if not (claim.clamps and claim.per_output):
                return -1
            sized = claim.of(size)
            output = min(output, (max(available, 0) * claim.divisor - sized.fixed) // sized.per_output)
    return output


def _make_denied(reservation: Reservation, group: TallyGroup, remaining: list[int], wall_s: float) -> ReservationDenied:
    worst_claim = 0
    longest_s = -math.inf
    for index, (claim, tally, available) in enumerate(zip(group.claims, group.tallies, remaining, strict=True)):
        output = reservation.least_output if claim.clamps else reservation.output
        amount = claim.amount(output, reservation.size)
        if not claim.hard or amount <= max(available, 0):
            continue
        wait_s = tally.wait_s(claim, amount, wall_s)
        # The denial names a claim with an unknown wait only if no other claim is denied.
        rank_s = -1.0 if wait_s is None else wait_s
        if rank_s > longest_s:
            worst_claim, longest_s = index, rank_s
    return ReservationDenied(worst_claim, group.states(wall_s), longest_s if 0.0 <= longest_s < math.inf else None)
