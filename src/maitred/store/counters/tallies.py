"""State of one counter of each kind; callers pass the time, so the code is deterministic.

All values are whole numbers, so that neither rounding nor years of small additions can let more through than the limit
allows: amounts are tokens, requests or nano-dollars, monotonic time is in microseconds, and the missing amount of a
bucket is in units of 10⁻⁹ tokens.

A bucket stores the amount that is *missing*, which the refill reduces, and not the amount that is left. A bucket
without a stored state is therefore equal to a full bucket and may be removed, and a changed capacity needs no
conversion.

Each kind of counter has one number, `taken`: the part of its capacity that is in use. A step over all counters of a
request adds to this number directly (see `maitred.store.counters.tally_group`); this module has the parts that differ
between the kinds.
"""

import math
from collections.abc import Iterable

from maitred.core.counters import CounterKind, LimitClaim

UNITS_PER_TOKEN = 10**9
"""Number of units of `TokenBucket._missing` in one token."""

_WINDOW_GRACE_S = 60.0
"""Time for which a budget is kept after its window, for requests that chose it just before its end."""

_NEVER_US = 2**62

_BUCKET = CounterKind.BUCKET
_POOL = CounterKind.POOL


class TokenBucket:
    """Token bucket of a rate, refilled continuously.

    A refresh does not change the stored level. The refill is stored only when an amount is taken or returned, and is
    then rounded to one unit against the caller; frequent refreshes therefore cannot lose the refill of a slow bucket by
    rounding.
    """

    __slots__ = ("_at_us", "_missing", "_missing_now", "_refill_per_s", "_refill_units_per_s", "lease_count", "taken")

    def __init__(self, claim: LimitClaim, now_us: int) -> None:
        self.lease_count = 0
        """Number of running leases that have taken an amount from the bucket."""
        self.taken = 0
        """Amount of the capacity that is in use, as of the last `refresh`.

        The amount exceeds the capacity if a settlement took more than was left.
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
            # The bucket uses the old rate for the time until now.
            self._missing = missing
            self._at_us = now_us
            self._refill_per_s = claim.refill_per_s
            self._refill_units_per_s = int(claim.refill_per_s * UNITS_PER_TOKEN)

    def take(self, amount: int, now_us: int) -> None:
        """Takes an amount that fits; the last `refresh` must have been at the same time."""
        if amount:
            self.taken += amount
            self._missing = self._missing_now = self._missing_now + amount * UNITS_PER_TOKEN
            self._at_us = now_us

    @property
    def reset_s(self) -> float:
        """Seconds until the bucket is full, as of the last `refresh`."""
        return self._missing_now / self._refill_units_per_s if self._refill_units_per_s else 0.0

    def charge(self, used: int, now_us: int) -> None:
        """Takes the used amount, or returns it if negative, up to the capacity.

        No refill is counted twice.
        """
        missing = self._missing - (now_us - self._at_us) * self._refill_units_per_s // 1_000_000
        self._missing = max(max(missing, 0) + used * UNITS_PER_TOKEN, 0)
        self._at_us = now_us

    def wait_s(self, claim: LimitClaim, amount: int, wall_s: float) -> float | None:
        """Returns the time until an amount fits that does not fit now; inf: never; None: unknown."""
        if amount > claim.capacity or not self._refill_units_per_s:
            return math.inf
        excess_units = self._missing_now - (claim.capacity - amount) * UNITS_PER_TOKEN
        # The wait is rounded up and gets one microsecond more, for callers that add it to a time and round that down.
        return (excess_units * 1_000_000 // self._refill_units_per_s + 2) / 1e6

    def keep_for_us(self, now_us: int, wall_s: float) -> int | None:
        """Returns how long this state must be kept at least, or None if it can be removed now."""
        missing = self._missing - (now_us - self._at_us) * self._refill_units_per_s // 1_000_000
        if missing > 0:
            return missing * 1_000_000 // self._refill_units_per_s if self._refill_units_per_s else 0
        return 0 if self.lease_count else None


class ConcurrencyTally:
    """State of a pool: the sum of the amounts that are reserved at the same time."""

    __slots__ = ("lease_count", "taken")

    def __init__(self) -> None:
        self.lease_count = 0
        self.taken = 0

    def charge(self, used: int, now_us: int) -> None:
        """Does nothing, because a pool charges nothing for requests that have ended."""

    def wait_s(self, claim: LimitClaim, amount: int, wall_s: float) -> float | None:
        """Returns inf if the amount can never fit, otherwise None, because the ends of requests are unknown."""
        return math.inf if amount > claim.capacity else None

    def keep_for_us(self, now_us: int, wall_s: float) -> int | None:
        """Returns how long this state must be kept at least, or None if it can be removed now."""
        return 0 if self.lease_count else None


class BudgetTally:
    """State of a budget in one window: the charged amount and the reserved amount."""

    __slots__ = ("charged", "ends_s", "lease_count", "taken")

    def __init__(self, claim: LimitClaim, charged: int) -> None:
        self.lease_count = 0
        self.ends_s = claim.ends_s
        self.charged = charged
        self.taken = charged
        """Sum of the charged and the reserved amounts."""

    def charge(self, used: int, now_us: int) -> None:
        """Charges the used amount, or returns it if it is negative."""
        self.charged += used
        self.taken += used

    def wait_s(self, claim: LimitClaim, amount: int, wall_s: float) -> float | None:
        """Returns the time until an amount can fit.

        Charges end with the window, and reservations may be returned at any time.
        """
        if amount > claim.capacity:
            return math.inf
        if self.charged + amount <= claim.capacity:
            return None
        return math.inf if claim.ends_s is None else max(claim.ends_s - wall_s, 0.0)

    def keep_for_us(self, now_us: int, wall_s: float) -> int | None:
        """Returns how long this state must be kept at least, or None if it can be removed now.

        A budget without an end is kept permanently, because only this state has its latest charged total.
        """
        if self.ends_s is None:
            return _NEVER_US
        remaining_s = self.ends_s + _WINDOW_GRACE_S - wall_s
        if remaining_s > 0:
            return int(remaining_s * 1e6)
        return 0 if self.lease_count else None


Tally = TokenBucket | ConcurrencyTally | BudgetTally


def restore_bucket(claim: LimitClaim, since_us: int, taken: Iterable[tuple[int, int]], now_us: int) -> TokenBucket:
    """Makes a bucket that was empty at `since_s` and from which amounts were taken later.

    Args:
        claim: A claim on the bucket.
        since_us: Time at which the bucket was empty.
        taken: Ascending times since then, with the amount that was taken at each time.
        now_us: Current time; amounts at later times count as taken now.
    """
    bucket = TokenBucket(claim, since_us)
    bucket.charge(claim.capacity, since_us)
    for at_us, amount in taken:
        bucket.charge(amount, min(at_us, now_us))
    return bucket


def new_tally(claim: LimitClaim, now_us: int) -> Tally:
    """Makes the state of a counter that was not used before."""
    if claim.kind is _BUCKET:
        return TokenBucket(claim, now_us)
    return ConcurrencyTally() if claim.kind is _POOL else BudgetTally(claim, 0)
