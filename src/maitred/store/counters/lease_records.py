"""What one gateway must be able to tell Redis again.

The leases that it holds, what it still has to settle, and the charged totals that it saw last.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from maitred.core.counters import CounterKind, CounterState, LimitClaim, Reservation

LATE_S = 60.0
"""A lease is remembered so long after its end, because it may be settled late."""
TOTAL_KEPT_S = 86400.0
"""A total that was not seen for so long is forgotten; the database knows it by then."""


class LeaseRecord(msgspec.Struct):
    """A lease of this gateway."""

    claims: Sequence[LimitClaim]
    output: int
    expires_s: float
    """Monotonic."""
    told: bool
    """Redis knows it, as far as we know."""
    local: bool
    """It was taken out of this gateway's slices, and what it does not use returns there."""
    settled: bool = False

    def entries(self) -> list[tuple[str, str, int, float, float]]:
        """As the scripts keep it."""
        return [(c.counter, c.kind.value, c.amount(self.output), c.refill_per_s, c.ends_s or 0.0) for c in self.claims]


class _Total(msgspec.Struct):
    charged: int
    ends_s: float
    seen_s: float


class LeaseRecords:
    """All of it. Every method is synchronous, so each is atomic."""

    def __init__(self) -> None:
        self.leases: dict[str, LeaseRecord] = {}
        self.unsettled: deque[tuple[str, Mapping[str, int]]] = deque()
        self._totals: dict[str, _Total] = {}

    def hold(self, reservation: Reservation, output: int, now_s: float, *, told: bool, local: bool) -> None:
        """A lease was granted: by Redis, or out of the slices (`local`)."""
        self.leases[reservation.lease] = LeaseRecord(
            reservation.claims, output, now_s + reservation.lease_s, told=told, local=local
        )

    def renew(self, leases: Iterable[str], lease_s: float, now_s: float) -> None:
        """Puts off the end of those that have not ended."""
        for lease in leases:
            held = self.leases.get(lease)
            if held is not None and held.expires_s > now_s:
                held.expires_s = now_s + lease_s

    def distrust(self) -> None:
        """Redis was away, and may have forgotten everything."""
        for held in self.leases.values():
            held.told = False

    def untold(self, most: int) -> list[str]:
        """Leases that Redis must be told about."""
        found: list[str] = []
        for lease, held in self.leases.items():
            if not held.told:
                found.append(lease)
                if len(found) == most:
                    break
        return found

    def expire(self, now_s: float) -> list[LeaseRecord]:
        """Forgets leases that ended long ago; returns those that just ended and were taken out of the slices."""
        returned: list[LeaseRecord] = []
        for lease, held in list(self.leases.items()):
            if held.expires_s > now_s:
                continue
            if held.local and not held.settled:
                held.local = False
                returned.append(held)
            if held.told and held.expires_s + LATE_S <= now_s:
                del self.leases[lease]
        return returned

    def observe(self, claims: Sequence[LimitClaim], readings: Sequence[CounterState], now_s: float) -> None:
        """Redis said how much was charged."""
        for claim, reading in zip(claims, readings, strict=True):
            if claim.kind is CounterKind.BUDGET:
                total = self._totals.get(claim.counter)
                charged = reading.used if total is None else max(total.charged, reading.used)
                self._totals[claim.counter] = _Total(charged, claim.ends_s or 0.0, now_s)

    def charged(self, totals: Mapping[str, int]) -> None:
        """Redis said how much is charged after a settlement."""
        for counter, charged in totals.items():
            total = self._totals.get(counter)
            if total is not None:
                total.charged = max(total.charged, charged)

    def total(self, counter: str) -> int:
        """What was charged when this gateway saw it last; -1: it never did."""
        total = self._totals.get(counter)
        return -1 if total is None else total.charged

    def totals(self) -> list[tuple[str, int, float]]:
        """All of them, with the end of their window."""
        return [(counter, total.charged, total.ends_s) for counter, total in self._totals.items()]

    def forget_totals(self, now_s: float) -> None:
        """Forgets those that nobody asked about for long."""
        for counter in [name for name, total in self._totals.items() if total.seen_s + TOTAL_KEPT_S <= now_s]:
            del self._totals[counter]
