"""Words for limits, subjects, amounts and times, as they stand in messages to people."""

import math

from maitred.core.limits import Limit, LimitKind
from maitred.core.money import usd_of


def whose(subject: str) -> str:
    """A subject in a sentence: ``key 5b1f``, ``tenant acme``, ``this installation``."""
    return "this installation" if subject == "*" else subject.replace(":", " ", 1)


def of_model(limit: Limit) -> str:
    """Which model a limit is about, if not all."""
    return "" if limit.model is None else f" of {limit.model}"


def allowance(limit: Limit) -> str:
    """What a limit allows: ``60,000 tokens per minute``, ``$5.00 per day``, ``4 requests at one time``."""
    value = amount(limit.kind, limit.value)
    match limit.kind:
        case LimitKind.USD_TOTAL:
            return f"{value} in all"
        case LimitKind.CONCURRENT_REQUESTS | LimitKind.CONCURRENT_TOKENS:
            return f"{value} at one time"
        case _:
            return f"{value} per {limit.kind.value.rpartition('_')[2]}"


def amount(kind: LimitKind, count: int) -> str:
    """A number of what a limit counts."""
    if kind.spend:
        return dollars(count)
    unit = kind.value.removeprefix("concurrent_").removesuffix("_per_minute").replace("_", " ")
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"


def dollars(nusd: int) -> str:
    """Money, with as many digits as it needs and at least two after the point."""
    whole, _, cents = f"{usd_of(abs(nusd)):,.9f}".partition(".")
    return f"{'-' if nusd < 0 else ''}${whole}.{cents.rstrip('0').ljust(2, '0')}"


def span(seconds: float) -> str:
    """A time span in one unit, rounded up: ``40 ms``, ``59 s``, ``12 minutes``, ``3 hours``, ``9 days``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)} ms"
    for unit_s, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{math.ceil(seconds / unit_s)} {unit}"
    return f"{math.ceil(seconds)} s"
