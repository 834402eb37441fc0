"""What every kind of limit claims, and what it is charged."""

import pytest

from maitred.admission.policy.claims import (
    day_at,
    make_demand,
    rate_amounts,
    reserved_amounts,
    watched_counters,
)
from maitred.admission.policy.rules import LimitRule, rules_for
from maitred.core.context import Outcome
from maitred.core.counters import CounterKind, LimitClaim, RequestSize
from maitred.core.limits import LimitKind
from maitred.core.request import Usage
from maitred.core.usage import Price
from tests.support.admission_services import ALICE, SATURDAY_S, Limits, limit

PRICE = Price.per_million_usd(1.0, 0.1, 2.0)
SIZE = RequestSize(prompt_tokens=10, choices=3)
MIDNIGHT_S = SATURDAY_S + 9 * 3600


def claims_of(*limits, price=PRICE, size=SIZE, wall_s=SATURDAY_S, model="tiny"):
    return make_demand(
        watched_counters(rules_for(ALICE.subjects, Limits(*limits), model)), price, day_at(wall_s)
    ).claims_for(size)


def bucket(name, capacity, fixed, per_output, per_minute):
    return LimitClaim(name, CounterKind.BUCKET, capacity, fixed, per_output, refill_per_s=per_minute / 60)


def pool(name, capacity, fixed, per_output, clamps):
    return LimitClaim(name, CounterKind.POOL, capacity, fixed, per_output, clamps=clamps)


def budget(name, capacity, ends_s, hard=True):
    return LimitClaim(
        name, CounterKind.BUDGET, capacity, 10 * PRICE.prompt, 3 * PRICE.output, 1000, 0.0, ends_s, hard, True
    )


@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        ("requests_per_minute", bucket("requests_per_minute|key:alice|*", 60, 1, 0, 60)),
        ("tokens_per_minute", bucket("tokens_per_minute|key:alice|*", 60, 10, 3, 60)),
        ("input_tokens_per_minute", bucket("input_tokens_per_minute|key:alice|*", 60, 10, 0, 60)),
        ("output_tokens_per_minute", bucket("output_tokens_per_minute|key:alice|*", 60, 0, 3, 60)),
        ("concurrent_requests", pool("concurrent_requests|key:alice|*", 60, 1, 0, False)),
        ("concurrent_tokens", pool("concurrent_tokens|key:alice|*", 60, 10, 3, True)),
        ("usd_per_day", budget("usd_per_day|key:alice|*|2026-11-21", 60, MIDNIGHT_S)),
        ("usd_per_week", budget("usd_per_week|key:alice|*|2026-11-16", 60, MIDNIGHT_S + 86400)),
        ("usd_per_month", budget("usd_per_month|key:alice|*|2026-11", 60, MIDNIGHT_S + 9 * 86400)),
        ("usd_total", budget("usd_total|key:alice|*|total", 60, None)),
    ],
)
def test_the_claim_of_each_kind(kind, claim):
    found = limit("key:alice", kind, 60)
    demand = claims_of(found)
    assert (demand.claims, demand.rules, demand.soft) == ((claim,), (LimitRule("key:alice", found),), ())


def test_every_kind_is_a_claim_or_a_bound():
    bounds = [kind for kind in LimitKind if not claims_of(limit("*", kind, 60)).claims]
    assert bounds == [LimitKind.CONTEXT_TOKENS, LimitKind.OUTPUT_TOKENS]


def test_a_burst_is_the_capacity_and_the_value_the_refill():
    (claim,) = claims_of(limit("*", "requests_per_minute", 60, burst=5)).claims
    assert (claim.capacity, claim.refill_per_s) == (5, 1.0)


def test_a_limit_of_each_key_counts_for_each_key():
    (claim,) = claims_of(limit("key:*", "requests_per_minute", 60)).claims
    assert claim.counter == "requests_per_minute|key:alice|*"


def test_every_level_has_a_counter_of_its_own():
    limits = [limit(subject, "concurrent_requests", 9) for subject in ("*", "tenant:*", "key:alice")]
    assert [
        claim.counter for claim in claims_of(*limits, limit("*", "concurrent_requests", 9, model="tiny")).claims
    ] == [
        "concurrent_requests|key:alice|*",
        "concurrent_requests|tenant:team|*",
        "concurrent_requests|tenant:acme|*",
        "concurrent_requests|*|*",
        "concurrent_requests|*|tiny",
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_one_fact_has_one_counter_and_the_tightest_limit_rules(order):
    limits = [
        limit("key:*", "requests_per_minute", 60),
        limit("key:alice", "requests_per_minute", 600, burst=5),
        limit("key:alice", "usd_per_day", 90),
        limit("key:*", "usd_per_day", 80, hard=False),
        limit("key:*", "usd_per_day", 100, hard=False),
        limit("key:*", "usd_per_day", 95),
    ]
    demand = claims_of(*limits[::order])
    by_kind = {
        rule.limit.kind.value: (claim, rule.limit) for claim, rule in zip(demand.claims, demand.rules, strict=True)
    }
    assert len(demand.claims) == 2
    rate, rate_limit = by_kind["requests_per_minute"]
    assert (rate.capacity, rate.refill_per_s, rate_limit) == (5, 1.0, limits[0])
    spend, spend_limit = by_kind["usd_per_day"]
    assert (spend.capacity, spend.hard, spend_limit) == (90, True, limits[2])
    assert {found.value for _, found in demand.soft} == {80, 100}
    assert all(demand.claims[index] is spend for index, _ in demand.soft)


def test_soft_budgets_alone_only_count():
    demand = claims_of(limit("*", "usd_total", 5, hard=False), limit("*", "usd_total", 3, hard=False))
    assert [(claim.capacity, claim.hard) for claim in demand.claims] == [(3, False)]


def test_only_money_can_be_soft():
    (claim,) = claims_of(limit("*", "requests_per_minute", 5, hard=False)).claims
    assert claim.hard


def test_where_tokens_cost_nothing_no_budget_counts():
    assert claims_of(limit("*", "usd_total", 5), price=Price()).claims == ()


def test_names_cannot_be_mistaken_for_one_another():
    odd = ["a|b", "a%7Cb", "a", "*", "%2A", "a|b|c"]
    names = set()
    for subject in odd:
        for model in (*odd, None):
            rule = LimitRule(f"key:{subject}", limit(f"key:{subject}", "usd_total", 5, model=model))
            names.add(make_demand(watched_counters([rule]), PRICE, day_at(SATURDAY_S)).claims[0].counter)
    assert len(names) == len(odd) * (len(odd) + 1)
    assert all(name.count("|") == 3 for name in names)


@pytest.mark.parametrize("cached", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("found", [0, 4, 10])
@pytest.mark.parametrize("written", [None, 0.5, 1.25])
def test_no_request_can_cost_more_than_is_reserved(cached, found, written):
    price = Price.per_million_usd(1.0, cached, 2.0, written, None if written is None else 2.0)
    (claim,) = claims_of(limit("*", "usd_total", 5), price=price).claims
    for kept in range(11 - found):
        usage = Usage(10, 3 * 7, found, cache_write_tokens=10 - found, cache_write_1h_tokens=kept)
        assert price.cost_nusd(usage) <= claim.amount(7) == price.max_cost_nusd(10, 3 * 7)


ALL = [limit("*", kind, 1000) for kind in LimitKind]
USED = Usage(10, 25, 4)


@pytest.mark.parametrize(
    ("usage", "outcome", "expected"),
    [
        (USED, Outcome.FINISHED, (1, 35, 10, 25)),
        (USED, Outcome.CANCELLED, (1, 35, 10, 25)),
        (USED, Outcome.FAILED, (1, 35, 10, 25)),
        (Usage(0, 0), Outcome.FAILED, (1, 0, 0, 0)),
        (Usage(0, 0), Outcome.REFUSED, (0, 0, 0, 0)),
    ],
)
def test_charges(usage, outcome, expected):
    demand = make_demand(watched_counters(rules_for(ALICE.subjects, Limits(*ALL), "tiny")), PRICE, day_at(SATURDAY_S))
    taken = {name.split("|")[0]: value for name, value in rate_amounts(demand, usage, outcome).items()}
    rates = ("requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")
    assert tuple(taken.pop(name, 0) for name in rates) == expected
    assert not taken, "what was held is given back whole"
    assert len(demand.budgets) == 4
    assert all(name.startswith("usd_") for name in demand.budgets)


def test_what_a_replica_refuses_counts_as_a_request():
    demand = make_demand(watched_counters(rules_for(ALICE.subjects, Limits(*ALL), "tiny")), PRICE, day_at(SATURDAY_S))
    taken = rate_amounts(demand, Usage(0, 0), Outcome.REFUSED, was_dispatched=True)
    assert taken == {"requests_per_minute|*|*": 1}


def test_a_fallback_is_not_counted_again():
    limits = [*ALL, limit("*", "requests_per_minute", 7, model="tiny"), limit("*", "usd_total", 5, hard=False)]
    rules = watched_counters(rules_for(ALICE.subjects, Limits(*limits), "tiny"))
    demand = make_demand(rules, PRICE, day_at(SATURDAY_S))
    again = demand.without_request_rates()
    assert {claim.counter for claim in demand.claims} - {claim.counter for claim in again.claims} == {
        "requests_per_minute|*|*"
    }
    assert "requests_per_minute|*|tiny" in {claim.counter for claim in again.rates}
    assert [limit.kind for limit in (rule.limit for rule in again.rules)] == [
        rule.limit.kind for rule, claim in zip(demand.rules, demand.claims, strict=True) if claim in again.claims
    ]
    (index, _), *_ = again.soft
    assert again.claims[index].counter == demand.claims[demand.soft[0][0]].counter
    assert again.budgets == demand.budgets


def test_what_is_held_of_rates_is_what_was_reserved():
    demand = make_demand(watched_counters(rules_for(ALICE.subjects, Limits(*ALL), "tiny")), PRICE, day_at(SATURDAY_S))
    held = {name.split("|")[0]: value for name, value in reserved_amounts(demand, RequestSize(0, 3), 7).items()}
    assert held == {"requests_per_minute": 1, "tokens_per_minute": 21, "output_tokens_per_minute": 21}
