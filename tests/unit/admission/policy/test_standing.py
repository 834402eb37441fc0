"""Which rate is the tightest."""

from maitred.admission.policy.claims import demand_of
from maitred.admission.policy.rules import Rule
from maitred.admission.policy.standing import standing_of
from maitred.admission.policy.watches import watches_of
from maitred.core.answer import Standing
from maitred.core.counters import Reading
from maitred.core.money import Price
from tests.admission_desk import limit


def standing(*readings):
    rules = [Rule(f"key:{number}", limit("*", kind, capacity)) for number, (kind, capacity, _) in enumerate(readings)]
    claims = demand_of(watches_of(rules), Price(1, 1, 1), 0).claims
    return standing_of(claims, [Reading(capacity, remaining, 1.0) for _, capacity, remaining in readings])


def test_requests_by_what_is_left():
    found = standing(("requests_per_minute", 1000, 30), ("requests_per_minute", 20, 15))
    assert found == Standing(requests=Reading(20, 15, 1.0))


def test_tokens_by_the_share_that_is_left():
    found = standing(
        ("tokens_per_minute", 1000, 500), ("input_tokens_per_minute", 100, 60), ("output_tokens_per_minute", 9000, 900)
    )
    assert found == Standing(tokens=Reading(9000, 900, 1.0))


def test_a_limit_of_nothing_is_the_tightest():
    assert standing(("tokens_per_minute", 9, 1), ("tokens_per_minute", 0, 0)) == Standing(tokens=Reading(0, 0, 1.0))


def test_both_sorts():
    found = standing(("requests_per_minute", 5, 5), ("tokens_per_minute", 6, 6))
    assert found == Standing(Reading(5, 5, 1.0), Reading(6, 6, 1.0))


def test_only_rates_are_shown():
    assert standing(("usd_per_day", 5, 5), ("concurrent_requests", 5, 5), ("concurrent_tokens", 5, 5)) is None
    assert standing() is None
