"""Records of everything that one gateway may have to report to Redis again.

The records hold the leases of this gateway, the settlements that Redis does not have yet, and the charged totals that
this gateway saw last.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from maitred.core.counters import CounterKind, CounterState, LimitClaim, Reservation

LATE_SETTLE_S = 60.0
"""Time for which a lease is kept after its end, because its settlement may come late."""
TOTAL_RETENTION_S = 86400.0
"""Time for which a total is kept after this gateway saw it last; later the database has it."""

Settlement = tuple[str, Mapping[str, int], str | None]
"""Lease, the amounts that were used, and the dead gateway that held it; None: this gateway."""


class LeaseRecord(msgspec.Struct):
    """Lease that this gateway holds."""

    claims: Sequence[LimitClaim]
    output: int
    expires_s: float
    """Monotonic time at which the lease ends."""
    reported: bool
    """Whether Redis has the lease, as far as this gateway can say."""
    from_slice: bool
    """Whether the lease was taken from the slices of this gateway; its unused part then returns to them."""
    settled: bool = False

    def to_entries(self) -> list[tuple[str, str, int, float, float]]:
        """Returns the lease in the form in which the scripts store it."""
        return [(c.counter, c.kind.value, c.amount(self.output), c.refill_per_s, c.ends_s or 0.0) for c in self.claims]


class _Total(msgspec.Struct):
    charged: int
    ends_s: float
    seen_s: float


class LeaseRecords:
    """Leases, settlements and totals of one gateway. Every method is synchronous, so each is atomic."""

    def __init__(self) -> None:
        self.leases: dict[str, LeaseRecord] = {}
        self.unsettled: deque[Settlement] = deque()
        self._totals: dict[str, _Total] = {}

    def add(self, reservation: Reservation, output: int, now_s: float, *, reported: bool, from_slice: bool) -> None:
        """Records a granted lease, which came from the slices (`from_slice`) or else from Redis."""
        self.leases[reservation.lease] = LeaseRecord(
            reservation.claims, output, now_s + reservation.lease_s, reported=reported, from_slice=from_slice
        )

    def renew(self, leases: Iterable[str], lease_s: float, now_s: float) -> None:
        """Extends each of the leases that has not ended."""
        for lease in leases:
            record = self.leases.get(lease)
            if record is not None and record.expires_s > now_s:
                record.expires_s = now_s + lease_s

    def mark_unreported(self) -> None:
        """Marks all leases as unreported, because Redis was unreachable and may have lost its data."""
        for record in self.leases.values():
            record.reported = False

    def unreported_leases(self, limit: int) -> list[str]:
        """Returns up to `limit` leases that Redis may not have."""
        found: list[str] = []
        for lease, record in self.leases.items():
            if not record.reported:
                found.append(lease)
                if len(found) == limit:
                    break
        return found

    def expire(self, now_s: float) -> list[LeaseRecord]:
        """Removes leases that ended long ago, and returns the slice leases that have just ended."""
        ended: list[LeaseRecord] = []
        for lease, record in list(self.leases.items()):
            if record.expires_s > now_s:
                continue
            if record.from_slice and not record.settled:
                record.from_slice = False
                ended.append(record)
            if record.reported and record.expires_s + LATE_SETTLE_S <= now_s:
                del self.leases[lease]
        return ended

    def observe_states(self, claims: Sequence[LimitClaim], states: Sequence[CounterState], now_s: float) -> None:
        """Records the charged totals of budgets that Redis reported."""
        for claim, state in zip(claims, states, strict=True):
            if claim.kind is CounterKind.BUDGET:
                total = self._totals.get(claim.counter)
                charged = state.used if total is None else max(total.charged, state.used)
                self._totals[claim.counter] = _Total(charged, claim.ends_s or 0.0, now_s)

    def update_totals(self, totals: Mapping[str, int]) -> None:
        """Increases the recorded totals to the totals that Redis reported after a settlement."""
        for counter, charged in totals.items():
            total = self._totals.get(counter)
            if total is not None:
                total.charged = max(total.charged, charged)

    def last_total(self, counter: str) -> int:
        """Returns the charged total that this gateway saw last, or -1 if it never saw one."""
        total = self._totals.get(counter)
        return -1 if total is None else total.charged

    def totals(self) -> list[tuple[str, int, float]]:
        """Returns all charged totals, each with the end of its window."""
        return [(counter, total.charged, total.ends_s) for counter, total in self._totals.items()]

    def forget_totals(self, now_s: float) -> None:
        """Removes totals that this gateway has not seen for a day."""
        for counter in [name for name, total in self._totals.items() if total.seen_s + TOTAL_RETENTION_S <= now_s]:
            del self._totals[counter]
