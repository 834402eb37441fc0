"""Requests whose answers come from a cache: what they reserve, what they cost, and what their lines say."""

import asyncio
from contextlib import suppress

import pytest

from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import (
    CachedAnswerTooLong,
    ContextLengthExceeded,
    QuotaExceeded,
    RateLimited,
    ReplicaLost,
    StoreUnavailable,
)
from maitred.core.request import Usage
from maitred.core.timeline import SpanName
from tests.support.admission_services import AdmissionSetup, limit

PRICE = {"prompt": 1.0, "cached": 0.1, "output": 2.0, "hit": 0.5}
REQUESTS, TOKENS = "requests_per_minute|*|*", "tokens_per_minute|*|*"
BUDGET = "usd_total|tenant:acme|*|total"
HIT = {"cache": "exact", "cached_tokens": 20}
ANSWER = Usage(10, 20, 4, cache_write_tokens=2)
"""The usage of the answer when it was computed."""


def make_setup(*limits, price=None, **config):
    rates = limit("*", "requests_per_minute", 10), limit("*", "tokens_per_minute", 1000)
    return AdmissionSetup(*rates, limit("tenant:acme", "usd_total", 10**9), *limits, price=price, **config)


async def test_the_line_says_what_was_saved_and_nothing_was_computed():
    setup = make_setup()
    async with setup.admit(10, 100, **HIT) as grant:
        assert (grant.max_tokens, grant.clamped) == (20, False)
        await grant.settle(ANSWER, Outcome.FINISHED)
    (event,) = setup.ledger.events
    assert (event.cache, event.saved_tokens) == ("exact", 30)
    assert (event.prompt_tokens, event.cached_tokens, event.output_tokens, event.cache_write_tokens) == (0, 0, 0, 0)
    assert (event.price, event.cost_nusd, event.charges, event.taken) == ("", 0, {}, {REQUESTS: 1})
    (begun,) = setup.ledger.begun
    assert (begun.cache, begun.prompt_tokens, begun.taken) == ("exact", 0, {REQUESTS: 1})


@pytest.mark.parametrize(
    ("counted", "reserved", "taken"),
    [
        ("none", {}, {}),
        ("requests", {REQUESTS: 1}, {REQUESTS: 1}),
        ("all", {REQUESTS: 1, TOKENS: 30}, {REQUESTS: 1, TOKENS: 30}),
    ],
)
async def test_the_operator_says_which_limits_count_it(counted, reserved, taken):
    setup = make_setup(price=PRICE, cached_answers=counted)
    async with setup.admit(10, 100, **HIT) as grant:
        assert setup.ledger.begun[0].taken == reserved
        assert setup.admission.leases.active == int(counted != "none")
        await grant.settle(ANSWER, Outcome.FINISHED)
    (event,) = setup.ledger.events
    assert event.taken == taken
    assert (event.price, event.cost_nusd) == ("0.5 USD per million", 30 * 500)
    assert event.charges == ({} if counted == "none" else {BUDGET: 30 * 500})


async def test_limits_on_tokens_that_are_used_up_refuse_no_answer_from_a_cache():
    setup = AdmissionSetup(limit("*", "tokens_per_minute", 100), limit("*", "concurrent_requests", 2))
    async with setup.admit(10, 90), setup.admit(10, 90, **HIT):
        with pytest.raises(RateLimited, match="requests"):
            async with setup.admit(10, 90, **HIT):
                pass


async def test_a_budget_counts_the_price_of_hits_alone():
    setup = AdmissionSetup(limit("*", "usd_total", 30 * 500), price={"prompt": 0.0, "hit": 0.5})
    async with setup.admit(10, 100):
        assert setup.admission.leases.active == 0, "computed answers are free"
    async with setup.admit(10, 100, **HIT) as grant:
        assert setup.admission.leases.active == 1
        await grant.settle(ANSWER, Outcome.FINISHED)
    assert [event.cost_nusd for event in setup.ledger.events] == [0, 30 * 500]


async def test_what_a_budget_has_too_little_left_for_is_computed_shorter():
    setup = AdmissionSetup(limit("*", "usd_total", 25 * 500), price=PRICE, least_output_tokens=1)
    with pytest.raises(CachedAnswerTooLong):
        await setup.admission.admit(setup.request(10, 100, **HIT))
    async with setup.admit(10, 100) as grant:
        assert (grant.max_tokens, grant.clamped) == (1, True)
    assert [event.cache for event in setup.ledger.events] == [""], "the hit holds nothing and leaves no line"
    with pytest.raises(QuotaExceeded):
        await setup.admission.admit(setup.request(1000, 100))


async def test_a_bill_is_at_most_what_was_reserved():
    setup = make_setup(price=PRICE)
    async with setup.admit(10, 100, choices=2, **HIT) as grant:
        await grant.settle(Usage(500, 500), Outcome.FINISHED)
    assert setup.ledger.events[0].cost_nusd == (10 + 2 * 20) * 500


async def test_an_answer_that_is_too_long_for_its_caller_is_not_served():
    setup = make_setup(limit("*", "output_tokens", 19))
    with pytest.raises(CachedAnswerTooLong):
        await setup.admission.admit(setup.request(10, 100, **HIT))
    with pytest.raises(CachedAnswerTooLong):
        await setup.admission.admit(setup.request(10, 100, cache="exact", cached_tokens=101))
    with pytest.raises(CachedAnswerTooLong):
        await setup.admission.admit(setup.request(10, None, window_left=15, **HIT))
    async with setup.admit(10, 100, cache="exact", cached_tokens=19) as grant:
        assert (grant.max_tokens, grant.clamped) == (19, False)
    assert len(setup.ledger.begun) == 1


@pytest.mark.parametrize("counted", ["none", "requests", "all"])
async def test_a_limit_on_the_context_holds_always(counted):
    setup = AdmissionSetup(limit("*", "context_tokens", 50), cached_answers=counted)
    with pytest.raises(ContextLengthExceeded):
        await setup.admission.admit(setup.request(45, 10, cache="exact", cached_tokens=5))


@pytest.mark.parametrize(
    ("error", "outcome", "cost_nusd"),
    [(asyncio.CancelledError(), Outcome.CANCELLED, 15 * 500), (ReplicaLost(), Outcome.FAILED, 0)],
)
async def test_who_leaves_pays_for_what_was_sent(error, outcome, cost_nusd):
    setup = make_setup(price=PRICE)
    with suppress(type(error)):
        async with setup.admit(10, 100, **HIT) as grant:
            grant.record_usage(Usage(10, 5))
            raise error
    (event,) = setup.ledger.events
    assert (event.outcome, event.cost_nusd, event.saved_tokens) == (outcome, cost_nusd, 15)
    assert (event.prompt_tokens, event.output_tokens) == (0, 0)


async def test_a_second_settlement_changes_nothing():
    setup = make_setup(price=PRICE)
    async with setup.admit(10, 100, **HIT) as grant:
        await grant.settle(ANSWER, Outcome.FINISHED)
        await grant.settle(Usage(10, 5), Outcome.FINISHED)
    (event,) = setup.ledger.events
    assert event.saved_tokens == 30


async def test_a_hit_that_moved_from_another_model_is_one_request():
    setup = make_setup()
    context = RequestContext("req-1", started_s=1000.0, route="chat")
    async with setup.admit(10, 100, is_counted=True, context=context, **HIT) as grant:
        await grant.settle(ANSWER, Outcome.FINISHED)
    assert setup.ledger.events[0].taken == {}


async def test_the_timeline_says_which_cache_had_the_answer():
    setup = make_setup()
    context = RequestContext("req-1", started_s=1000.0, route="chat")
    async with setup.admit(10, 100, context=context, **HIT) as grant:
        await grant.settle(ANSWER, Outcome.FINISHED)
    (span,) = [span for span in context.timeline.spans if span.name is SpanName.SETTLEMENT]
    assert (span.facts["cache"], span.facts["saved_tokens"], span.facts["output_tokens"]) == ("exact", 30, 0)


async def test_a_hit_of_a_dead_process_is_reserved_again():
    setup = make_setup(price=PRICE)
    setup.counters.settles_immediately = True
    async with await setup.admission.resume(setup.request(10, 100, **HIT), "use-1", 20) as grant:
        (state,) = await setup.admission.budgets("tenant:acme")
        assert (state.charged, state.reserved) == (0, 30 * 500)
        await grant.settle(ANSWER, Outcome.FINISHED)
    (event,) = setup.ledger.events
    assert (event.id, event.cache, event.cost_nusd) == ("use-1", "exact", 30 * 500)


SHARED = {"cache": "coalesced", "cached_tokens": 20, "bill": b"an answer"}


async def test_a_request_that_could_not_begin_has_no_share_of_a_bill():
    setup = make_setup()
    async with setup.admit(10, 20, bill=b"an answer") as first:
        setup.ledger.away = True
        with pytest.raises(StoreUnavailable):
            async with setup.admit(10, 20, **SHARED):
                pass
        setup.ledger.away = False
        await first.settle(ANSWER, Outcome.FINISHED)
    (event,) = setup.ledger.events
    assert (event.prompt_tokens, event.output_tokens) == (10, 20)


async def test_who_has_read_less_than_its_share_has_saved_nothing():
    setup, context = make_setup(), RequestContext("req-1", 0.0, stored_as="resp_1")
    with suppress(asyncio.CancelledError):
        async with setup.admit(10, 20, bill=b"an answer") as first, setup.admit(10, 20, **SHARED, context=context):
            await first.settle(ANSWER, Outcome.FINISHED)
            context.set_usage(Usage(10, 1))
            raise asyncio.CancelledError
    events = setup.ledger.events
    assert [event.saved_tokens for event in events] == [0, 0]
    assert sum(event.output_tokens for event in events) == 20
