"""What a refusal says, and when it tells to come back."""

import pytest

from maitred.admission.policy.claims import day_at, make_demand, watched_counters
from maitred.admission.policy.refusal import RequestedTokens, make_refusal, span
from maitred.admission.policy.rules import LimitRule
from maitred.core.counters import CounterState, RequestSize, ReservationDenied
from maitred.core.errors import QuotaExceeded, RateLimited
from maitred.core.limits import LimitKind
from maitred.core.usage import NANO, Price
from tests.support.admission_services import SATURDAY_S, limit

DOLLAR_PER_THOUSAND = Price.per_million_usd(1000.0, None, 1000.0)


def refused(kind, value, *, used, reserved=0, reset_s=30.0, retry_s=12.0, asked=None, subject="tenant:acme", **others):
    """The refusal of 10 prompt tokens and two choices with 5 tokens each, content with 2."""
    rule = LimitRule(subject, limit(subject, kind, value, **others))
    demand = make_demand(watched_counters([rule]), DOLLAR_PER_THOUSAND, day_at(SATURDAY_S)).claims_for(
        RequestSize(10, 2)
    )
    capacity = demand.claims[0].capacity
    reading = CounterState(capacity, capacity - used - reserved, reset_s, used, reserved)
    return make_refusal(demand, ReservationDenied(0, [reading], retry_s), asked or RequestedTokens(5, 2), 0.5)


@pytest.mark.parametrize(
    ("kind", "value", "used", "message"),
    [
        (
            "requests_per_minute",
            60,
            60,
            "Rate limit reached: tenant acme may use 60 requests per minute. 60 are used, 0 are left, this request "
            "needs 1. Unused, all of it is free again in 30 s. Come back in 13 s, when it is your turn.",
        ),
        (
            "tokens_per_minute",
            6000,
            5990,
            "Rate limit reached: tenant acme may use 6,000 tokens per minute. 5,990 are used, 10 are left, this "
            "request needs 20. Unused, all of it is free again in 30 s. Come back in 13 s, when it is your turn, "
            "or ask for less with max_tokens.",
        ),
        (
            "input_tokens_per_minute",
            10,
            15,
            "Rate limit reached: tenant acme may use 10 input tokens per minute. 15 are used, 0 are left, this request "
            "needs 10. Unused, all of it is free again in 30 s. Come back in 13 s, when it is your turn.",
        ),
        (
            "output_tokens_per_minute",
            10,
            1,
            "Rate limit reached: tenant acme may use 10 output tokens per minute. 1 are used, 9 are left, this request "
            "needs 10. Unused, all of it is free again in 30 s. Come back in 13 s, when it is your turn, "
            "or ask for less with max_tokens.",
        ),
    ],
)
def test_rates(kind, value, used, message):
    error = refused(kind, value, used=used)
    assert type(error) is RateLimited
    assert error.message == message
    assert error.retry_after_s == pytest.approx(12.6)
    assert (error.subject, error.limit, error.value) == ("tenant:acme", kind, value)
    assert error.counter_state.used == used


@pytest.mark.parametrize(
    ("kind", "value", "used", "message"),
    [
        (
            "concurrent_requests",
            4,
            4,
            "Too much at one time: tenant acme may use 4 requests at one time. 4 are used, 0 are left, this request "
            "needs 1. Come back when a request that runs has ended.",
        ),
        (
            "concurrent_tokens",
            40,
            30,
            "Too much at one time: tenant acme may use 40 tokens at one time. 30 are used, 10 are left, this request "
            "needs 14. Come back when a request that runs has ended, or ask for less with max_tokens.",
        ),
    ],
)
def test_places(kind, value, used, message):
    error = refused(kind, value, used=used, retry_s=None)
    assert type(error) is RateLimited
    assert error.message == message
    assert error.retry_after_s == pytest.approx(1.05)


@pytest.mark.parametrize(
    ("kind", "ends", "remedy"),
    [
        ("usd_per_day", "per day", "The budget renews itself in 9 hours; wait for that, or have it raised."),
        ("usd_per_week", "per week", "The budget renews itself in 9 hours; wait for that, or have it raised."),
        ("usd_per_month", "per month", "The budget renews itself in 9 hours; wait for that, or have it raised."),
        ("usd_total", "in all", "Ask for a shorter answer, or have the budget raised."),
    ],
)
def test_budgets(kind, ends, remedy):
    error = refused(kind, 5 * NANO, used=4_990_000_000, reset_s=9 * 3600)
    assert type(error) is QuotaExceeded
    assert error.message == (
        f"Budget used up: tenant acme may use $5.00 {ends}. $4.99 are spent, $0.01 are left, too little for this "
        f"request. {remedy}"
    )
    assert error.retry_after_s == (None if kind == "usd_total" else pytest.approx(9 * 3600 * 1.05))


def test_a_budget_that_others_hold_is_not_used_up():
    error = refused("usd_per_day", 5 * NANO, used=1 * NANO, reserved=3_999_000_000, retry_s=None)
    assert type(error) is RateLimited
    assert error.limit == "usd_per_day"
    assert "$1.00 are spent, and $3.999 are held" in error.message
    assert error.retry_after_s == pytest.approx(1.05)


def test_a_budget_smaller_than_the_request_is_not_worth_waiting_for():
    error = refused("usd_per_day", 13_999_999, used=0)
    assert type(error) is QuotaExceeded
    assert error.retry_after_s is None
    assert "shorter answer" in error.message


@pytest.mark.parametrize(
    ("kind", "value", "asked", "others", "message"),
    [
        (
            "tokens_per_minute",
            19,
            RequestedTokens(5, 2),
            {},
            "Request too large: it may need 20 tokens, but tenant acme may use 19 tokens per minute. Lower max_tokens "
            "to at most 4, or shorten the prompt.",
        ),
        (
            "tokens_per_minute",
            600,
            RequestedTokens(5, 2, named=False),
            {"burst": 19},
            "Request too large: it may need 20 tokens, but tenant acme may use 600 tokens per minute, and at most 19 "
            "tokens at once. Name a max_tokens of at most 4, or shorten the prompt.",
        ),
        (
            "output_tokens_per_minute",
            9,
            RequestedTokens(5, 2, param="max_completion_tokens"),
            {"model": "tiny"},
            "Request too large: it may need 10 output tokens, but tenant acme may use 9 output tokens per minute of "
            "tiny. Lower max_completion_tokens to at most 4.",
        ),
        (
            "input_tokens_per_minute",
            9,
            RequestedTokens(5, 2),
            {},
            "Request too large: it may need 10 input tokens, but tenant acme may use 9 input tokens per minute. "
            "Shorten the prompt, or have the limit raised.",
        ),
        (
            "tokens_per_minute",
            10,
            RequestedTokens(5, 2),
            {},
            "Request too large: it may need 20 tokens, but tenant acme may use 10 tokens per minute. Shorten the "
            "prompt, or have the limit raised.",
        ),
        (
            "requests_per_minute",
            0,
            RequestedTokens(5, 2),
            {},
            "Request too large: it may need 1 request, but tenant acme may use 0 requests per minute. No request fits "
            "this limit: have it raised.",
        ),
        (
            "concurrent_tokens",
            13,
            RequestedTokens(5, 2),
            {},
            "Request too large: it may need 14 tokens, but tenant acme may use 13 tokens at one time. Lower max_tokens "
            "to at most 1, or shorten the prompt.",
        ),
    ],
)
def test_what_never_fits_is_not_worth_a_retry(kind, value, asked, others, message):
    error = refused(kind, value, used=0, retry_s=None, asked=asked, **others)
    assert type(error) is RateLimited
    assert error.retry_after_s is None
    assert error.message == message


@pytest.mark.parametrize("kind", [kind for kind in LimitKind if kind.per_minute or kind.concurrent or kind.spend])
def test_every_refusal_is_a_sentence_that_names_the_limit(kind):
    error = refused(kind.value, 4_000_000 if kind.spend else 20, used=19, subject="*")
    assert "this installation may use" in error.message
    assert error.message.endswith(".")
    assert error.subject == "*"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.02, "20 ms"), (1.0, "1 s"), (119.5, "120 s"), (121, "3 minutes"), (7199, "120 minutes"),
     (7201, "3 hours"), (200_000, "3 days")],
)  # fmt: skip
def test_times_are_rounded_up(seconds, text):
    assert span(seconds) == text
