"""What limits and prices come to for a caller is kept as long as they stay the same, and no longer."""

import msgspec

from maitred.admission import limit_plans as plans
from maitred.admission.config import PriceConfig
from maitred.admission.limit_plans import LimitPlanCache, PerRequestLimits
from maitred.admission.policy.rules import LimitRule
from maitred.admission.prices import PriceList
from tests.support.admission_services import ALICE, BOB, SATURDAY_S, limit

PRICES = PriceList({"*": PriceConfig(prompt=1.0, output=2.0), "free": PriceConfig()})


class Book:
    """Pages that are replaced, never changed."""

    def __init__(self):
        self.pages, self.edition, self.asked = {}, 0, 0

    def write(self, subject, *limits):
        self.pages[subject] = tuple(limits)
        self.edition += 1

    def limits_of(self, subject):
        self.asked += 1
        return self.pages.get(subject, ())


def counters(plan):
    return [claim.counter for claim in plan.demand.claims]


def test_what_holds_is_found_from_the_narrowest_subject_to_the_widest():
    book = Book()
    everywhere, each, own = (
        limit("*", "requests_per_minute", 9),
        limit("tenant:*", "usd_per_day", 7),
        limit("key:alice", "output_tokens", 5),
    )
    for own_limit in (everywhere, each, own):
        book.write(own_limit.subject, own_limit)
    plan = LimitPlanCache(book, PRICES).plan_for(ALICE, "tiny", SATURDAY_S)
    assert plan.bounds == PerRequestLimits(None, LimitRule("key:alice", own))
    assert counters(plan) == [
        "usd_per_day|tenant:team|*|2026-11-21",
        "usd_per_day|tenant:acme|*|2026-11-21",
        "requests_per_minute|*|*",
    ]
    assert plan.demand.budgets == tuple(counters(plan)[:2])
    assert plan.demand.rates == plan.demand.claims[2:]


def hits(kept, wall_s=SATURDAY_S):
    return kept.plan_for(ALICE, "tiny", wall_s, is_cached=True)


def test_answers_from_a_cache_have_plans_of_their_own():
    book = Book()
    kinds = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "concurrent_tokens", "usd_total")
    book.write("*", *(limit("*", kind, 9) for kind in kinds), limit("*", "output_tokens", 5))
    prices = PriceList({"*": PriceConfig(prompt=1.0, hit=0.1)})
    computed = LimitPlanCache(book, PRICES).plan_for(ALICE, "tiny", SATURDAY_S)
    requests = ["requests_per_minute|*|*", "concurrent_requests|*|*"]
    assert counters(hits(LimitPlanCache(book, PRICES))) == requests
    assert counters(hits(LimitPlanCache(book, prices))) == [*requests, "usd_total|*|*|total"]
    assert counters(hits(LimitPlanCache(book, prices, "all"))) == counters(computed)
    assert counters(hits(LimitPlanCache(book, prices, "none"))) == []
    for counted in ("none", "requests", "all"):
        kept = LimitPlanCache(book, prices, counted)
        assert hits(kept).bounds == computed.bounds
        assert hits(kept) is hits(kept) is not kept.plan_for(ALICE, "tiny", SATURDAY_S)


def test_a_plan_is_made_once_as_long_as_limits_stay_the_same():
    book = Book()
    book.write("key:alice", limit("key:alice", "requests_per_minute", 9))
    kept = LimitPlanCache(book, PRICES)
    first = kept.plan_for(ALICE, "tiny", SATURDAY_S)
    asked = book.asked
    assert kept.plan_for(msgspec.structs.replace(ALICE), "tiny", SATURDAY_S) is first
    assert book.asked == asked


def test_a_changed_limit_holds_for_the_next_request():
    book = Book()
    kept = LimitPlanCache(book, PRICES)
    assert not kept.plan_for(ALICE, "tiny", SATURDAY_S).demand.claims
    for subject in ("key:alice", "key:*", "tenant:*"):
        for value in (9, 8):
            book.write(subject, limit(subject, "requests_per_minute", value))
            assert value in [claim.capacity for claim in kept.plan_for(ALICE, "tiny", SATURDAY_S).demand.claims]
        book.write(subject)
        assert not kept.plan_for(ALICE, "tiny", SATURDAY_S).demand.claims


def test_another_day_has_other_windows():
    book = Book()
    book.write("*", limit("*", "usd_per_day", 9))
    kept = LimitPlanCache(book, PRICES)
    days = [0, 1, 0]
    named = [counters(kept.plan_for(ALICE, "tiny", SATURDAY_S + day * 86_400)) for day in days]
    assert named == [[f"usd_per_day|*|*|2026-11-2{1 + day}"] for day in days]


def test_each_model_and_caller_has_its_own_plan():
    book = Book()
    book.write("*", limit("*", "requests_per_minute", 9, model="tiny"))
    book.write("key:bob", limit("key:bob", "requests_per_minute", 9))
    kept = LimitPlanCache(book, PRICES)
    assert [len(kept.plan_for(ALICE, model, SATURDAY_S).demand.claims) for model in ("tiny", "large", "tiny")] == [
        1,
        0,
        1,
    ]
    assert [len(kept.plan_for(who, "tiny", SATURDAY_S).demand.claims) for who in (ALICE, BOB)] == [1, 2]


def test_prices_are_those_of_the_model(caplog):
    book = Book()
    book.write("*", limit("*", "usd_total", 9))
    kept = LimitPlanCache(book, PRICES)
    (claim,) = kept.plan_for(ALICE, "tiny", SATURDAY_S).demand.claims
    price = PRICES.price_for("tiny").price
    assert (claim.fixed, claim.per_prompt, claim.per_output) == (0, price.prompt, price.output)
    for who in (ALICE, BOB):
        assert not kept.plan_for(who, "free", SATURDAY_S).demand.claims
    assert caplog.text.count("no price") == 1


def test_only_so_many_plans_are_kept(monkeypatch):
    monkeypatch.setattr(plans, "_MOST_KEPT", 3)
    book = Book()
    kept = LimitPlanCache(book, PRICES)
    for number in (*range(10), 0):
        caller = msgspec.structs.replace(ALICE, key=str(number))
        book.write(f"key:{number}", limit(f"key:{number}", "requests_per_minute", number))
        (claim,) = kept.plan_for(caller, "tiny", SATURDAY_S).demand.claims
        assert claim.capacity == number
    assert len(kept._plans) == 3
