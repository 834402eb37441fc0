"""The state of one counter, and what it answers. Pure: time is an argument.

Everything is a whole number, so that neither rounding nor years of small additions ever let more through than allowed:
amounts are tokens, requests or nano-dollars, monotonic time is in microseconds, and what is missing from a bucket is in
units of 10⁻⁹ tokens.

A bucket keeps what is *missing*, which the refill makes less, rather than what is left. So a bucket that nobody has
seen is the same as a full one, which may be forgotten, and a changed capacity needs no conversion.

Of every sort of counter one number says how much of its capacity is gone: `taken`. A step that goes through all
counters of a request adds it up in the open (see `maitred.store.counters.table`); what differs between sorts is here.
"""

import math
from collections.abc import Iterable

from maitred.core.counters import CounterKind, LimitClaim

UNITS = 10**9
"""To a token."""

_AFTER_WINDOW_S = 60.0
"""So long after its window a budget is kept, for requests that chose their window just before its end."""

_FOR_GOOD_US = 2**62

_BUCKET = CounterKind.BUCKET
_POOL = CounterKind.POOL


class TokenBucket:
    """A rate: refilled continuously.

    Looking at it changes nothing. What was refilled is written down, rounded to a unit in disfavour of the caller,
    only when something is taken or given back; looking often cannot lose the refill of a slow bucket in roundings.
    """

    __slots__ = ("_at_us", "_missing", "_missing_now", "_refill", "_refill_per_s", "holders", "taken")

    def __init__(self, claim: LimitClaim, now_us: int) -> None:
        self.holders = 0
        """Leases that took from it."""
        self.taken = 0
        """Of its capacity, as of the last `look`: nothing else knows the time. More than that when settling took more
        than there was."""
        self._missing = self._missing_now = 0
        self._at_us = now_us
        self._refill_per_s = claim.refill_per_s
        self._refill = int(claim.refill_per_s * UNITS)

    def refresh(self, claim: LimitClaim, now_us: int) -> None:
        """Sees how it stands now."""
        missing = self._missing
        if missing:
            missing -= (now_us - self._at_us) * self._refill // 1_000_000
            if missing < 0:
                missing = 0
        self._missing_now = missing
        self.taken = -(-missing // UNITS)
        if claim.refill_per_s != self._refill_per_s:
            # The time until now was refilled as it was agreed then.
            self._missing = missing
            self._at_us = now_us
            self._refill_per_s = claim.refill_per_s
            self._refill = int(claim.refill_per_s * UNITS)

    def take(self, amount: int, now_us: int) -> None:
        """Takes what there is room for by the last look, which was just now."""
        if amount:
            self.taken += amount
            self._missing = self._missing_now = self._missing_now + amount * UNITS
            self._at_us = now_us

    @property
    def reset_s(self) -> float:
        """Until it is full, as of the last look."""
        return self._missing_now / self._refill if self._refill else 0.0

    def charge(self, used: int, now_us: int) -> None:
        """Takes what was used, or gives it back if negative, to its capacity; what was refilled is not given twice."""
        missing = self._missing - (now_us - self._at_us) * self._refill // 1_000_000
        self._missing = max(max(missing, 0) + used * UNITS, 0)
        self._at_us = now_us

    def wait_s(self, claim: LimitClaim, amount: int, wall_s: float) -> float | None:
        """When there is room for an amount that has none now; inf: never; None: nobody knows."""
        if amount > claim.capacity or not self._refill:
            return math.inf
        over = self._missing_now - (claim.capacity - amount) * UNITS
        # Rounded up, and a microsecond more for those who add it to a time and round that down.
        return (over * 1_000_000 // self._refill + 2) / 1e6

    def idle_in_us(self, now_us: int, wall_s: float) -> int | None:
        """How long it must be kept at least, before it may be forgotten; None: it may be now."""
        missing = self._missing - (now_us - self._at_us) * self._refill // 1_000_000
        if missing > 0:
            return missing * 1_000_000 // self._refill if self._refill else 0
        return 0 if self.holders else None


class ConcurrencyTally:
    """At one time: what is reserved."""

    __slots__ = ("holders", "taken")

    def __init__(self) -> None:
        self.holders = 0
        self.taken = 0

    def charge(self, used: int, now_us: int) -> None:
        """What ran is over."""

    def wait_s(self, claim: LimitClaim, amount: int, wall_s: float) -> float | None:
        """Requests end when they end."""
        return math.inf if amount > claim.capacity else None

    def idle_in_us(self, now_us: int, wall_s: float) -> int | None:
        """See `TokenBucket.idle_in_us`."""
        return 0 if self.holders else None


class BudgetTally:
    """In one window: what was charged, and what is reserved."""

    __slots__ = ("charged", "ends_s", "holders", "taken")

    def __init__(self, claim: LimitClaim, charged: int) -> None:
        self.holders = 0
        self.ends_s = claim.ends_s
        self.charged = charged
        self.taken = charged
        """That, and what is reserved."""

    def charge(self, used: int, now_us: int) -> None:
        """See `TokenBucket.charge`."""
        self.charged += used
        self.taken += used

    def wait_s(self, claim: LimitClaim, amount: int, wall_s: float) -> float | None:
        """A charge goes with its window; what only others hold may come back at any time."""
        if amount > claim.capacity:
            return math.inf
        if self.charged + amount <= claim.capacity:
            return None
        return math.inf if claim.ends_s is None else max(claim.ends_s - wall_s, 0.0)

    def idle_in_us(self, now_us: int, wall_s: float) -> int | None:
        """See `TokenBucket.idle_in_us`. A budget without end is kept for good: only it knows what was charged last."""
        if self.ends_s is None:
            return _FOR_GOOD_US
        left_s = self.ends_s + _AFTER_WINDOW_S - wall_s
        if left_s > 0:
            return int(left_s * 1e6)
        return 0 if self.holders else None


Tally = TokenBucket | ConcurrencyTally | BudgetTally


def bucket_after(claim: LimitClaim, since_us: int, taken: Iterable[tuple[int, int]], now_us: int) -> TokenBucket:
    """A bucket that was empty, as it is after this was taken from it.

    Args:
        claim: On it.
        since_us: When it was empty.
        taken: Times since then, ascending, with what was taken at each.
        now_us: The time; what lies ahead counts as taken now.
    """
    bucket = TokenBucket(claim, since_us)
    bucket.charge(claim.capacity, since_us)
    for at_us, amount in taken:
        bucket.charge(amount, min(at_us, now_us))
    return bucket


def new_tally(claim: LimitClaim, now_us: int) -> Tally:
    """The tally of a counter that nobody has seen."""
    if claim.kind is _BUCKET:
        return TokenBucket(claim, now_us)
    return ConcurrencyTally() if claim.kind is _POOL else BudgetTally(claim, 0)
