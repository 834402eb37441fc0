"""Counters in the memory of one gateway.

A step is a synchronous function of a `CounterTable`, so nothing can come between what it sees and what it takes. Only a
budget
that is met for the first time needs more: what the ledger has already charged to it is asked for, once however many
requests meet it together, and the step is begun anew when that is known.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

from maitred.core.clock import Clock
from maitred.core.counters import CounterState, LimitClaim, Reservation, ReservationDenied, ReservationGranted
from maitred.store.counters.table import CounterTable, CounterTableSize

Spent = Callable[[Sequence[str]], Awaitable[Mapping[str, int]]]
"""What these budgets have been charged so far; one that is missing: nothing."""

_LONG_AGO_S = -1e9
"""Every bucket has been full since."""


class MemoryCounters:
    """Implements `core.counters.Counters` for a gateway that is alone.

    Args:
        clock: Leases and buckets go by its monotonic time, budgets by its wall time.
        spent: Asked once for each budget that is met. Without it budgets begin with nothing.

    Attributes:
        at_once: Always: to settle is to add up.
        healthy: Always: what is counted here is here.
    """

    at_once = True
    healthy = True

    def __init__(self, clock: Clock, spent: Spent | None = None) -> None:
        self._clock = clock
        self._spent = spent
        self._book = CounterTable(opens=spent is None)
        self._opening: dict[str, _Opening] = {}

    def size(self) -> CounterTableSize:
        """How much is kept in memory."""
        return self._book.size()

    def recall(self, taken: Mapping[str, Sequence[tuple[float, int]]], since_s: float, longest_refill_s: float) -> None:
        """Lets buckets begin where the process before this one left them; call it before anything is reserved.

        No bucket is fuller than it would be had this process lived all the time, if `taken` has all that was taken
        since then: what was reserved and never settled whole, and nothing earlier than it was. One that has been busy
        ever since may be emptier.

        Args:
            taken: Bucket -> wall times, ascending, and what was taken at each.
            since_s: Wall time before which nothing is known: buckets count as empty then.
            longest_refill_s: Within which every bucket refills.
        """
        now_us, wall_us = self._now_us(), int(self._clock.wall_s() * 1e6)
        past = {
            counter: [(now_us + min(math.ceil(time_s * 1e6) - wall_us, 0), amount) for time_s, amount in pairs]
            for counter, pairs in taken.items()
        }
        since_us = now_us + min(math.ceil(max(since_s, _LONG_AGO_S) * 1e6) - wall_us, 0)
        self._book.recall(past, since_us, now_us + int(2 * longest_refill_s * 1e6))

    async def reserve(self, reservation: Reservation) -> ReservationGranted | ReservationDenied:
        """See `core.counters.Counters.reserve`.

        Raises:
            StoreUnavailable: A budget is new here, and nobody can say what was spent of it.
        """
        clock = self._clock
        while (answer := self._book.reserve(reservation, int(clock.monotonic_s() * 1e6), clock.wall_s())) is None:
            await self._ensure_open(reservation.claims)
        return answer

    async def settle(self, lease: str, amounts: Mapping[str, int]) -> None:
        """See `core.counters.Counters.settle`."""
        clock = self._clock
        self._book.settle(lease, amounts, int(clock.monotonic_s() * 1e6), clock.wall_s())

    async def renew(self, leases: Sequence[str], lease_s: float) -> None:
        """See `core.counters.Counters.renew`."""
        self._book.renew(leases, lease_s, self._now_us(), self._clock.wall_s())

    async def read(self, claims: Sequence[LimitClaim]) -> list[CounterState]:
        """See `core.counters.Counters.read`.

        Raises:
            StoreUnavailable: A budget is new here, and nobody can say what was spent of it.
        """
        await self._ensure_open(claims)
        return self._book.read(claims, self._now_us(), self._clock.wall_s())

    def _now_us(self) -> int:
        return int(self._clock.monotonic_s() * 1e6)

    async def _ensure_open(self, claims: Sequence[LimitClaim]) -> None:
        """Returns without a pause once all budgets are known: nothing can happen until the caller's next step."""
        while self._spent is not None and (unseen := self._book.unseen(claims)):
            ours = {claim.counter: claim for claim in unseen if claim.counter not in self._opening}
            if ours:
                await self._open(ours, self._spent)
                continue
            opening = self._opening[unseen[0].counter]
            await opening.over.wait()
            if opening.error is not None:
                raise opening.error

    async def _open(self, claims: Mapping[str, LimitClaim], spent: Spent) -> None:
        opening = _Opening()
        self._opening.update(dict.fromkeys(claims, opening))
        try:
            charged = await spent(list(claims))
            for counter, claim in claims.items():
                self._book.open(claim, charged.get(counter, 0), self._now_us())
        except Exception as error:
            # Those who wait fail with this one. Should it be cancelled instead, the next of them asks.
            opening.error = error
            raise
        finally:
            for counter in claims:
                del self._opening[counter]
            opening.over.set()


class _Opening:
    """Somebody asks what was spent."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.error: Exception | None = None
