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

from maitred.core.counters import Claim, CounterKind, Denied, Granted, Reading, Reservation
from maitred.store.counters.tallies import Budget, Tally, bucket_after, new_tally

REMEMBER_S = 3600.0
"""So long after its end a lease can still be settled; later, only the ledger counts what it used."""

_LOOK_AFTER_US = 60_000_000
"""How soon a counter is looked at again."""
_LOOKS = 16
"""Counters that one call looks at: many windows end at one midnight, and no request shall wait for all of them."""
_SPARE_ENDS = 64

_BUDGET = CounterKind.BUDGET
_BUCKET = CounterKind.BUCKET


class BookSize(msgspec.Struct, frozen=True):
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
    claims: Sequence[Claim]
    tallies: list[Tally]
    amounts: list[int]


class Book:
    """Counts. Every method is one atomic step; times must not go backwards.

    Args:
        opens: Begin budgets that are not known as never charged; otherwise they must be opened before.
    """

    def __init__(self, *, opens: bool = True) -> None:
        self._opens = opens
        self._tallies: dict[str, Tally] = {}
        self._leases: dict[str, _Lease] = {}
        self._ends: list[tuple[int, str]] = []
        """Notes of when to look at which lease, at its end at the latest; renewing it leaves an early one."""
        self._expired: dict[str, Sequence[Claim]] = {}
        self._remembered: deque[tuple[int, str]] = deque()
        """The same leases, and some that were settled since, with the end of their time."""
        self._due: list[tuple[int, str]] = []
        """When to see whether a counter may be forgotten; one note for each."""
        self._recalled: dict[str, Sequence[tuple[int, int]]] = {}
        self._recalled_since_us = self._recalled_until_us = -(2**62)

    def size(self) -> BookSize:
        """How much is kept now."""
        return BookSize(len(self._tallies), len(self._leases), len(self._expired), len(self._ends))

    def unseen(self, claims: Sequence[Claim]) -> list[Claim]:
        """Those whose budgets must be opened before anything is reserved of them."""
        if self._opens:
            return []
        return [claim for claim in claims if claim.kind is _BUDGET and claim.counter not in self._tallies]

    def open(self, claim: Claim, charged: int, now_us: int) -> None:
        """Begins a budget, new here, with what it was charged before."""
        self._keep(claim.counter, Budget(claim, charged), now_us)

    def recall(self, taken: Mapping[str, Sequence[tuple[int, int]]], since_us: int, until_us: int) -> None:
        """Says what was taken from buckets before this book was begun: they begin as that has left them.

        Args:
            taken: Bucket -> times, ascending, and what was taken at each.
            since_us: All buckets were empty then, as far as is known.
            until_us: By now all are full again, whatever was taken.
        """
        self._recalled, self._recalled_since_us, self._recalled_until_us = dict(taken), since_us, until_us

    def reserve(self, reservation: Reservation, now_us: int, wall_s: float) -> Granted | Denied | None:
        """See `core.counters.Counters.reserve`; None: a budget is not known and must be opened first.

        Raises:
            ValueError: The lease exists, or two claims are on one counter.
        """
        self._pass_time(now_us, wall_s)
        claims, lease, output = tuple(reservation.claims), reservation.lease, reservation.output
        prompt_tokens, choices = reservation.size.prompt_tokens, reservation.size.choices
        if lease in self._leases or lease in self._expired:
            raise ValueError(f"The lease {lease!r} exists. Each reservation needs an id of its own.")

        # `Claim.amount` is spelled out: a call for every claim would be a good part of the time of a step.
        known, wanted = self._tallies.get, output * choices
        tallies: list[Tally] = []
        rooms: list[int] = []
        amounts: list[int] = []
        fits, new = True, False
        for claim in claims:
            tally = known(claim.counter)
            if tally is None:
                if claim.kind is _BUDGET and not self._opens:
                    return None
                tally, new = self._begun(claim, now_us), True
            room = tally.room(claim, now_us)
            amount = -(-(claim.fixed + claim.per_prompt * prompt_tokens + claim.per_output * wanted) // claim.divisor)
            if amount > room and claim.hard and amount > 0:
                fits = False
            tallies.append(tally)
            rooms.append(room)
            amounts.append(amount)
        if len(set(tallies)) < len(claims) or (new and len({claim.counter for claim in claims}) < len(claims)):
            raise ValueError("Two claims of one reservation are on the same counter. Make them one.")
        if not fits:
            output = _clamped(reservation, rooms)
            amounts = [claim.amount(output, reservation.size) for claim in claims]
        if output < reservation.least_output:
            return _denied(reservation, tallies, rooms, wall_s)

        readings: list[Reading] = []
        for claim, tally, room, amount in zip(claims, tallies, rooms, amounts, strict=True):
            if new and not tally.holders and claim.counter not in self._tallies:
                self._keep(claim.counter, tally, now_us)
            readings.append(tally.take(claim, amount, room, now_us, wall_s))
        ends_us = now_us + int(reservation.lease_s * 1e6)
        self._leases[lease] = _Lease(ends_us, claims, tallies, amounts)
        heappush(self._ends, (ends_us, lease))
        return Granted(output, readings)

    def settle(self, lease: str, amounts: Mapping[str, int], now_us: int, wall_s: float) -> None:
        """See `core.counters.Counters.settle`."""
        self._pass_time(now_us, wall_s)
        running = self._leases.pop(lease, None)
        if running is not None:
            self._release(running, amounts, now_us)
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
                heappush(self._ends, (ends_us, id_))
            lease.ends_us = ends_us

    def read(self, claims: Sequence[Claim], now_us: int, wall_s: float) -> list[Reading]:
        """See `core.counters.Counters.read`."""
        self._pass_time(now_us, wall_s)
        readings = []
        for claim in claims:
            tally = self._tallies.get(claim.counter) or self._begun(claim, now_us)
            readings.append(tally.reading(claim, tally.room(claim, now_us), wall_s))
        return readings

    def _begun(self, claim: Claim, now_us: int) -> Tally:
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

    def _release(self, lease: _Lease, amounts: Mapping[str, int], now_us: int) -> None:
        used = amounts.get
        for claim, tally, amount in zip(lease.claims, lease.tallies, lease.amounts, strict=True):
            tally.settle(amount, used(claim.counter, 0), now_us)

    def _charge_late(self, claims: Sequence[Claim], amounts: Mapping[str, int], now_us: int) -> None:
        for claim in claims:
            used = amounts.get(claim.counter, 0)
            tally = self._tallies.get(claim.counter)
            if tally is None and used and claim.kind is _BUCKET:
                tally = self._begun(claim, now_us)
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
            self._release(lease, {}, now_us)
            self._expired[id_] = lease.claims
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
            else:
                heappush(due, (now_us + max(idle_in_us, _LOOK_AFTER_US), counter))


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


def _denied(reservation: Reservation, tallies: list[Tally], rooms: list[int], wall_s: float) -> Denied:
    last = 0
    longest_s = -math.inf
    readings = []
    for index, (claim, tally, room) in enumerate(zip(reservation.claims, tallies, rooms, strict=True)):
        readings.append(tally.reading(claim, room, wall_s))
        output = reservation.least_output if claim.clamps else reservation.output
        amount = claim.amount(output, reservation.size)
        if not claim.hard or amount <= max(room, 0):
            continue
        wait_s = tally.wait_s(claim, amount, wall_s)
        # What nobody knows is named only when nothing else denies.
        rank_s = -1.0 if wait_s is None else wait_s
        if rank_s > longest_s:
            last, longest_s = index, rank_s
    return Denied(last, readings, longest_s if 0.0 <= longest_s < math.inf else None)
