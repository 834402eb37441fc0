"""Which rate is the tightest."""

from maitred.admission.limit_status import rate_limit_status
from maitred.admission.policy.claims import make_demand, watched_counters
from maitred.admission.policy.rules import LimitRule
from maitred.core.context import RateLimitStatus
from maitred.core.counters import CounterState
from maitred.core.usage import Price
from tests.support.admission_services import limit


def standing(*readings):
    rules = [
        LimitRule(f"key:{number}", limit("*", kind, capacity)) for number, (kind, capacity, _) in enumerate(readings)
    ]
    claims = make_demand(watched_counters(rules), Price(1, 1, 1), 0).claims
    return rate_limit_status(claims, [CounterState(capacity, remaining, 1.0) for _, capacity, remaining in readings])


def test_requests_by_what_is_left():
    found = standing(("requests_per_minute", 1000, 30), ("requests_per_minute", 20, 15))
    assert found == RateLimitStatus(requests=CounterState(20, 15, 1.0))


def test_tokens_by_the_share_that_is_left():
    found = standing(
        ("tokens_per_minute", 1000, 500), ("input_tokens_per_minute", 100, 60), ("output_tokens_per_minute", 9000, 900)
    )
    assert found == RateLimitStatus(tokens=CounterState(9000, 900, 1.0))


def test_a_limit_of_nothing_is_the_tightest():
    assert standing(("tokens_per_minute", 9, 1), ("tokens_per_minute", 0, 0)) == RateLimitStatus(
        tokens=CounterState(0, 0, 1.0)
    )


def test_both_sorts():
    found = standing(("requests_per_minute", 5, 5), ("tokens_per_minute", 6, 6))
    assert found == RateLimitStatus(CounterState(5, 5, 1.0), CounterState(6, 6, 1.0))


def test_only_rates_are_shown():
    assert standing(("usd_per_day", 5, 5), ("concurrent_requests", 5, 5), ("concurrent_tokens", 5, 5)) is None
    assert standing() is None
