"""Counters in the memory of one gateway.

Each step is a synchronous function of a `CounterTable`, so no other step can run between its reads and its writes. Only
a budget that is used for the first time needs more: the ledger is asked once for its charged total, even if many
requests use the budget at the same time, and the step is repeated when the total is known.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from maitred.core.clock import Clock
from maitred.core.counters import CounterState, LimitClaim, Reservation, ReservationDenied, ReservationGranted
from maitred.store.counters.table import CounterTable, CounterTableSize

ReadSpent = Callable[[Sequence[str]], Awaitable[Mapping[str, int]]]
"""Function that reads the charged totals of budgets; a budget that is missing has a total of 0."""

_FAR_PAST_S = -1e9
"""Start time from which every bucket counts as full."""


class MemoryCounters:
    """Counters of a single gateway. Implements `core.counters.Counters`.

    Args:
        clock: Leases and buckets use its monotonic time, budgets its wall time.
        read_spent: Called once for each new budget; without this function every budget begins with a charged total of
            0.

    Attributes:
        settles_immediately: Always True, because settling only changes numbers in memory.
        healthy: Always True, because there is no connection that could fail.
    """

    settles_immediately = True
    healthy = True

    def __init__(self, clock: Clock, read_spent: ReadSpent | None = None) -> None:
        self._clock = clock
        self._read_spent = read_spent
        self._table = CounterTable(opens_budgets=read_spent is None)
        self._pending_opens: dict[str, _PendingOpen] = {}

    def size(self) -> CounterTableSize:
        """Returns the number of counters and leases that are held in memory."""
        return self._table.size()

    def restore_buckets(
        self, taken: Mapping[str, Sequence[tuple[float, int]]], since_s: float, longest_refill_s: float
    ) -> None:
        """Restores the buckets of the previous process; call it before the first reservation.

        No bucket is fuller than it would be had this process lived all the time, if `taken` has all that was taken
        since then: unsettled reservations whole, and no amount earlier than it was taken. A bucket that was in use all
        the time may be emptier.

        Args:
            taken: Maps each bucket to ascending wall times with the amount that was taken at each time.
            since_s: Wall time before which the usage is unknown; every bucket counts as empty at this time.
            longest_refill_s: Time within which every bucket refills.
        """
        now_us, wall_us = self._now_us(), int(self._clock.wall_s() * 1e6)
        past = {
            counter: [(now_us + min(math.ceil(time_s * 1e6) - wall_us, 0), amount) for time_s, amount in pairs]
            for counter, pairs in taken.items()
        }
        since_us = now_us + min(math.ceil(max(since_s, _FAR_PAST_S) * 1e6) - wall_us, 0)
        self._table.restore_buckets(past, since_us, now_us + int(2 * longest_refill_s * 1e6))

    async def reserve(self, reservation: Reservation) -> ReservationGranted | ReservationDenied:
        """Reserves all claims or none. Implements `Counters.reserve`.

        Raises:
            StoreUnavailable: A budget is new in this process, and its charged total cannot be read.
        """
        clock = self._clock
        while (result := self._table.reserve(reservation, int(clock.monotonic_s() * 1e6), clock.wall_s())) is None:
            await self._ensure_open(reservation.claims)
        return result

    async def resume(self, reservation: Reservation) -> Sequence[CounterState]:
        """Counts again what a dead process had granted, without a new decision. Implements `Counters.resume`.

        Raises:
            StoreUnavailable: As for `reserve`.
        """
        counted = [msgspec.structs.replace(claim, hard=False) for claim in reservation.claims]
        return (await self.reserve(msgspec.structs.replace(reservation, claims=counted))).readings

    async def settle(self, lease: str, amounts: Mapping[str, int]) -> None:
        """Ends a lease and charges what was used. Implements `Counters.settle`."""
        clock = self._clock
        self._table.settle(lease, amounts, int(clock.monotonic_s() * 1e6), clock.wall_s())

    async def renew(self, leases: Sequence[str], lease_s: float) -> None:
        """Extends the leases. Implements `Counters.renew`."""
        self._table.renew(leases, lease_s, self._now_us(), self._clock.wall_s())

    async def read(self, claims: Sequence[LimitClaim]) -> list[CounterState]:
        """Returns the state of counters. Implements `Counters.read`.

        Raises:
            StoreUnavailable: A budget is new in this process, and its charged total cannot be read.
        """
        await self._ensure_open(claims)
        return self._table.read(claims, self._now_us(), self._clock.wall_s())

    def _now_us(self) -> int:
        return int(self._clock.monotonic_s() * 1e6)

    async def _ensure_open(self, claims: Sequence[LimitClaim]) -> None:
        """Waits until all budgets of the claims are open.

        The method returns without yielding once all budgets are open, so no other task can run before the next step of
        the caller.
        """
        while self._read_spent is not None and (unopened := self._table.unopened_budgets(claims)):
            to_open = {claim.counter: claim for claim in unopened if claim.counter not in self._pending_opens}
            if to_open:
                await self._open_budgets(to_open, self._read_spent)
                continue
            pending = self._pending_opens[unopened[0].counter]
            await pending.done.wait()
            if pending.error is not None:
                raise pending.error

    async def _open_budgets(self, claims: Mapping[str, LimitClaim], read_spent: ReadSpent) -> None:
        pending = _PendingOpen()
        self._pending_opens.update(dict.fromkeys(claims, pending))
        try:
            charged = await read_spent(list(claims))
            for counter, claim in claims.items():
                self._table.open_budget(claim, charged.get(counter, 0), self._now_us())
        except Exception as error:
            # Waiting callers fail with this error. If this caller is cancelled instead, the next waiting caller reads
            # the totals.
            pending.error = error
            raise
        finally:
            for counter in claims:
                del self._pending_opens[counter]
            pending.done.set()


class _PendingOpen:
    """Pending read of what was charged to new budgets."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.error: Exception | None = None
