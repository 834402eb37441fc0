"""Claims of a request on the counters, what it is charged in the end, and the windows of budgets.

Which counters there are is settled by the limits (see `maitred.admission.policy.rules`), the price of the model and
the day, which chooses the windows of budgets. All of that stays the same from one request to the next, so it is worked
out once (see `maitred.admission.limit_plans`); a request adds its size.

Budgets have windows: days, weeks that begin on Monday, and months, all of UTC; or no window at all.

A pure package may not ask the `datetime` module for the time, so the calendar is a few lines of arithmetic here. It is
the proleptic Gregorian calendar counted in days since 1970-01-01, after Howard Hinnant, "chrono-Compatible Low-Level
Date Algorithms" (``civil_from_days``): years begin in March, so that the leap day comes last.
"""

from collections.abc import Sequence

import msgspec

from maitred.admission.policy.rules import LimitRule
from maitred.core.context import Outcome
from maitred.core.counters import CounterKind, LimitClaim, RequestSize
from maitred.core.limits import Limit, LimitKind
from maitred.core.request import Usage
from maitred.core.usage import PRICED_TOKENS, Price

_DAY_S = 86_400
_ERA_DAYS = 146_097
"""Days in 400 years, after which the calendar repeats."""
_FROM_MARCH_0000 = 719_468
"""Days from 0000-03-01 to 1970-01-01."""


class BudgetWindow(msgspec.Struct, frozen=True):
    """One window: its name is part of a counter's name, so a new window is a new counter."""

    name: str
    """``2026-11-21`` (of a week: its Monday), ``2026-11``, or ``total``."""
    ends_s: float | None
    """Wall time; None: never."""


def day_at(wall_s: float) -> int:
    """The day that a time lies in, counted from 1970-01-01."""
    return int(wall_s // _DAY_S)


def window_on(kind: LimitKind, day: int) -> BudgetWindow:
    """The window of this kind of budget that a day lies in."""
    if kind is LimitKind.USD_TOTAL:
        return BudgetWindow("total", None)
    if kind is LimitKind.USD_PER_DAY:
        return BudgetWindow(_format_day(day), float((day + 1) * _DAY_S))
    if kind is LimitKind.USD_PER_WEEK:
        monday = day - (day + 3) % 7  # 1970-01-01 was a Thursday
        return BudgetWindow(_format_day(monday), float((monday + 7) * _DAY_S))
    year, month, date = _date_of(day)
    first = day - (date - 1)
    after = first + 31
    next_first = after - (_date_of(after)[2] - 1)
    return BudgetWindow(f"{year:04}-{month:02}", float(next_first * _DAY_S))


def _format_day(day: int) -> str:
    year, month, date = _date_of(day)
    return f"{year:04}-{month:02}-{date:02}"


def _date_of(day: int) -> tuple[int, int, int]:
    """Year, month and day of the month, of a day counted from 1970-01-01."""
    era, day_of_era = divmod(day + _FROM_MARCH_0000, _ERA_DAYS)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_from_march = (5 * day_of_year + 2) // 153
    date = day_of_year - (153 * month_from_march + 2) // 5 + 1
    month = month_from_march + 3 if month_from_march < 10 else month_from_march - 9
    return year_of_era + era * 400 + (month <= 2), month, date


_BUCKET, _BUDGET = CounterKind.BUCKET, CounterKind.BUDGET
_REFUSED = Outcome.REFUSED


class LimitDemand(msgspec.Struct, frozen=True):
    """All that requests of one sort claim, whatever their size."""

    claims: tuple[LimitClaim, ...]
    rules: tuple[LimitRule, ...]
    """For each claim the tightest limit behind it: the one to name when there is no room."""
    soft: tuple[tuple[int, Limit], ...]
    """Soft budgets, with the index of the claim that counts for them."""
    budgets: tuple[str, ...]
    """Their counters."""
    rates: tuple[LimitClaim, ...]
    """Those of the claims that are on rates."""

    def claims_for(self, size: RequestSize) -> "LimitDemand":
        """Returns the claims of a request of this size."""
        return msgspec.structs.replace(self, claims=tuple(claim.of(size) for claim in self.claims))


class WatchedCounter(msgspec.Struct, frozen=True):
    """One counter, with all of its claim that no request changes."""

    rule: LimitRule
    """The tightest limit behind it: the one to name when there is no room."""
    soft: tuple[Limit, ...]
    """Soft budgets that it counts for."""
    claim: LimitClaim
    """A budget's lacks the price, and in the name of its counter the window."""


def make_demand(watches: Sequence[WatchedCounter], price: Price, day: int) -> LimitDemand:
    """One claim for every counter that is watched.

    Args:
        watches: What the limits that hold come to.
        price: Of the model. Where tokens cost nothing, no budget counts.
        day: Chooses the windows of budgets; see `maitred.admission.policy.claims`.
    """
    free = not (price.prompt or price.cached or price.output)
    counted = [watch for watch in watches if not (free and watch.claim.kind is _BUDGET)]
    claims = tuple(spend_claim(watch, price, day) if watch.claim.kind is _BUDGET else watch.claim for watch in counted)
    return LimitDemand(
        claims,
        tuple(watch.rule for watch in counted),
        tuple((index, limit) for index, watch in enumerate(counted) for limit in watch.soft),
        tuple(claim.counter for claim in claims if claim.kind is _BUDGET),
        tuple(claim for claim in claims if claim.kind is _BUCKET),
    )


def spend_claim(watch: WatchedCounter, price: Price, day: int) -> LimitClaim:
    """The claim on a budget in the window of a day, at that price."""
    claim = watch.claim
    window = window_on(watch.rule.limit.kind, day)
    return LimitClaim(
        f"{claim.counter}|{window.name}",
        _BUDGET,
        claim.capacity,
        0,
        price.output,
        PRICED_TOKENS,
        0.0,
        window.ends_s,
        claim.hard,
        clamps=True,
        # As if no token of the prompt were found in the cache, or all, if that is what costs more.
        per_prompt=max(price.prompt, price.cached),
    )


def spend_amounts(demand: LimitDemand, cost_nusd: int) -> dict[str, int]:
    """Returns what each budget is charged when the request has ended: its cost."""
    return dict.fromkeys(demand.budgets, cost_nusd)


def rate_amounts(demand: LimitDemand, usage: Usage, outcome: Outcome) -> dict[str, int]:
    """Returns what each rate is charged when the request has ended, without those that are charged nothing.

    A request counts as one unless it was turned away before any work was done for it. Rates of tokens keep what was
    processed, whoever is at fault, for they protect what can be processed; `usage` says how much that was.
    """
    taken = {}
    for claim in demand.rates:
        amount = claim.per_prompt * usage.prompt_tokens + claim.per_output * usage.completion_tokens
        if outcome is not _REFUSED:
            amount += claim.fixed
        if amount:
            taken[claim.counter] = amount
    return taken


def reserved_amounts(demand: LimitDemand, size: RequestSize, output: int) -> dict[str, int]:
    """Returns what a request reserves of each rate until it ends, if each choice may have that much output."""
    prompt_tokens, wanted, taken = size.prompt_tokens, size.choices * output, {}
    for claim in demand.rates:
        # `LimitClaim.amount`, spelled out: rates are counted in whole tokens and requests, so nothing is divided.
        amount = claim.fixed + claim.per_prompt * prompt_tokens + claim.per_output * wanted
        if amount:
            taken[claim.counter] = amount
    return taken


_BOUNDS = frozenset({LimitKind.CONTEXT_TOKENS, LimitKind.OUTPUT_TOKENS})
"""These bound each request by itself: nothing is counted."""
_OF_PROMPTS = frozenset({LimitKind.INPUT_TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE, LimitKind.CONCURRENT_TOKENS})
_OF_OUTPUT = frozenset({LimitKind.OUTPUT_TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE, LimitKind.CONCURRENT_TOKENS})


def watched_counters(rules: Sequence[LimitRule]) -> list[WatchedCounter]:
    """One watch for every counter that these limits watch.

    A counter counts one fact: how much of one kind a subject has used, of one model or of all, in one window. However
    many limits watch that fact, it has one counter and gets one claim, with the capacity of the tightest of them. So a
    limit that is raised, or deleted and made again, finds what was used before; and a soft budget below a hard one
    costs nothing.

    Counters are named ``kind|subject|model``, budgets with their window behind: ``usd_per_day|key:5b1f|*|2026-11-21``.
    """
    groups: dict[tuple[LimitKind, str, str | None], list[LimitRule]] = {}
    for rule in rules:
        if rule.limit.kind not in _BOUNDS:
            groups.setdefault((rule.limit.kind, rule.subject, rule.limit.model), []).append(rule)
    return [_watch(kind, group) for (kind, _, _), group in groups.items()]


def _watch(kind: LimitKind, group: Sequence[LimitRule]) -> WatchedCounter:
    strict = [rule for rule in group if rule.limit.hard or not kind.spend]
    rule = min(strict or group, key=lambda rule: (rule.limit.value, _burst_capacity(rule.limit)))
    soft = tuple(rule.limit for rule in group if kind.spend and not rule.limit.hard)
    capacity = rule.limit.value if kind.spend else min(_burst_capacity(other.limit) for other in group)
    claim = _claim(rule, capacity, hard=bool(strict))
    return WatchedCounter(rule, soft, claim)


def _claim(rule: LimitRule, capacity: int, *, hard: bool) -> LimitClaim:
    limit = rule.limit
    kind, name = limit.kind, _counter_name(rule)
    if kind.spend:
        return LimitClaim(name, CounterKind.BUDGET, capacity, 0, hard=hard, clamps=True)
    prompt, output = int(kind in _OF_PROMPTS), int(kind in _OF_OUTPUT)
    fixed = 0 if prompt or output else 1
    if kind.concurrent:
        return LimitClaim(name, CounterKind.POOL, capacity, fixed, output, clamps=not fixed, per_prompt=prompt)
    return LimitClaim(
        name, CounterKind.BUCKET, capacity, fixed, output, refill_per_s=limit.value / 60, per_prompt=prompt
    )


def _burst_capacity(limit: Limit) -> int:
    """Returns the most that a counter of this limit holds."""
    return limit.value if limit.burst is None or not limit.kind.per_minute else limit.burst


def _counter_name(rule: LimitRule) -> str:
    """The name of the counter behind a limit; a budget's lacks its window."""
    model = rule.limit.model
    return f"{rule.limit.kind.value}|{_part(rule.subject)}|{'*' if model is None else _part(model, wild='%2A')}"


def _part(text: str, wild: str = "*") -> str:
    """Part of a name, so that no two names can be the same by accident: subjects and models hold any character."""
    return wild if text == "*" else text.replace("%", "%25").replace("|", "%7C")
