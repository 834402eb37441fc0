"""Slices of the shared counters, from which one gateway grants alone while Redis does not answer.

While the shared counters answer, a gateway holds a small part of every counter that it uses: a *slice*, which is taken
out of the shared counter in advance, and which counts as taken there. When the shared counters do not answer, only the
slices decide on reservations. The slice of a rate is refilled at its part of the rate, which the shared counter does
not have meanwhile; the amount that a settlement returns goes back into the slice; the slice of a budget can be spent
only once. All gateways together therefore stay within a limit, and a counter without a slice grants nothing.

Slices are a lease: the shared counters give them to others some time after they have heard the gateway last, and by its
own clock the gateway uses them for less time than that.
"""

import math
from collections.abc import Mapping, Sequence

from maitred.core.counters import CounterKind, CounterState, LimitClaim, Reservation, ReservationGranted
from maitred.core.errors import StoreUnavailable

UNAVAILABLE_MESSAGE = (
    "The shared counters of this service are away, and what this gateway may give without them is used up. "
    "Try again shortly."
)
EXPIRED_MESSAGE = (
    "The shared counters of this service are away for so long that this gateway may give nothing more without them. "
    "Try again later."
)
RETRY_AFTER_S = 1.0
RETRY_AFTER_EXPIRY_S = 5.0


class _Slice:
    """Slice of one counter, with `amount` at the time `at_s`; slices of rates are refilled from then on."""

    __slots__ = ("amount", "at_s", "capacity", "claim", "refill_per_s", "share")

    def __init__(self, claim: LimitClaim, amount: float, share: float, at_s: float) -> None:
        self.claim = claim
        self.amount = amount
        self.share = share
        self.capacity = max(amount, claim.capacity * share)
        self.refill_per_s = claim.refill_per_s * share if claim.kind is CounterKind.BUCKET else 0.0
        self.at_s = at_s

    def refill(self, now_s: float) -> float:
        if self.refill_per_s and now_s > self.at_s:
            self.amount = min(self.capacity, self.amount + (now_s - self.at_s) * self.refill_per_s)
        self.at_s = max(self.at_s, now_s)
        return self.amount


class SliceBook:
    """Slices that this gateway holds.

    All methods are synchronous, so each is atomic.
    """

    def __init__(self) -> None:
        self._slices: dict[str, _Slice] = {}
        self._ends_s = self._pools_end_s = -math.inf

    def __len__(self) -> int:
        return len(self._slices)

    def __contains__(self, counter: str) -> bool:
        return counter in self._slices

    def update(self, claim: LimitClaim, amount: int, now_s: float, *, share: float) -> None:
        """Sets the amount of a counter that this gateway holds, as the shared counters say.

        0 removes it, except from a rate, which is refilled.

        Args:
            claim: Claim on the counter.
            amount: What the gateway holds.
            now_s: Monotonic time.
            share: Part of a rate at which its slice is refilled.
        """
        held_slice = _Slice(claim, amount, share, now_s)
        if amount <= 0 and not held_slice.refill_per_s:
            self._slices.pop(claim.counter, None)
            return
        self._slices[claim.counter] = held_slice

    def lower_share(self, counter: str, share: float, now_s: float) -> None:
        """Lowers the part of a rate at which its slice is refilled, before the shared counters give it to others."""
        held_slice = self._slices.get(counter)
        if held_slice is not None and share < held_slice.share:
            amount = held_slice.refill(now_s)
            self._slices[counter] = _Slice(held_slice.claim, amount, share, held_slice.at_s)

    def lower(self, counter: str, amount: int) -> None:
        """Lowers the amount of a counter to what the shared counters have left of it."""
        held_slice = self._slices.get(counter)
        if held_slice is None or held_slice.amount <= amount:
            return
        held_slice.amount = amount
        if amount <= 0 and not held_slice.refill_per_s:
            del self._slices[counter]

    def reduce(self, counter: str, amount: int, now_s: float) -> None:
        """Lowers the amount of a counter by what the shared counters may have taken out of it."""
        held_slice = self._slices.get(counter)
        if held_slice is not None:
            self.lower(counter, max(0, math.floor(held_slice.refill(now_s)) - amount))

    def amount_of(self, claim: LimitClaim, now_s: float) -> int:
        """Returns the amount of a counter that this gateway holds."""
        held_slice = self._slices.get(claim.counter)
        return max(0, math.ceil(held_slice.refill(now_s))) if held_slice is not None else 0

    def keep_until(self, ends_s: float, pools_end_s: float) -> None:
        """Sets the monotonic times from which on no slice is used, unless the shared counters answer before.

        Slices of pools are used for less time: what is taken from them is used until its request ends.
        """
        self._ends_s, self._pools_end_s = ends_s, pools_end_s

    def to_rows(self, now_s: float) -> list[tuple[str, str, float, float, int, float, float]]:
        """Returns all slices in the form in which `scripts/register.lua` takes them."""
        return [
            (
                counter,
                held_slice.claim.kind.value,
                held_slice.claim.refill_per_s,
                held_slice.claim.ends_s or 0.0,
                self.amount_of(held_slice.claim, now_s),
                held_slice.share,
                held_slice.capacity if held_slice.refill_per_s else 0.0,
            )
            for counter, held_slice in self._slices.items()
        ]

    def drop_expired(self, now_s: float) -> None:
        """Removes all slices if they are kept for too long: the shared counters may have given them to others."""
        if now_s >= self._ends_s:
            self._slices.clear()

    def drop(self, counter: str) -> None:
        """Removes the slice of a counter that is not used any more."""
        self._slices.pop(counter, None)

    def reserve(self, reservation: Reservation, now_s: float) -> ReservationGranted:
        """Takes the amounts of all claims from the slices, or takes nothing.

        Raises:
            StoreUnavailable: A slice is missing, too small or kept for too long.
        """
        output = reservation.output
        if any(
            claim.counter in self._slices and claim.hard and claim.amount(output) > 0 and now_s >= self._end_s(claim)
            for claim in reservation.claims
        ):
            raise StoreUnavailable(EXPIRED_MESSAGE, retry_after_s=RETRY_AFTER_EXPIRY_S)
        for claim in reservation.claims:
            if not claim.hard or claim.amount(reservation.output) <= 0:
                continue
            remaining = self._remaining(claim, now_s)
            if claim.amount(reservation.output) <= remaining:
                continue
            if not claim.clamps or claim.per_output <= 0:
                raise StoreUnavailable(UNAVAILABLE_MESSAGE, retry_after_s=RETRY_AFTER_S)
            max_output = (max(remaining, 0) * claim.divisor - claim.fixed) // claim.per_output
            if max_output < reservation.least_output:
                raise StoreUnavailable(UNAVAILABLE_MESSAGE, retry_after_s=RETRY_AFTER_S)
            output = min(output, max_output)
        for claim in reservation.claims:
            self._add(claim.counter, -claim.amount(output), now_s)
        return ReservationGranted(output, self.states(reservation.claims, now_s))

    def settle(self, claims: Sequence[LimitClaim], output: int, amounts: Mapping[str, int], now_s: float) -> None:
        """Ends a reservation from the slices and returns its unused part to them."""
        for claim in claims:
            used = 0 if claim.kind is CounterKind.POOL else amounts.get(claim.counter, 0)
            self._add(claim.counter, claim.amount(output) - used, now_s)

    def states(self, claims: Sequence[LimitClaim], now_s: float) -> list[CounterState]:
        """Returns the amounts that could be granted now; a counter without a slice grants nothing."""
        return [CounterState(claim.capacity, self._remaining(claim, now_s), 0.0) for claim in claims]

    def _remaining(self, claim: LimitClaim, now_s: float) -> int:
        held_slice = self._slices.get(claim.counter)
        return int(held_slice.refill(now_s) // 1) if held_slice is not None and now_s < self._end_s(claim) else 0

    def _end_s(self, claim: LimitClaim) -> float:
        return self._pools_end_s if claim.kind is CounterKind.POOL else self._ends_s

    def _add(self, counter: str, amount: int, now_s: float) -> None:
        held_slice = self._slices.get(counter)
        if held_slice is not None:
            held_slice.amount = held_slice.refill(now_s) + amount
            if held_slice.refill_per_s:
                held_slice.amount = min(held_slice.capacity, held_slice.amount)
