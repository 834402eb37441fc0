"""The state of one counter, and what it answers. Pure: time is an argument.

Everything is a whole number, so that neither rounding nor years of small additions ever let more through than allowed:
amounts are tokens, requests or nano-dollars; monotonic time is in microseconds; what is missing from a bucket is in
units of 10⁻¹⁵ tokens, of which a refill of 10⁻⁹ tokens a second brings one per microsecond.

A bucket keeps what is *missing*, which the refill makes less, rather than what is left. So a bucket that nobody has
seen is the same as a full one, which may be forgotten, and a changed capacity needs no conversion.

The methods are called in order: `room` brings a tally up to date, the others build on that.
"""

import math

from maitred.core.counters import Claim, CounterKind, Reading

UNITS = 10**15
"""To a token."""
_REFILL_UNITS = 10**9
"""Per microsecond, to one token a second."""

_AFTER_WINDOW_S = 60.0
"""So long after its window a budget is kept, for requests that chose their window just before its end."""

_BUCKET = CounterKind.BUCKET
_POOL = CounterKind.POOL


class Bucket:
    """A rate: refilled continuously."""

    __slots__ = ("at_us", "holders", "missing", "refill")

    def __init__(self, claim: Claim, now_us: int) -> None:
        self.holders = 0
        """Leases that took from it."""
        self.missing = 0
        self.refill = int(claim.refill_per_s * _REFILL_UNITS)
        self.at_us = now_us

    def room(self, claim: Claim, now_us: int) -> int:
        """What can be taken now; negative when settling took more than there was."""
        self._refill(now_us)
        # The time until now was refilled as it was agreed then.
        self.refill = int(claim.refill_per_s * _REFILL_UNITS)
        return (claim.capacity * UNITS - self.missing) // UNITS

    def take(self, amount: int) -> None:
        """Reserves."""
        self.holders += 1
        self.missing += amount * UNITS

    def settle(self, amount: int, used: int, now_us: int) -> None:
        """Ends what `take` began; what was refilled meanwhile is not given twice."""
        self.holders -= 1
        self._refill(now_us)
        self.missing = max(self.missing + (used - amount) * UNITS, 0)

    def charge(self, used: int, now_us: int) -> None:
        """Takes what was used under a lease that is gone."""
        self._refill(now_us)
        self.missing += used * UNITS

    def reading(self, claim: Claim, wall_s: float) -> Reading:
        """As of the last `room`."""
        remaining = (claim.capacity * UNITS - self.missing) // UNITS
        reset_s = self.missing / self.refill / 1e6 if self.refill else 0.0
        return Reading(claim.capacity, remaining, reset_s, claim.capacity - remaining)

    def wait_s(self, claim: Claim, amount: int, wall_s: float) -> float | None:
        """When there is room for an amount that has none now; inf: never; None: nobody knows."""
        if amount > claim.capacity or not self.refill:
            return math.inf
        over = self.missing - (claim.capacity - amount) * UNITS
        # Rounded up, and a microsecond more for those who add it to a time and round that down.
        return (over // self.refill + 2) / 1e6

    def idle_in_us(self, now_us: int, wall_s: float) -> int | None:
        """How long it must be kept at least, before it may be forgotten; None: it may be now."""
        self._refill(now_us)
        if self.missing:
            return self.missing // self.refill if self.refill else 0
        return 0 if self.holders else None

    def _refill(self, now_us: int) -> None:
        if self.missing:
            self.missing = max(self.missing - (now_us - self.at_us) * self.refill, 0)
        self.at_us = now_us


class Pool:
    """At one time: what is reserved."""

    __slots__ = ("holders", "reserved")

    def __init__(self) -> None:
        self.holders = 0
        self.reserved = 0

    def room(self, claim: Claim, now_us: int) -> int:
        """See `Bucket.room`."""
        return claim.capacity - self.reserved

    def take(self, amount: int) -> None:
        """See `Bucket.take`."""
        self.holders += 1
        self.reserved += amount

    def settle(self, amount: int, used: int, now_us: int) -> None:
        """Frees all of it."""
        self.holders -= 1
        self.reserved -= amount

    def charge(self, used: int, now_us: int) -> None:
        """What ran is over."""

    def reading(self, claim: Claim, wall_s: float) -> Reading:
        """See `Bucket.reading`."""
        return Reading(claim.capacity, claim.capacity - self.reserved, 0.0, self.reserved)

    def wait_s(self, claim: Claim, amount: int, wall_s: float) -> float | None:
        """Requests end when they end."""
        return math.inf if amount > claim.capacity else None

    def idle_in_us(self, now_us: int, wall_s: float) -> int | None:
        """See `Bucket.idle_in_us`."""
        return 0 if self.holders else None


class Budget:
    """In one window: what was charged, and what is reserved."""

    __slots__ = ("charged", "ends_s", "holders", "reserved")

    def __init__(self, claim: Claim, charged: int) -> None:
        self.holders = 0
        self.reserved = 0
        self.charged = charged
        self.ends_s = claim.ends_s

    def room(self, claim: Claim, now_us: int) -> int:
        """See `Bucket.room`."""
        return claim.capacity - self.charged - self.reserved

    def take(self, amount: int) -> None:
        """See `Bucket.take`."""
        self.holders += 1
        self.reserved += amount

    def settle(self, amount: int, used: int, now_us: int) -> None:
        """Charges what was used; the rest goes back."""
        self.holders -= 1
        self.reserved -= amount
        self.charged += used

    def charge(self, used: int, now_us: int) -> None:
        """See `Bucket.charge`."""
        self.charged += used

    def reading(self, claim: Claim, wall_s: float) -> Reading:
        """See `Bucket.reading`."""
        reset_s = 0.0 if claim.ends_s is None else max(claim.ends_s - wall_s, 0.0)
        remaining = claim.capacity - self.charged - self.reserved
        return Reading(claim.capacity, remaining, reset_s, self.charged, self.reserved)

    def wait_s(self, claim: Claim, amount: int, wall_s: float) -> float | None:
        """A charge goes with its window; what only others hold may come back at any time."""
        if amount > claim.capacity:
            return math.inf
        if self.charged + amount <= claim.capacity:
            return None
        return math.inf if claim.ends_s is None else max(claim.ends_s - wall_s, 0.0)

    def idle_in_us(self, now_us: int, wall_s: float) -> int | None:
        """See `Bucket.idle_in_us`. A budget without end is kept for good: only it knows what was charged last."""
        left_s = 0.0 if self.ends_s is None else self.ends_s + _AFTER_WINDOW_S - wall_s
        if left_s > 0:
            return int(left_s * 1e6)
        return 0 if self.holders or self.ends_s is None else None


Tally = Bucket | Pool | Budget


def new_tally(claim: Claim, now_us: int) -> Tally:
    """The tally of a counter that nobody has seen."""
    if claim.kind is _BUCKET:
        return Bucket(claim, now_us)
    return Pool() if claim.kind is _POOL else Budget(claim, 0)
