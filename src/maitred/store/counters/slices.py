"""What one gateway may give by itself while the shared counters are away.

In good times a gateway holds a small part of every counter that it uses: a *slice*, taken out of the shared counter in
advance. When the shared counters do not answer, reservations are decided against the slices alone. A rate's slice is
refilled at its part of the rate; what settling gives back of a slice's reservation returns to the slice; a budget's
slice is spent once. So all gateways together pass a limit by no more than the sum of their slices, and a counter
without a slice gives nothing.
"""

from collections.abc import Mapping, Sequence

from maitred.core.counters import CounterKind, CounterState, LimitClaim, Reservation, ReservationGranted
from maitred.core.errors import StoreUnavailable

AWAY = (
    "The shared counters of this service are away, and what this gateway may give without them is used up. "
    "Try again shortly."
)
RETRY_AFTER_S = 1.0


class _Slice:
    """One counter's. `amount` is of a time `at_s`; rates are refilled from then on."""

    __slots__ = ("amount", "at_s", "most", "refill_per_s")

    def __init__(self, amount: float, most: float, refill_per_s: float, at_s: float) -> None:
        self.amount = amount
        self.most = most
        self.refill_per_s = refill_per_s
        self.at_s = at_s

    def now(self, now_s: float) -> float:
        if self.refill_per_s and now_s > self.at_s:
            self.amount = min(self.most, self.amount + (now_s - self.at_s) * self.refill_per_s)
        self.at_s = max(self.at_s, now_s)
        return self.amount


class SliceBook:
    """The slices that this gateway holds. All methods are synchronous, so each is atomic.

    Args:
        share: Part of a rate at which its slice is refilled.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._slices: dict[str, _Slice] = {}

    def __len__(self) -> int:
        return len(self._slices)

    def __contains__(self, counter: str) -> bool:
        return counter in self._slices

    def put(self, claim: LimitClaim, amount: int, now_s: float) -> None:
        """The shared counters say what this gateway holds of a counter; 0: nothing."""
        if amount <= 0:
            self._slices.pop(claim.counter, None)
            return
        refill_per_s = claim.refill_per_s * self._share if claim.kind is CounterKind.BUCKET else 0.0
        self._slices[claim.counter] = _Slice(amount, max(amount, claim.capacity * self._share), refill_per_s, now_s)

    def drop(self, counter: str) -> None:
        """This counter is not used any more."""
        self._slices.pop(counter, None)

    def reserve(self, reservation: Reservation, now_s: float) -> ReservationGranted:
        """Takes all claims or none, out of the slices.

        Raises:
            StoreUnavailable: A slice is missing or too small.
        """
        output = reservation.output
        for claim in reservation.claims:
            if not claim.hard or claim.amount(reservation.output) <= 0:
                continue
            room = self._remaining(claim, now_s)
            if claim.amount(reservation.output) <= room:
                continue
            if not claim.clamps or claim.per_output <= 0:
                raise StoreUnavailable(AWAY, retry_after_s=RETRY_AFTER_S)
            most = (max(room, 0) * claim.divisor - claim.fixed) // claim.per_output
            if most < reservation.least_output:
                raise StoreUnavailable(AWAY, retry_after_s=RETRY_AFTER_S)
            output = min(output, most)
        for claim in reservation.claims:
            self._add(claim.counter, -claim.amount(output), now_s)
        return ReservationGranted(output, self.readings(reservation.claims, now_s))

    def settle(self, claims: Sequence[LimitClaim], output: int, amounts: Mapping[str, int], now_s: float) -> None:
        """Ends a reservation that was taken from here: what it did not use returns."""
        for claim in claims:
            used = 0 if claim.kind is CounterKind.POOL else amounts.get(claim.counter, 0)
            self._add(claim.counter, claim.amount(output) - used, now_s)

    def readings(self, claims: Sequence[LimitClaim], now_s: float) -> list[CounterState]:
        """What could be given now; of a counter without a slice: nothing."""
        return [CounterState(claim.capacity, self._remaining(claim, now_s), 0.0) for claim in claims]

    def _remaining(self, claim: LimitClaim, now_s: float) -> int:
        held = self._slices.get(claim.counter)
        return int(held.now(now_s) // 1) if held is not None else 0

    def _add(self, counter: str, amount: int, now_s: float) -> None:
        held = self._slices.get(counter)
        if held is not None:
            held.amount = held.now(now_s) + amount
            if held.refill_per_s:
                held.amount = min(held.most, held.amount)
