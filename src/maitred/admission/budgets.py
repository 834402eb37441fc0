"""States of a subject's budgets, and the alert when a soft budget is passed."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from maitred.admission.policy.claims import LimitDemand, day_at, spend_claim, watched_counters
from maitred.admission.policy.rules import LimitRule, each
from maitred.admission.prices import FREE
from maitred.core.clock import Clock
from maitred.core.counters import Counters, CounterState
from maitred.core.limits import Limit, LimitSource

OnSoftBudget = Callable[[Limit, CounterState], None]
"""Callback for a soft budget that was passed, with the state of its counter."""


class BudgetState(msgspec.Struct, frozen=True, kw_only=True):
    """One budget of one subject, in nano-dollars."""

    subject: str
    """Subject whose spending was counted; the limit may belong to ``key:*``."""
    limit: Limit
    charged: int
    reserved: int
    """Amount that is reserved by running requests."""
    remaining: int
    """Remaining amount; negative if a soft budget was passed or a hard one was lowered."""
    ends_s: float | None
    """Wall time at which the window ends; None: never."""


async def budget_usage(subject: str, limits: LimitSource, counters: Counters, clock: Clock) -> list[BudgetState]:
    """Returns the state of every budget of one subject.

    Raises:
        StoreUnavailable: The counters cannot be read.
    """
    if subject == each(subject):
        return []  # ``key:*`` is a pattern without counters of its own
    found = [limit for name in (subject, each(subject)) for limit in limits.limits_of(name) if limit.kind.spend]
    day = day_at(clock.wall_s())
    watches = [watch for limit in found for watch in watched_counters([LimitRule(subject, limit)])]
    claims = [spend_claim(watch, FREE.price, day) for watch in watches]
    readings = await counters.read(claims) if claims else []
    return [
        BudgetState(
            subject=subject,
            limit=limit,
            charged=reading.used,
            reserved=reading.reserved,
            remaining=limit.value - reading.used - reading.reserved,
            ends_s=claim.ends_s,
        )
        for limit, claim, reading in zip(found, claims, readings, strict=True)
    ]


class SoftBudgets:
    """Reports once per window that a soft budget was passed.

    Args:
        on_passed: Callback for a passed budget.
        clock: Clock to drop windows that have ended.
    """

    def __init__(self, on_passed: OnSoftBudget, clock: Clock) -> None:
        self._on_passed = on_passed
        self._clock = clock
        self._reported: dict[tuple[str, str], float | None] = {}

    def check(self, demand: LimitDemand, readings: Sequence[CounterState], charges: Mapping[str, int]) -> None:
        """Compares the charges with every soft budget.

        Args:
            demand: The claims of a request.
            readings: States of the counters of these claims.
            charges: Counter -> amount that has been charged since the readings.
        """
        for index, limit in demand.soft:
            claim, reading = demand.claims[index], readings[index]
            used = reading.used + charges.get(claim.counter, 0)
            if used < limit.value or (limit.id, claim.counter) in self._reported:
                continue
            now_s = self._clock.wall_s()
            self._reported = {
                subject: ends_s for subject, ends_s in self._reported.items() if ends_s is None or ends_s > now_s
            }
            self._reported[limit.id, claim.counter] = claim.ends_s
            self._on_passed(
                limit,
                CounterState(
                    capacity=limit.value,
                    remaining=limit.value - used,
                    reset_s=reading.reset_s,
                    used=used,
                    reserved=reading.reserved,
                ),
            )
