"""What a request claims of the counters, and what it is charged in the end.

A counter counts one fact: how much of one kind a subject has used, of one model or of all, in one window. However many
limits watch that fact, it has one counter and gets one claim, with the capacity of the tightest of them. So a limit
that is raised, or deleted and made again, finds what was used before; and a soft budget below a hard one costs nothing.

Counters are named ``kind|subject|model``, budgets with their window behind: ``usd_per_day|key:5b1f|*|2026-11-21``.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from maitred.admission.policy.rules import Rule
from maitred.admission.policy.windows import window_at
from maitred.core.answer import Outcome
from maitred.core.counters import Claim, CounterKind
from maitred.core.limits import Limit, LimitKind
from maitred.core.money import PRICED_TOKENS, Price
from maitred.core.request import Usage

_BOUNDS = frozenset({LimitKind.CONTEXT_TOKENS, LimitKind.OUTPUT_TOKENS})
"""These bound each request by itself: nothing is counted."""


class Size(msgspec.Struct, frozen=True):
    """How large a request is, before anything is generated."""

    prompt_tokens: int = 0
    """Of all prompts together."""
    choices: int = 1
    """Answers to all prompts together; each may have as many tokens as are reserved."""


class Demand(msgspec.Struct, frozen=True):
    """All that one request claims."""

    claims: list[Claim]
    rules: list[Rule]
    """For each claim the tightest limit behind it: the one to name when there is no room."""
    soft: list[tuple[int, Limit]]
    """Soft budgets, with the index of the claim that counts for them."""


def demand_of(rules: Sequence[Rule], price: Price, size: Size, wall_s: float) -> Demand:
    """One claim for every counter that these limits watch.

    Args:
        rules: The limits that hold.
        price: Of the model. Where tokens cost nothing, no budget counts.
        size: Of the request.
        wall_s: The time, for the windows of budgets.
    """
    free = not (price.prompt or price.cached or price.output)
    watched: dict[tuple[LimitKind, str, str | None], list[Rule]] = {}
    for rule in rules:
        limit = rule.limit
        if limit.kind not in _BOUNDS and not (free and limit.kind.spend):
            watched.setdefault((limit.kind, rule.subject, limit.model), []).append(rule)
    demand = Demand([], [], [])
    for (kind, _, _), group in watched.items():
        strict = [rule for rule in group if rule.limit.hard or not kind.spend]
        rule = min(strict or group, key=lambda rule: (rule.limit.value, burst_of(rule.limit)))
        if kind.spend:
            demand.soft.extend((len(demand.claims), each.limit) for each in group if not each.limit.hard)
            claim = spend_claim(rule, price, size, wall_s, hard=bool(strict))
        else:
            claim = _claim(rule, min(burst_of(each.limit) for each in group), size)
        demand.claims.append(claim)
        demand.rules.append(rule)
    return demand


def burst_of(limit: Limit) -> int:
    """What a counter of this limit holds at most."""
    return limit.value if limit.burst is None or not limit.kind.per_minute else limit.burst


def spend_claim(rule: Rule, price: Price, size: Size, wall_s: float, *, hard: bool) -> Claim:
    """The claim for a budget: the cost of the request as if no token of the prompt were found in the cache."""
    limit = rule.limit
    window = window_at(limit.kind, wall_s)
    return Claim(
        f"{_name(rule)}|{window.name}",
        CounterKind.BUDGET,
        limit.value,
        size.prompt_tokens * max(price.prompt, price.cached),
        size.choices * price.output,
        PRICED_TOKENS,
        ends_s=window.ends_s,
        hard=hard,
        clamps=True,
    )


def _claim(rule: Rule, capacity: int, size: Size) -> Claim:
    """The claim for a rate or for what may run at one time."""
    limit = rule.limit
    fixed, per_output = _shape(limit.kind, size)
    if limit.kind.concurrent:
        return Claim(
            _name(rule),
            CounterKind.POOL,
            capacity,
            fixed,
            per_output,
            clamps=limit.kind is LimitKind.CONCURRENT_TOKENS,
        )
    return Claim(_name(rule), CounterKind.BUCKET, capacity, fixed, per_output, refill_per_s=limit.value / 60)


def _shape(kind: LimitKind, size: Size) -> tuple[int, int]:
    """What a claim takes in any case, and for every token that each choice may have."""
    match kind:
        case LimitKind.INPUT_TOKENS_PER_MINUTE:
            return size.prompt_tokens, 0
        case LimitKind.OUTPUT_TOKENS_PER_MINUTE:
            return 0, size.choices
        case LimitKind.TOKENS_PER_MINUTE | LimitKind.CONCURRENT_TOKENS:
            return size.prompt_tokens, size.choices
        case _:
            return 1, 0


def _name(rule: Rule) -> str:
    model = rule.limit.model
    return f"{rule.limit.kind.value}|{_part(rule.subject)}|{'*' if model is None else _part(model, wild='%2A')}"


def _part(text: str, wild: str = "*") -> str:
    """Part of a name, so that no two names can be the same by accident: subjects and models hold any character."""
    return wild if text == "*" else text.replace("%", "%25").replace("|", "%7C")


def charges_of(demand: Demand, usage: Usage, cost_nusd: int, outcome: Outcome) -> dict[str, int]:
    """What each counter is charged when the request has ended.

    A request counts as one unless it was turned away before any work was done for it. Rates of tokens keep what was
    processed, whoever is at fault, for they protect what can be processed; `usage` says how much that was. Budgets are
    charged the cost. What was held for running is all given back.
    """
    return {
        claim.counter: _charge(rule.limit.kind, usage, cost_nusd, outcome)
        for claim, rule in zip(demand.claims, demand.rules, strict=True)
        if not rule.limit.kind.concurrent
    }


def spent_of(demand: Demand, charges: Mapping[str, int]) -> dict[str, int]:
    """Of these charges, those that last: the ones to budgets."""
    return {claim.counter: charges[claim.counter] for claim in _budgets(demand.claims)}


def _budgets(claims: Iterable[Claim]) -> Iterable[Claim]:
    return (claim for claim in claims if claim.kind is CounterKind.BUDGET)


def _charge(kind: LimitKind, usage: Usage, cost_nusd: int, outcome: Outcome) -> int:
    match kind:
        case LimitKind.REQUESTS_PER_MINUTE:
            return 0 if outcome is Outcome.REFUSED else 1
        case LimitKind.TOKENS_PER_MINUTE:
            return usage.total_tokens
        case LimitKind.INPUT_TOKENS_PER_MINUTE:
            return usage.prompt_tokens
        case LimitKind.OUTPUT_TOKENS_PER_MINUTE:
            return usage.completion_tokens
        case _:
            return cost_nusd
