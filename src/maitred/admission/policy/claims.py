"""Claims of a request on the counters, its final charges, and the windows of budgets.

The limits (see `maitred.admission.policy.rules`), the price of the model and the day determine the counters; the day
determines the budget windows. These values are constant between requests, so they are computed once (see
`maitred.admission.limit_plans`); a request adds only its size.

A budget window is a day, a week from Monday or a month, all in UTC; a budget may also have no window.

A pure package must not use the `datetime` module, because it can read the time, so this module computes the calendar
with a few lines of arithmetic. The calendar is the proleptic Gregorian calendar in days since 1970-01-01, after Howard
Hinnant, "chrono-Compatible Low-Level Date Algorithms" (``civil_from_days``): years begin in March, so the leap day
comes last.
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
    """One budget window; its name is part of the counter name, so a new window is a new counter."""

    name: str
    """Name of the window: ``2026-11-21`` (for a week its Monday), ``2026-11``, or ``total``."""
    ends_s: float | None
    """Wall time at which the window ends; None: never."""


def day_at(wall_s: float) -> int:
    """Returns the day of a time, counted from 1970-01-01."""
    return int(wall_s // _DAY_S)


def window_on(kind: LimitKind, day: int) -> BudgetWindow:
    """Returns the window of this budget kind that contains a day."""
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
    """Returns the year, month and day of the month for a day counted from 1970-01-01."""
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
    """All claims of requests of one kind, independent of their size."""

    claims: tuple[LimitClaim, ...]
    rules: tuple[LimitRule, ...]
    """Tightest limit of each claim, which a refusal names."""
    soft: tuple[tuple[int, Limit], ...]
    """Soft budgets, with the index of their claim."""
    budgets: tuple[str, ...]
    """Names of the budget counters."""
    rates: tuple[LimitClaim, ...]
    """Claims on rate counters."""

    def claims_for(self, size: RequestSize) -> "LimitDemand":
        """Returns the claims of a request of this size."""
        return msgspec.structs.replace(self, claims=tuple(claim.of(size) for claim in self.claims))

    def without_request_rates(self) -> "LimitDemand":
        """Returns the demand without the rates of requests of all models, which count a request once.

        It is for the fallback of a request that they have counted.
        """
        kept = [index for index, claim in enumerate(self.claims) if not _counts_requests_of_all_models(claim)]
        places = {index: place for place, index in enumerate(kept)}
        claims = tuple(self.claims[index] for index in kept)
        return LimitDemand(
            claims,
            rules=tuple(self.rules[index] for index in kept),
            soft=tuple((places[index], limit) for index, limit in self.soft),
            budgets=self.budgets,
            rates=tuple(claim for claim in claims if claim.kind is _BUCKET),
        )

    def with_saved_tokens(self, tokens: int, cost_nusd: int) -> "LimitDemand":
        """Returns the demand of a request that has more tokens than are computed for it.

        Args:
            tokens: Saved tokens that rates count like those of prompts.
            cost_nusd: Cost of all saved tokens, which budgets count.
        """
        claims = tuple(
            msgspec.structs.replace(
                claim,
                fixed=claim.fixed + (cost_nusd * claim.divisor if claim.kind is _BUDGET else claim.per_prompt * tokens),
            )
            for claim in self.claims
        )
        return msgspec.structs.replace(
            self, claims=claims, rates=tuple(claim for claim in claims if claim.kind is _BUCKET)
        )


class WatchedCounter(msgspec.Struct, frozen=True):
    """One counter, with the part of its claim that is equal for all requests."""

    rule: LimitRule
    """Tightest limit of the counter, which a refusal names."""
    soft: tuple[Limit, ...]
    """Soft budgets that use this counter."""
    claim: LimitClaim
    """Claim on the counter; for a budget, without the price and without the window in the counter name."""


def make_demand(watches: Sequence[WatchedCounter], price: Price, day: int) -> LimitDemand:
    """Makes one claim for every watched counter.

    Args:
        watches: Watched counters of the limits that apply.
        price: Price of the model. If tokens are free, no budget counts.
        day: Day that determines the budget windows; see the module docstring.
    """
    counted = [watch for watch in watches if not (price.is_free and watch.claim.kind is _BUDGET)]
    claims = tuple(spend_claim(watch, price, day) if watch.claim.kind is _BUDGET else watch.claim for watch in counted)
    return LimitDemand(
        claims,
        rules=tuple(watch.rule for watch in counted),
        soft=tuple((index, limit) for index, watch in enumerate(counted) for limit in watch.soft),
        budgets=tuple(claim.counter for claim in claims if claim.kind is _BUDGET),
        rates=tuple(claim for claim in claims if claim.kind is _BUCKET),
    )


def spend_claim(watch: WatchedCounter, price: Price, day: int) -> LimitClaim:
    """Returns the claim on a budget at a price, in the window of a day."""
    claim = watch.claim
    window = window_on(watch.rule.limit.kind, day)
    return LimitClaim(
        counter=f"{claim.counter}|{window.name}",
        kind=_BUDGET,
        capacity=claim.capacity,
        fixed=0,
        per_output=price.output,
        divisor=PRICED_TOKENS,
        refill_per_s=0.0,
        ends_s=window.ends_s,
        hard=claim.hard,
        clamps=True,
        # The claim assumes the most expensive case: every prompt token is read from the cache, or written, or neither.
        per_prompt=price.max_per_prompt_token,
    )


def rate_amounts(
    demand: LimitDemand, usage: Usage, outcome: Outcome, *, was_dispatched: bool = False
) -> dict[str, int]:
    """Returns the final charge of each rate, without charges of 0.

    A request counts as one request, unless it was refused before a replica was asked: what a replica refuses has cost
    it work, and has used up the operator's own rate there. Token rates count all processed tokens (`usage`), whatever
    the cause of a failure, because they protect the processing capacity.
    """
    taken = {}
    for claim in demand.rates:
        amount = claim.per_prompt * usage.prompt_tokens + claim.per_output * usage.completion_tokens
        if was_dispatched or outcome is not _REFUSED:
            amount += claim.fixed
        if amount:
            taken[claim.counter] = amount
    return taken


def _counts_requests_of_all_models(claim: LimitClaim) -> bool:
    return claim.kind is _BUCKET and bool(claim.fixed) and claim.counter.endswith("|*")


def reserved_amounts(demand: LimitDemand, size: RequestSize, output: int) -> dict[str, int]:
    """Returns the reservation of a request in each rate, for a number of output tokens per choice."""
    prompt_tokens, wanted, taken = size.prompt_tokens, size.choices * output, {}
    for claim in demand.rates:
        # `LimitClaim.amount`, spelled out: rates are counted in whole tokens and requests, so nothing is divided.
        amount = claim.fixed + claim.per_prompt * prompt_tokens + claim.per_output * wanted
        if amount:
            taken[claim.counter] = amount
    return taken


_BOUNDS = frozenset({LimitKind.CONTEXT_TOKENS, LimitKind.OUTPUT_TOKENS})
"""Limits on single requests, which have no counter."""
_OF_PROMPTS = frozenset({LimitKind.INPUT_TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE, LimitKind.CONCURRENT_TOKENS})
_OF_OUTPUT = frozenset({LimitKind.OUTPUT_TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_MINUTE, LimitKind.CONCURRENT_TOKENS})


def watched_counters(rules: Sequence[LimitRule]) -> list[WatchedCounter]:
    """Returns one watched counter for each fact that these limits count.

    A counter counts one fact: how much of one kind a subject has used, of one model or of all, in one window. Any
    number of limits on that fact share one counter and one claim, with the capacity of the tightest limit. So a limit
    that is raised, or deleted and made again, keeps the previous use, and a soft budget below a hard one adds no cost.

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
        return LimitClaim(
            counter=name,
            kind=CounterKind.POOL,
            capacity=capacity,
            fixed=fixed,
            per_output=output,
            clamps=not fixed,
            per_prompt=prompt,
        )
    return LimitClaim(
        counter=name,
        kind=CounterKind.BUCKET,
        capacity=capacity,
        fixed=fixed,
        per_output=output,
        refill_per_s=limit.value / 60,
        per_prompt=prompt,
    )


def _burst_capacity(limit: Limit) -> int:
    """Returns the most that a counter of this limit holds."""
    return limit.value if limit.burst is None or not limit.kind.per_minute else limit.burst


def _counter_name(rule: LimitRule) -> str:
    """Returns the counter name of a limit; for a budget, without its window."""
    model = rule.limit.model
    return f"{rule.limit.kind.value}|{_part(rule.subject)}|{'*' if model is None else _part(model, wild='%2A')}"


def _part(text: str, wild: str = "*") -> str:
    """Escapes a part of a counter name, so that names are unique for any subject and model."""
    return wild if text == "*" else text.replace("%", "%25").replace("|", "%7C")
