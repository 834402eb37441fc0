"""How far limits are used, for whoever wants to see it before anything is refused."""

from collections.abc import Sequence

import msgspec

from maitred.admission.policy.claims import day_at, spend_claim, watched_counters
from maitred.admission.policy.rules import LimitRule, each
from maitred.admission.prices import FREE
from maitred.core.clock import Clock
from maitred.core.context import RateLimitStatus
from maitred.core.counters import CounterKind, Counters, CounterState, LimitClaim
from maitred.core.limits import Limit, LimitSource


class LimitUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of one subject, in requests, tokens or nano-dollars."""

    subject: str
    """For whom it was counted; the limit may be one of ``tenant:*``."""
    limit: Limit
    used: int
    """What was spent or is held, reservations of running requests included."""
    reset_s: float
    """Seconds until all of it is there again, or the window ends; 0: it is, or nobody knows."""


async def limit_usage(
    subjects: Sequence[str], limits: LimitSource, counters: Counters, clock: Clock
) -> list[LimitUsage]:
    """How far the limits are used that hold for these subjects by themselves; asks the counters once.

    Limits that bound each request by itself are left out: nothing is counted for them.

    Raises:
        StoreUnavailable: The counters cannot be read.
    """
    day = day_at(clock.wall_s())
    rules = [
        LimitRule(subject, limit)
        for subject in subjects
        for name in (subject, each(subject))
        for limit in limits.limits_of(name)
    ]
    # One by one: several limits on one counter are several bars on the screen.
    watched = [(rule, watch) for rule in rules for watch in watched_counters([rule])]
    claims = [spend_claim(watch, FREE.price, day) if rule.limit.kind.spend else watch.claim for rule, watch in watched]
    readings = await counters.read(claims) if claims else []
    return [
        LimitUsage(
            subject=rule.subject, limit=rule.limit, used=reading.used + reading.reserved, reset_s=reading.reset_s
        )
        for (rule, _), reading in zip(watched, readings, strict=True)
    ]


_BUCKET = CounterKind.BUCKET


def rate_limit_status(claims: Sequence[LimitClaim], readings: Sequence[CounterState]) -> RateLimitStatus | None:
    """The standing that these readings show, one for each claim; None if no rate is among them.

    Requests are all alike, so the tightest of their limits is the one with the fewest left. Input, output and all
    tokens are not: of these it is the one with the smallest share left.
    """
    requests: CounterState | None = None
    tokens: CounterState | None = None
    for claim, reading in zip(claims, readings, strict=True):
        if claim.kind is not _BUCKET:
            continue
        if claim.fixed:
            if requests is None or reading.remaining < requests.remaining:
                requests = reading
        elif tokens is None or _share(reading) < _share(tokens):
            tokens = reading
    return None if requests is None and tokens is None else RateLimitStatus(requests, tokens)


def _share(reading: CounterState) -> float:
    return reading.remaining / reading.capacity if reading.capacity > 0 else 0.0
