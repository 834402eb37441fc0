"""Messages of refusals by a limit: the limit, its state, the time until room, and the remedy.

There are three cases. A rate, or a limit on running requests, frees up by itself: retry soon. A budget is used up:
retry after its window ends. A request is larger than the limit itself: send a smaller request, because a retry never
helps.
"""

import math
from collections.abc import Sequence

import msgspec

from maitred.admission.policy.claims import LimitDemand
from maitred.admission.policy.rules import LimitRule
from maitred.core.counters import CounterKind, CounterState, LimitClaim, RequestSize, ReservationDenied
from maitred.core.errors import LimitReached, QuotaExceeded, RateLimited
from maitred.core.limits import Limit, LimitKind
from maitred.core.usage import to_usd

_PLACE_S = 1.0
"""Retry interval in seconds for a limit on running requests, whose end is unknown. It gives a caller a slot soon
without too many retries."""
_OF_REQUESTS = (LimitKind.REQUESTS_PER_MINUTE, LimitKind.CONCURRENT_REQUESTS)
_JITTER = 0.1
"""Share of random delay in a retry time, to spread requests that were refused together."""


class RequestedTokens(msgspec.Struct, frozen=True):
    """The output that a refused request asked for."""

    output: int
    """Output tokens of each choice."""
    least: int
    """Minimum number of tokens that the request accepts."""
    named: bool = True
    """Whether the caller gave the number explicitly."""
    param: str = "max_tokens"
    """Name of the number in the API."""
    is_least: bool = False
    """Whether the request was not decoded, so that it needs this or more."""


def make_refusal(demand: LimitDemand, denied: ReservationDenied, asked: RequestedTokens, jitter: float) -> LimitReached:
    """Makes the error for a request that the counters denied.

    Args:
        demand: Claims of the request.
        denied: Denial from the counters.
        asked: Output that the request asked for.
        jitter: Random number from 0 to 1, new for each refusal.
    """
    claim, rule, reading = demand.claims[denied.claim], demand.rules[denied.claim], denied.readings[denied.claim]
    later = 1 + _JITTER * jitter
    needed = claim.amount(asked.least if claim.clamps else asked.output)
    if claim.kind is CounterKind.BUDGET:
        if reading.used + needed <= reading.capacity:
            return _refusal(RateLimited, _held_text(rule, reading), rule, reading, _PLACE_S * later)
        renews = claim.ends_s is not None and needed <= reading.capacity
        wait_s = reading.reset_s * later if renews else None
        return _refusal(QuotaExceeded, _used_up(rule, reading, renews=renews), rule, reading, wait_s)
    wait_s = denied.retry_after_s
    if claim.kind is CounterKind.POOL:
        wait_s = None if needed > claim.capacity else wait_s or _PLACE_S
    if wait_s is None:
        return _refusal(RateLimited, _too_large(claim, rule, needed, asked), rule, reading, None)
    wait_s *= later
    reason = "Too much at one time" if claim.kind is CounterKind.POOL else "Rate limit reached"
    return _refusal(
        RateLimited, f"{reason}: {_short(claim, rule, reading, asked, needed, wait_s)}", rule, reading, wait_s
    )


def find_denial(
    demand: LimitDemand, readings: Sequence[CounterState], size: RequestSize, output: int
) -> ReservationDenied | None:
    """Returns how the counters would deny a request now, by their readings; None: there is room.

    Args:
        demand: Claims of the request.
        readings: State of each counter, in the order of the claims.
        size: Size of the request.
        output: Fewest output tokens of each choice.
    """
    denial, longest_s = None, -math.inf
    for index, (claim, reading) in enumerate(zip(demand.claims, readings, strict=True)):
        needed = claim.amount(output, size)
        if not claim.hard or needed <= max(reading.remaining, 0):
            continue
        wait_s: float | None = None
        if claim.kind is CounterKind.BUCKET and claim.refill_per_s and needed <= claim.capacity:
            wait_s = (needed - reading.remaining) / claim.refill_per_s
        if denial is None or (wait_s or 0.0) > longest_s:
            denial, longest_s = ReservationDenied(index, list(readings), wait_s), wait_s or 0.0
    return denial


def _refusal(
    error: type[LimitReached], message: str, rule: LimitRule, reading: CounterState, retry_after_s: float | None
) -> LimitReached:
    limit = rule.limit
    return error(
        message,
        subject=rule.subject,
        limit=limit.kind.value,
        value=limit.value,
        reading=reading,
        retry_after_s=retry_after_s,
    )


def _allowance_sentence(rule: LimitRule) -> str:
    return f"{whose(rule.subject)} may use {allowance(rule.limit)}{of_model(rule.limit)}"


def _too_large(claim: LimitClaim, rule: LimitRule, needed: int, asked: RequestedTokens) -> str:
    kind = rule.limit.kind
    at_once = "" if claim.capacity == rule.limit.value else f", and at most {amount(kind, claim.capacity)} at once"
    remedy = "No request fits this limit: have it raised."
    if claim.fixed < claim.capacity and claim.per_output:
        most = (claim.capacity - claim.fixed) // claim.per_output
        lower = f"Lower {asked.param} to" if asked.named else f"Name a {asked.param} of"
        remedy = f"{lower} at most {most:,}{', or shorten the prompt' if claim.fixed else ''}."
    elif claim.fixed > 1:
        remedy = "Shorten the prompt, or have the limit raised."
    return f"Request too large: it may need {amount(kind, needed)}, but {_allowance_sentence(rule)}{at_once}. {remedy}"


def _short(
    claim: LimitClaim, rule: LimitRule, reading: CounterState, asked: RequestedTokens, needed: int, wait_s: float
) -> str:
    if claim.kind is CounterKind.POOL:
        when = "Come back when a request that runs has ended"
    else:
        free = span(reading.reset_s)
        when = f"Unused, all of it is free again in {free}. Come back in {span(wait_s)}, when it is your turn"
    smaller = f", or ask for less with {asked.param}" if claim.per_output and not asked.is_least else ""
    least = "at least " if asked.is_least and rule.limit.kind not in _OF_REQUESTS else ""
    return (
        f"{_allowance_sentence(rule)}. {_state(rule, reading)}, this request needs {least}{needed:,}. {when}{smaller}."
    )


def _held_text(rule: LimitRule, reading: CounterState) -> str:
    spent, held = amount(rule.limit.kind, reading.used), amount(rule.limit.kind, reading.reserved)
    return (
        f"Budget held by running requests: {_allowance_sentence(rule)}. {spent} are spent, and {held} are held until "
        "requests that run have ended. Come back then, or have the budget raised."
    )


def _used_up(rule: LimitRule, reading: CounterState, *, renews: bool) -> str:
    remedy = "Ask for a shorter answer, or have the budget raised."
    if renews:
        remedy = f"The budget renews itself in {span(reading.reset_s)}; wait for that, or have it raised."
    return (
        f"Budget used up: {_allowance_sentence(rule)}. {_state(rule, reading)}, too little for this request. {remedy}"
    )


def _state(rule: LimitRule, reading: CounterState) -> str:
    kind = rule.limit.kind
    if kind.spend:
        return f"{amount(kind, reading.used)} are spent, {amount(kind, max(0, reading.remaining))} are left"
    return f"{reading.used:,} are used, {max(0, reading.remaining):,} are left"


def whose(subject: str) -> str:
    """Returns a subject as words: ``key 5b1f``, ``tenant acme``, ``this installation``."""
    return "this installation" if subject == "*" else subject.replace(":", " ", 1)


def of_model(limit: Limit) -> str:
    """Returns the words for a limit's model; empty for all models."""
    return "" if limit.model is None else f" of {limit.model}"


def allowance(limit: Limit) -> str:
    """Returns what a limit allows: ``60,000 tokens per minute``, ``$5.00 per day``, ``4 requests at one time``."""
    value = amount(limit.kind, limit.value)
    match limit.kind:
        case LimitKind.USD_TOTAL:
            return f"{value} in all"
        case LimitKind.CONCURRENT_REQUESTS | LimitKind.CONCURRENT_TOKENS:
            return f"{value} at one time"
        case _:
            return f"{value} per {limit.kind.value.rpartition('_')[2]}"


def amount(kind: LimitKind, count: int) -> str:
    """Returns a number with the unit of a limit."""
    if kind.spend:
        return dollars(count)
    unit = kind.value.removeprefix("concurrent_").removesuffix("_per_minute").replace("_", " ")
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"


def dollars(nusd: int) -> str:
    """Returns an amount of money with at least two digits after the decimal point."""
    whole, _, cents = f"{to_usd(abs(nusd)):,.9f}".partition(".")
    return f"{'-' if nusd < 0 else ''}${whole}.{cents.rstrip('0').ljust(2, '0')}"


def span(seconds: float) -> str:
    """Returns a time span in one unit, rounded up: ``40 ms``, ``59 s``, ``12 minutes``, ``9 days``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)} ms"
    for unit_s, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit_s:
            return f"{math.ceil(seconds / unit_s)} {unit}"
    return f"{math.ceil(seconds)} s"
