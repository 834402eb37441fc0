"""Where a caller stands with its rates: the tightest of those on requests, and of those on tokens."""

from collections.abc import Sequence

from maitred.core.answer import RateLimitStatus
from maitred.core.counters import CounterKind, CounterState, LimitClaim

_BUCKET = CounterKind.BUCKET


def standing_of(claims: Sequence[LimitClaim], readings: Sequence[CounterState]) -> RateLimitStatus | None:
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
