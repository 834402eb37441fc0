"""Tallies: the state of one counter of each kind. Pure: time is an argument.

Everything is a whole number, so that neither rounding nor years of small additions ever let more through than allowed:
amounts are tokens, requests or nano-dollars, monotonic time is in microseconds, and what is missing from a bucket is in
units of 10⁻⁹ tokens.

A bucket keeps what is *missing*, which the refill makes less, rather than what is left. So a bucket without a tally is
the same as a full one, which may be forgotten, and a changed capacity needs no conversion.

Every kind of counter has one number that says how much of its capacity is gone: `taken`. A step over all counters of a
request adds to it directly (see `maitred.store.counters.tally_group`); what differs between kinds is here.
"""

import math
from collections.abc import Iterable

from maitred.core.counters import CounterKind, LimitClaim

UNITS_PER_TOKEN = 10**9
"""Units of a bucket's `_missing` in one token."""

_WINDOW_GRACE_S = 60.0
"""How long a budget is kept after its window, for requests that chose the window just before its end."""

_NEVER_US = 2**62

_BUCKET = CounterKind.BUCKET
_POOL = CounterKind.POOL


class TokenBucket:
    """Token bucket of a rate, refilled continuously.

    A refresh does not move the stored level. What was refilled is stored, rounded to a unit in disfavour of the caller,
    only when something is taken or given back; frequent refreshes cannot lose the refill of a slow bucket in roundings.
    """

    __slots__ = ("_at_us", "_missing", "_missing_now", "_refill_per_s", "_refill_units_per_s", "lease_count", "taken")

    def __init__(self, claim: LimitClaim, now_us: int) -> None:
        self.lease_count = 0
        """Leases that have taken from the bucket and run."""
        self.taken = 0
        """How much of the capacity is gone, as of the last `refresh`.

        More than the capacity when settling took more than there was.
        """
        self._missing = self._missing_now = 0
        self._at_us = now_us
        self._refill_per_s = claim.refill_per_s
        self._refill_units_per_s = int(claim.refill_per_s * UNITS_PER_TOKEN)

    def refresh(self, claim: LimitClaim, now_us: int) -> None:
        """Updates `taken` to the level at this time."""
        missing = self._missing
        if missing:
            missing -= (now_us - self._at_us) * self._refill_units_per_s // 1_000_000
            if missing < 0:
                missing = 0
        self._missing_now = missing
        self.taken = -(-missing // UNITS_PER_TOKEN)
        if claim.refill_per_s != self._refill_per_s:
            # The time until now is refilled at the old rate.
            self._missing = missing
            self._at_us = now_us
            self._refill_per_s = claim.refill_per_s
            self._refill_units_per_s = int(claim.refill_per_s * UNITS_PER_TOKEN)

    def take(self, amount: int, now_us: int) -> None:
        """Takes an amount that fits, as of the last `refresh`, which was at the same time."""
        if amount:
            self.taken += amount
            self._missing = self._missing_now = self._missing_now + amount * UNITS_PER_TOKEN
            self._at_us = now_us

    @property
    def reset_s(self) -> float:
        """Seconds until the bucket is full, as of the last `refresh`."""
        return self._missing_now / self._refill_units_per_s if self._refill_units_per_s else 0.0

    def charge(self, used: int, now_us: int) -> None:
        """Takes what was used, or gives it back if negative, up to the capacity; no refill is given twice."""
        missing = self._missing - (now_us - self._at_us) * self._refill_units_per_s // 1_000_000
        self._missing = max(max(missing, 0) + used * UNITS_PER_TOKEN, 0)
        self._at_us = now_us

    def wait_s(self, claim: LimitClaim, amount: int, wall_s: float) -> float | None:
        """Returns when an amount will fit that does not fit now; inf: never; None: unknown."""
        if amount > claim.capacity or not self._refill_units_per_s:
            return math.inf
        excess_units = self._missing_now - (claim.capacity - amount) * UNITS_PER_TOKEN
        # Rounded up, and a microsecond more for callers that add it to a time and round that down.
        return (excess_units * 1_000_000 // self._refill_units_per_s + 2) / 1e6

    def keep_for_us(self, now_us: int, wall_s: float) -> int | None:
        """Returns how long the tally must be kept at least; None: it may be forgotten now."""
        missing = self._missing - (now_us - self._at_us) * self._refill_units_per_s // 1_000_000
        if missing > 0:
            return missing * 1_000_000 // self._refill_units_per_s if self._refill_units_per_s else 0
        return 0 if self.lease_count else None


class ConcurrencyTally:
    """Tally of a pool: the sum of what is reserved at one time."""

    __slots__ = ("lease_count", "taken")

    def __init__(self) -> None:
        self.lease_count = 0
        self.taken = 0

    def charge(self, used: int, now_us: int) -> None:
        """Does nothing: a pool charges nothing for requests that have ended."""

    def wait_s(self, claim: LimitClaim, amount: int, wall_s: float) -> float | None:
        """Returns inf if the amount can never fit; otherwise None, because the ends of requests are unknown."""
        return math.inf if amount > claim.capacity else None

    def keep_for_us(self, now_us: int, wall_s: float) -> int | None:
        """Returns how long the tally must be kept at least; None: it may be forgotten now."""
        return 0 if self.lease_count else None


class BudgetTally:
    """Tally of a budget in one window: what was charged, and what is reserved."""

    __slots__ = ("charged", "ends_s", "lease_count", "taken")

    def __init__(self, claim: LimitClaim, charged: int) -> None:
        self.lease_count = 0
        self.ends_s = claim.ends_s
        self.charged = charged
        self.taken = charged
        """Charged and reserved amounts together."""

    def charge(self, used: int, now_us: int) -> None:
        """Charges what was used, or gives it back if negative."""
        self.charged += used
        self.taken += used

    def wait_s(self, claim: LimitClaim, amount: int, wall_s: float) -> float | None:
        """Returns when an amount will fit: charges end with the window; reservations may return at any time."""
        if amount > claim.capacity:
            return math.inf
        if self.charged + amount <= claim.capacity:
            return None
        return math.inf if claim.ends_s is None else max(claim.ends_s - wall_s, 0.0)

    def keep_for_us(self, now_us: int, wall_s: float) -> int | None:
        """Returns how long the tally must be kept at least; None: it may be forgotten now.

        A budget without end is kept for good: only the tally knows what was charged last.
        """
        if self.ends_s is None:
            return _NEVER_US
        remaining_s = self.ends_s + _WINDOW_GRACE_S - wall_s
        if remaining_s > 0:
            return int(remaining_s * 1e6)
        return 0 if self.lease_count else None


Tally = TokenBucket | ConcurrencyTally | BudgetTally


def restore_bucket(claim: LimitClaim, since_us: int, taken: Iterable[tuple[int, int]], now_us: int) -> TokenBucket:
    """Makes a bucket that was empty at a time, as it is after some amounts were taken from it.

    Args:
        claim: A claim on the bucket.
        since_us: Time at which it was empty.
        taken: Ascending times since then, with what was taken at each.
        now_us: The time; later amounts count as taken now.
    """
    bucket = TokenBucket(claim, since_us)
    bucket.charge(claim.capacity, since_us)
    for at_us, amount in taken:
        bucket.charge(amount, min(at_us, now_us))
    return bucket


def new_tally(claim: LimitClaim, now_us: int) -> Tally:
    """Makes the tally of a counter that was not used before."""
    if claim.kind is _BUCKET:
        return TokenBucket(claim, now_us)
    return ConcurrencyTally() if claim.kind is _POOL else BudgetTally(claim, 0)
