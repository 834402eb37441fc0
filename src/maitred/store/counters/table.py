"""All counters of one process and the leases on them. Pure: time is an argument.

Nothing runs in the background. Each call first ends the leases whose time is over, and looks at a few counters that
may be forgotten: buckets that are full again, pools that are free, and budgets whose window has passed. So what is
kept is bounded by the counters in use and the leases that run, not by all that were ever met.
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
from maitred.store.counters.tallies import BudgetTally, Tally, bucket_after, new_tally
from maitred.store.counters.tally_group import TallyGroup

REMEMBER_S = 3600.0
"""So long after its end a lease can still be settled; later, only the ledger counts what it used."""

_LOOK_AFTER_US = 60_000_000
"""How soon a counter is looked at again."""
_LOOKS = 16
"""Counters that one call looks at: many windows end at one midnight, and no request shall wait for all of them."""
_SPARE_ENDS = 64
_MOST_TABS = 4096
"""Beyond which all are found anew."""
_FAR_US = 2**62

_BUDGET = CounterKind.BUDGET
_BUCKET = CounterKind.BUCKET


class CounterTableSize(msgspec.Struct, frozen=True):
    """How much is kept."""

    counters: int
    leases: int
    """That run."""
    expired: int
    """Leases that ended without being settled, and may yet be."""
    ends: int
    """Notes of when a lease ends."""


class _Lease(msgspec.Struct):
    ends_us: int
    tab: TallyGroup
    amounts: Sequence[int]


class CounterTable:
    """Counts. Every method is one atomic step; times must not go backwards.

    Args:
        opens: Begin budgets that are not known as never charged; otherwise they must be opened before.
    """

    def __init__(self, *, opens: bool = True) -> None:
        self._opens = opens
        self._tallies: dict[str, Tally] = {}
        self._tabs: dict[int, TallyGroup] = {}
        """Of claims that come again and again as the same object, by its identity. While a tab is here, each of its
        tallies is the one that is kept."""
        self._quiet_until_us = 0
        """No lease ends, and no counter is looked at, before."""
        self._leases: dict[str, _Lease] = {}
        self._ends: list[tuple[int, str]] = []
        """Notes of when to look at which lease, at its end at the latest; renewing it leaves an early one."""
        self._expired: dict[str, Sequence[LimitClaim]] = {}
        self._remembered: deque[tuple[int, str]] = deque()
        """The same leases, and some that were settled since, with the end of their time."""
        self._due: list[tuple[int, str]] = []
        """When to see whether a counter may be forgotten; one note for each."""
        self._recalled: dict[str, Sequence[tuple[int, int]]] = {}
        self._recalled_since_us = self._recalled_until_us = -(2**62)

    def size(self) -> CounterTableSize:
        """How much is kept now."""
        return CounterTableSize(len(self._tallies), len(self._leases), len(self._expired), len(self._ends))

    def unseen(self, claims: Sequence[LimitClaim]) -> list[LimitClaim]:
        """Those whose budgets must be opened before anything is reserved of them."""
        if self._opens:
            return []
        return [claim for claim in claims if claim.kind is _BUDGET and claim.counter not in self._tallies]

    def open(self, claim: LimitClaim, charged: int, now_us: int) -> None:
        """Begins a budget, new here, with what it was charged before."""
        self._keep(claim.counter, BudgetTally(claim, charged), now_us)

    def recall(self, taken: Mapping[str, Sequence[tuple[int, int]]], since_us: int, until_us: int) -> None:
        """Says what was taken from buckets before this book was begun: they begin as that has left them.

        Args:
            taken: Bucket -> times, ascending, and what was taken at each.
            since_us: All buckets were empty then, as far as is known.
            until_us: By now all are full again, whatever was taken.
        """
        self._recalled, self._recalled_since_us, self._recalled_until_us = dict(taken), since_us, until_us
        self._quiet_until_us = since_us

    def reserve(
        self, reservation: Reservation, now_us: int, wall_s: float
    ) -> ReservationGranted | ReservationDenied | None:
        """See `core.counters.Counters.reserve`; None: a budget is not known and must be opened first.

        Raises:
            ValueError: The lease exists, or two claims are on one counter.
        """
        if now_us >= self._quiet_until_us:
            self._pass_time(now_us, wall_s)
        lease, output, size = reservation.lease, reservation.output, reservation.size
        if lease in self._leases or lease in self._expired:
            raise ValueError(f"The lease {lease!r} exists. Each reservation needs an id of its own.")
        tab = self._tabs.get(id(reservation.claims))
        new = tab is None
        if tab is None and (tab := self._tab(reservation.claims, now_us)) is None:
            return None
        rooms, amounts = tab.refresh(now_us), tab.amounts(output, size)
        for claim, room, amount in zip(tab.claims, rooms, amounts, strict=True):
            if amount > room and amount > 0 and claim.hard:
                output = _clamped(reservation, rooms)
                amounts = tab.amounts(output, size)
                break
        if output < reservation.least_output:
            return _denied(reservation, tab, rooms, wall_s)
        tab.take(amounts, now_us)
        if new:
            self._keep_all(tab, now_us)
        ends_us = now_us + int(reservation.lease_s * 1e6)
        self._leases[lease] = _Lease(ends_us, tab, amounts)
        self._watch(ends_us, lease)
        return ReservationGranted(output, tab.readings(wall_s))

    def settle(self, lease: str, amounts: Mapping[str, int], now_us: int, wall_s: float) -> None:
        """See `core.counters.Counters.settle`."""
        if now_us >= self._quiet_until_us:
            self._pass_time(now_us, wall_s)
        running = self._leases.pop(lease, None)
        if running is not None:
            running.tab.settle(running.amounts, amounts, now_us)
            if len(self._ends) > 2 * len(self._leases) + _SPARE_ENDS:
                self._ends = [(kept.ends_us, id_) for id_, kept in self._leases.items()]
                heapify(self._ends)
            return
        expired = self._expired.pop(lease, None)
        if expired is not None:
            self._charge_late(expired, amounts, now_us)

    def renew(self, leases: Sequence[str], lease_s: float, now_us: int, wall_s: float) -> None:
        """See `core.counters.Counters.renew`."""
        self._pass_time(now_us, wall_s)
        ends_us = now_us + int(lease_s * 1e6)
        for id_ in leases:
            lease = self._leases.get(id_)
            if lease is None:
                continue
            if ends_us < lease.ends_us:
                self._watch(ends_us, id_)
            lease.ends_us = ends_us

    def read(self, claims: Sequence[LimitClaim], now_us: int, wall_s: float) -> list[CounterState]:
        """See `core.counters.Counters.read`."""
        self._pass_time(now_us, wall_s)
        tab = TallyGroup(
            claims, [self._tallies.get(claim.counter) or self._make_tally(claim, now_us) for claim in claims]
        )
        tab.refresh(now_us)
        return tab.readings(wall_s)

    def _tab(self, claims: Sequence[LimitClaim], now_us: int) -> TallyGroup | None:
        """Of claims that were not met before, or whose counters have changed; None: a budget must be opened first.

        Raises:
            ValueError: Two claims are on one counter.
        """
        tallies: list[Tally] = []
        for claim in claims:
            tally = self._tallies.get(claim.counter)
            if tally is None:
                if claim.kind is _BUDGET and not self._opens:
                    return None
                tally = self._make_tally(claim, now_us)
            tallies.append(tally)
        if len({claim.counter for claim in claims}) < len(claims):
            raise ValueError("Two claims of one reservation are on the same counter. Make them one.")
        return TallyGroup(claims, tallies)

    def _make_tally(self, claim: LimitClaim, now_us: int) -> Tally:
        """The tally of a counter that has none. A bucket that is not full is kept at once."""
        if claim.kind is not _BUCKET or self._recalled_until_us <= now_us:
            return new_tally(claim, now_us)
        bucket = bucket_after(claim, self._recalled_since_us, self._recalled.pop(claim.counter, ()), now_us)
        if bucket.idle_in_us(now_us, 0.0) is not None:
            self._keep(claim.counter, bucket, now_us)
        return bucket

    def _keep(self, counter: str, tally: Tally, now_us: int) -> None:
        self._tallies[counter] = tally
        heappush(self._due, (now_us + _LOOK_AFTER_US, counter))
        self._quiet_until_us = min(self._quiet_until_us, now_us + _LOOK_AFTER_US)

    def _keep_all(self, tab: TallyGroup, now_us: int) -> None:
        """Of a tab that something was taken from; it serves all who claim the same."""
        for claim, tally in zip(tab.claims, tab.tallies, strict=True):
            if claim.counter not in self._tallies:
                self._keep(claim.counter, tally, now_us)
        if isinstance(tab.claims, tuple):
            if len(self._tabs) >= _MOST_TABS:
                self._tabs.clear()
            self._tabs[id(tab.claims)] = tab

    def _watch(self, ends_us: int, lease: str) -> None:
        """Looks at a lease at that time."""
        heappush(self._ends, (ends_us, lease))
        if ends_us < self._quiet_until_us:
            self._quiet_until_us = ends_us

    def _charge_late(self, claims: Sequence[LimitClaim], amounts: Mapping[str, int], now_us: int) -> None:
        for claim in claims:
            used = amounts.get(claim.counter, 0)
            tally = self._tallies.get(claim.counter)
            if tally is None and used and claim.kind is _BUCKET:
                tally = self._make_tally(claim, now_us)
                if claim.counter not in self._tallies:
                    self._keep(claim.counter, tally, now_us)
            # A budget that is not here ended with its window; a pool had only to be freed.
            if tally is not None:
                tally.charge(used, now_us)

    def _pass_time(self, now_us: int, wall_s: float) -> None:
        ends = self._ends
        while ends and ends[0][0] <= now_us:
            noted_us, id_ = heappop(ends)
            lease = self._leases.get(id_)
            if lease is None:
                continue
            if lease.ends_us > noted_us:
                heappush(ends, (lease.ends_us, id_))
                continue
            del self._leases[id_]
            lease.tab.settle(lease.amounts, {}, now_us)
            self._expired[id_] = lease.tab.claims
            self._remembered.append((lease.ends_us + int(REMEMBER_S * 1e6), id_))
        while self._remembered and self._remembered[0][0] <= now_us:
            self._expired.pop(self._remembered.popleft()[1], None)
        if self._recalled and self._recalled_until_us <= now_us:
            self._recalled = {}
        due = self._due
        for _ in range(_LOOKS):
            if not due or due[0][0] > now_us:
                break
            counter = heappop(due)[1]
            idle_in_us = self._tallies[counter].idle_in_us(now_us, wall_s)
            if idle_in_us is None:
                del self._tallies[counter]
                self._tabs.clear()
            else:
                heappush(due, (now_us + max(idle_in_us, _LOOK_AFTER_US), counter))
        firsts = [queue[0][0] for queue in (ends, self._remembered, due) if queue]
        if self._recalled:
            firsts.append(self._recalled_until_us)
        self._quiet_until_us = min(firsts, default=_FAR_US)


def _clamped(reservation: Reservation, rooms: Sequence[int]) -> int:
    """The most output that fits; less than nothing if a claim that does not clamp has no room."""
    output, size = reservation.output, reservation.size
    for claim, room in zip(reservation.claims, rooms, strict=True):
        if claim.hard and max(room, 0) < claim.amount(reservation.output, size):
            if not (claim.clamps and claim.per_output):
                return -1
            sized = claim.of(size)
            output = min(output, (max(room, 0) * claim.divisor - sized.fixed) // sized.per_output)
    return output


def _denied(reservation: Reservation, tab: TallyGroup, rooms: list[int], wall_s: float) -> ReservationDenied:
    last = 0
    longest_s = -math.inf
    for index, (claim, tally, room) in enumerate(zip(tab.claims, tab.tallies, rooms, strict=True)):
        output = reservation.least_output if claim.clamps else reservation.output
        amount = claim.amount(output, reservation.size)
        if not claim.hard or amount <= max(room, 0):
            continue
        wait_s = tally.wait_s(claim, amount, wall_s)
        # What nobody knows is named only when nothing else denies.
        rank_s = -1.0 if wait_s is None else wait_s
        if rank_s > longest_s:
            last, longest_s = index, rank_s
    return ReservationDenied(last, tab.readings(wall_s), longest_s if 0.0 <= longest_s < math.inf else None)
