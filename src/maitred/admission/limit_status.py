"""Usage of limits, for display before a request is refused."""

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
    """Subject whose use was counted; the limit may belong to ``tenant:*``."""
    limit: Limit
    used: int
    """Used amount, reservations of running requests included."""
    reset_s: float
    """Seconds until the limit is full again or its window ends; 0: it is full, or unknown."""


async def limit_usage(
    subjects: Sequence[str], limits: LimitSource, counters: Counters, clock: Clock
) -> list[LimitUsage]:
    """Returns the usage of the limits of these subjects with one call to the counters.

    Limits on single requests are omitted, because they have no counter.

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
    # Each limit is watched separately: several limits on one counter are several bars on the screen.
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
    """Returns the rate limit status from one reading per claim; None if no claim is a rate.

    For requests, the tightest limit is the one with the fewest requests left. Limits on input, output and all tokens
    are not comparable by count, so the tightest one is that with the smallest share left.
    """
    requests: CounterState | None = None
    tokens: CounterState | None = None
    for claim, reading in zip(claims, readings, strict=True):
        if claim.kind is not _BUCKET:
            continue
        if not claim.per_prompt and not claim.per_output:
            if requests is None or reading.remaining < requests.remaining:
                requests = reading
        elif tokens is None or _share(reading) < _share(tokens):
            tokens = reading
    return None if requests is None and tokens is None else RateLimitStatus(requests, tokens)


def _share(reading: CounterState) -> float:
    return reading.remaining / reading.capacity if reading.capacity > 0 else 0.0
