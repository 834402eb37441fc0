"""What a request claims of the counters, and what it is charged in the end.

Which counters there are is settled by the limits (see `maitred.admission.policy.watches`). A request adds its size, the
price of its model and the time, which chooses the windows of budgets.
"""

from collections.abc import Mapping, Sequence

import msgspec

from maitred.admission.policy.rules import Rule
from maitred.admission.policy.watches import Watch
from maitred.admission.policy.windows import window_at
from maitred.core.answer import Outcome
from maitred.core.counters import Claim, CounterKind
from maitred.core.limits import Limit, LimitKind
from maitred.core.money import PRICED_TOKENS, Price
from maitred.core.request import Usage

_BUCKET, _POOL, _BUDGET = CounterKind.BUCKET, CounterKind.POOL, CounterKind.BUDGET


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


def demand_of(watches: Sequence[Watch], price: Price, size: Size, wall_s: float) -> Demand:
    """One claim for every counter that is watched.

    Args:
        watches: What the limits that hold come to.
        price: Of the model. Where tokens cost nothing, no budget counts.
        size: Of the request.
        wall_s: The time, for the windows of budgets.
    """
    prompt_tokens, choices = size.prompt_tokens, size.choices
    # A budget reserves the cost of the request as if no token of the prompt were found in the cache.
    prompt_cost, output_cost = prompt_tokens * max(price.prompt, price.cached), choices * price.output
    free = not (price.prompt or price.cached or price.output)
    demand = Demand([], [], [])
    for watch in watches:
        claim = watch.claim
        if claim.kind is _BUDGET:
            if free:
                continue
            for limit in watch.soft:
                demand.soft.append((len(demand.claims), limit))
            claim = spend_claim(watch, prompt_cost, output_cost, wall_s)
        elif watch.prompt or watch.output:
            claim = Claim(
                claim.counter,
                claim.kind,
                claim.capacity,
                prompt_tokens if watch.prompt else 0,
                choices if watch.output else 0,
                1,
                claim.refill_per_s,
                None,
                True,
                claim.clamps,
            )
        demand.claims.append(claim)
        demand.rules.append(watch.rule)
    return demand


def spend_claim(watch: Watch, fixed: int, per_output: int, wall_s: float) -> Claim:
    """The claim on a budget in the window of now, for that many nano-dollars per thousand tokens."""
    claim = watch.claim
    window = window_at(watch.rule.limit.kind, wall_s)
    return Claim(
        f"{claim.counter}|{window.name}",
        CounterKind.BUDGET,
        claim.capacity,
        fixed,
        per_output,
        PRICED_TOKENS,
        0.0,
        window.ends_s,
        claim.hard,
        True,
    )


def charges_of(demand: Demand, usage: Usage, cost_nusd: int, outcome: Outcome) -> dict[str, int]:
    """What each counter is charged when the request has ended.

    A request counts as one unless it was turned away before any work was done for it. Rates of tokens keep what was
    processed, whoever is at fault, for they protect what can be processed; `usage` says how much that was. Budgets are
    charged the cost. What was held for running is all given back.
    """
    return {
        claim.counter: cost_nusd if claim.kind is _BUDGET else _taken(rule.limit.kind, usage, outcome)
        for claim, rule in zip(demand.claims, demand.rules, strict=True)
        if claim.kind is not _POOL
    }


def spent_of(demand: Demand, charges: Mapping[str, int]) -> dict[str, int]:
    """Of these charges, those that last: the ones to budgets."""
    return {claim.counter: charges[claim.counter] for claim in demand.claims if claim.kind is _BUDGET}


def taken_of(demand: Demand, charges: Mapping[str, int]) -> dict[str, int]:
    """Of these charges, those to rates; one that is nothing is left out."""
    return {
        claim.counter: charges[claim.counter]
        for claim in demand.claims
        if claim.kind is _BUCKET and charges[claim.counter]
    }


def reserved_of(demand: Demand, output: int) -> dict[str, int]:
    """What a request holds of rates until it has ended, when each choice may have that much output."""
    amounts = {claim.counter: claim.amount(output) for claim in demand.claims if claim.kind is _BUCKET}
    return {counter: amount for counter, amount in amounts.items() if amount}


def _taken(kind: LimitKind, usage: Usage, outcome: Outcome) -> int:
    """What is taken from a rate."""
    match kind:
        case LimitKind.REQUESTS_PER_MINUTE:
            return 0 if outcome is Outcome.REFUSED else 1
        case LimitKind.TOKENS_PER_MINUTE:
            return usage.total_tokens
        case LimitKind.INPUT_TOKENS_PER_MINUTE:
            return usage.prompt_tokens
        case _:
            return usage.completion_tokens
