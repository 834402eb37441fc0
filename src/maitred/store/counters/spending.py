"""Spending of one gateway by counter, and the part of each counter that it should hold in advance.

A gateway that spends much of a limit goes on for longer without the shared counters if it holds more of it in advance;
what one holds that spends nothing is missing where it is needed. So the part follows the measured spending: of a budget
it is what would be spent in the time for which a slice can be used, and of a rate the part of the rate that is used,
with a margin. It is never less than the configured part, nor more than the largest one.
"""

import math

from maitred.core.counters import CounterKind, LimitClaim

MEMORY_S = 60.0
"""Time constant of the measured rates."""
_MARGIN = 1.25
"""Part of a rate that a gateway holds, relative to what it uses of it: requests do not come evenly."""


class _SpendingRate:
    """Spending of one counter: a sum that decays."""

    __slots__ = ("amount", "at_s")

    def __init__(self, now_s: float) -> None:
        self.amount = 0.0
        self.at_s = now_s

    def decay(self, now_s: float) -> None:
        if now_s > self.at_s:
            self.amount *= math.exp((self.at_s - now_s) / MEMORY_S)
            self.at_s = now_s


class SpendingMeter:
    """Measures what this gateway spends of each counter."""

    def __init__(self) -> None:
        self._rates: dict[str, _SpendingRate] = {}

    def __len__(self) -> int:
        return len(self._rates)

    def observe(self, counter: str, amount: int, now_s: float) -> None:
        """Adds an amount that a request has spent of a counter."""
        rate = self._rates.get(counter)
        if rate is None:
            rate = self._rates[counter] = _SpendingRate(now_s)
        rate.decay(now_s)
        rate.amount += amount

    def per_s(self, counter: str, now_s: float) -> float:
        """Returns the spending per second of about the last minute; 0 of a counter that was not spent."""
        rate = self._rates.get(counter)
        if rate is None:
            return 0.0
        rate.decay(now_s)
        # What was measured for less than a minute is taken as spent in a minute: one request is no rate.
        return rate.amount / MEMORY_S

    def forget(self, counter: str) -> None:
        """Forgets a counter that is not used any more."""
        self._rates.pop(counter, None)


def slice_share(claim: LimitClaim, per_s: float, remaining: int, *, use_s: float, least: float, most: float) -> float:
    """Returns the part of a counter that a gateway should hold in advance.

    Args:
        claim: Claim on the counter.
        per_s: What the gateway spends of it in a second.
        remaining: What is left of it, if it is a budget.
        use_s: Time for which the gateway can use its slice without the shared counters.
        least: Least part, and the one of what runs at one time, which is not spent.
        most: Largest part.
    """
    if claim.kind is CounterKind.POOL or not least or per_s <= 0:
        return least
    if claim.kind is CounterKind.BUDGET:
        needed = per_s * use_s / remaining if remaining > 0 else least
    else:
        needed = _MARGIN * per_s / claim.refill_per_s if claim.refill_per_s > 0 else least
    return max(least, min(most, needed))
