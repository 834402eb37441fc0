"""Reserve, clamp, settle, seen from outside."""
# ruff: noqa: PT012 - the block is what is tested

import asyncio

import pytest

from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.core.context import Outcome, RequestContext
from maitred.core.errors import (
    ContextLengthExceeded,
    Draining,
    QuotaExceeded,
    RateLimited,
    ReplicaLost,
    ReplicaUnavailable,
    StoreUnavailable,
)
from maitred.core.request import Usage
from maitred.core.usage import NANO, UsageEvent
from tests.support.admission_services import ALICE, BOB, SATURDAY_S, AdmissionSetup, limit

DAY = "usd_per_day|tenant:acme|*|2026-11-21"


async def reading(setup, subject="tenant:acme"):
    """Charged and reserved of the only budget of a subject."""
    (state,) = await setup.admission.budgets(subject)
    return state.charged, state.reserved


async def left(setup, kind):
    status = await setup.admission.rate_limit_status(setup.request().principal, "tiny")
    return getattr(status, kind).remaining


# --- without limits -------------------------------------------------------------------------------------------------


async def test_without_limits_only_the_ledger_hears_of_a_request():
    setup = AdmissionSetup()
    async with setup.admit(10, 100) as grant:
        assert (grant.max_tokens, grant.clamped, grant.rate_limits) == (100, False, None)
        assert setup.admission.leases.active == 0
        setup.clock.now_s = 2.5
        grant.replica = "r1"
        await grant.settle(Usage(10, 7, 4), Outcome.FINISHED)
    assert setup.counters.settled == []
    (event,) = setup.ledger.events
    assert event == UsageEvent(
        id=grant.lease,
        request_id="req-1",
        time_s=SATURDAY_S + 2.5,
        key="alice",
        tenant="team",
        organisation="acme",
        model="tiny",
        replica="r1",
        route="/v1/chat/completions",
        prompt_tokens=10,
        cached_tokens=4,
        output_tokens=7,
        price="1/0.1/2 USD per million",
        cost_nusd=6_000 + 400 + 14_000,
        duration_s=2.5,
        outcome=Outcome.FINISHED,
    )
    (begun,) = setup.ledger.begun
    assert (begun.id, begun.outcome, begun.prompt_tokens, begun.cost_nusd) == (event.id, Outcome.FAILED, 10, 0)


async def test_a_grant_of_a_dead_process_is_reserved_again_even_beyond_the_limit():
    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", 200_000))
    setup.counters.settles_immediately = True
    async with await setup.admission.resume(setup.request(10, 100), "use-1", 100) as grant:
        assert (grant.lease, grant.max_tokens) == ("use-1", 100)
        assert await reading(setup) == (0, 210_000)  # more than there is
        with pytest.raises(RateLimited):
            async with setup.admit(10, 100):
                pass
        await grant.settle(Usage(10, 7), Outcome.FINISHED)
    assert await reading(setup) == (24_000, 0)
    assert [event.id for event in setup.ledger.events] == ["use-1"]
    assert "use-1" not in [event.id for event in setup.ledger.begun]  # it was begun before


async def test_every_use_has_an_id_of_its_own():
    setup = AdmissionSetup()
    for _ in range(3):
        async with setup.admit():
            pass
    assert len({event.id for event in setup.ledger.events}) == 3


async def test_the_default_length():
    setup = AdmissionSetup(default_output_tokens=64)
    async with setup.admit(10, None) as grant:
        assert (grant.max_tokens, grant.clamped) == (64, False)


async def test_prices_are_by_model():
    setup = AdmissionSetup(price={"prompt": 0})
    async with setup.admit() as grant:
        await grant.settle(Usage(10, 5), Outcome.FINISHED)
    assert (setup.ledger.events[0].price, setup.ledger.events[0].cost_nusd) == ("", 0)


# --- limits ---------------------------------------------------------------------------------------------------------

CASES = [
    # a limit, what a first request with 10 + 100 tokens leaves while it runs, and what after it used 10 + 5
    (limit("tenant:acme", "requests_per_minute", 10), "requests", 9, 9),
    (limit("key:*", "requests_per_minute", 10), "requests", 9, 9),
    (limit("tenant:*", "tokens_per_minute", 1000), "tokens", 890, 985),
    (limit("*", "input_tokens_per_minute", 1000), "tokens", 990, 990),
    (limit("*", "output_tokens_per_minute", 1000, model="tiny"), "tokens", 900, 995),
]


@pytest.mark.parametrize(("rate", "kind", "running", "after"), CASES)
async def test_rates_take_what_may_be_used_and_keep_what_was(rate, kind, running, after):
    setup = AdmissionSetup(rate)
    async with setup.admit(10, 100) as grant:
        assert getattr(grant.rate_limits, kind).remaining == running == await left(setup, kind)
        await grant.settle(Usage(10, 5), Outcome.FINISHED)
    assert await left(setup, kind) == after


async def test_a_budget_without_prices_counts_nothing_and_says_so_once(caplog):
    setup = AdmissionSetup(
        limit("tenant:acme", "usd_total", 1), limit("key:alice", "requests_per_minute", 60), price={"prompt": 0}
    )
    for _ in range(3):
        async with setup.admit() as grant:
            assert not grant.clamped
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "tiny" in warning
    assert "admission.prices" in warning


async def test_who_is_refused_gets_a_turn_of_their_own():
    setup = AdmissionSetup(limit("key:alice", "requests_per_minute", 60, burst=1))
    async with setup.admit():
        pass
    waits = []
    for _ in range(3):
        with pytest.raises(RateLimited) as caught:
            async with setup.admit():
                pass
        waits.append(caught.value.retry_after_s)
    assert waits == pytest.approx([1.05, 2.1, 3.15], abs=1e-3)


async def test_a_rate_refuses_and_refills():
    setup = AdmissionSetup(limit("key:alice", "requests_per_minute", 60, burst=1))
    async with setup.admit():
        pass
    context = RequestContext("req-1", 0.0)
    with pytest.raises(RateLimited, match="key alice may use 60 requests per minute") as caught:
        async with setup.admit(context=context):
            pass
    assert caught.value.retry_after_s == pytest.approx(1.05, abs=1e-4)
    assert context.rate_limits is not None
    assert context.rate_limits.requests is not None
    assert (context.rate_limits.requests.capacity, context.rate_limits.requests.remaining) == (1, 0)
    assert len(setup.ledger.events) == len(setup.ledger.begun) == 1, "a refusal is not in the ledger"
    setup.clock.now_s = 1.0
    async with setup.admit():
        pass


async def test_concurrency_is_held_while_a_request_runs():
    setup = AdmissionSetup(limit("tenant:acme", "concurrent_requests", 1))
    async with setup.admit():
        with pytest.raises(RateLimited, match="1 request at one time"):
            async with setup.admit(principal=BOB):
                pass
        assert setup.admission.leases.active == 1
    assert setup.admission.leases.active == 0
    async with setup.admit(principal=BOB):
        pass


async def test_each_key_by_itself():
    setup = AdmissionSetup(limit("key:*", "concurrent_requests", 1))
    async with setup.admit(), setup.admit(principal=BOB):
        with pytest.raises(RateLimited):
            async with setup.admit():
                pass


async def test_tokens_at_one_time_lower_the_length():
    setup = AdmissionSetup(limit("*", "concurrent_tokens", 150))
    context = RequestContext("req-1", 0.0)
    async with setup.admit(10, 100):
        async with setup.admit(10, 100, context=context) as second:
            assert (second.max_tokens, second.clamped, context.clamped_max_tokens) == (30, True, 30)
        with pytest.raises(RateLimited):
            async with setup.admit(30, 100):
                pass


async def test_rates_lower_no_length():
    setup = AdmissionSetup(limit("*", "tokens_per_minute", 150))
    async with setup.admit(10, 100):
        with pytest.raises(RateLimited, match="150 tokens per minute"):
            async with setup.admit(10, 100):
                pass
    with pytest.raises(RateLimited, match="Request too large") as caught:
        async with setup.admit(10, 141):
            pass
    assert caught.value.retry_after_s is None


async def test_a_budget_is_charged_what_was_used():
    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", NANO))
    async with setup.admit(10, 100) as grant:
        assert await reading(setup) == (0, 210_000)
        await grant.settle(Usage(10, 5, 10), Outcome.FINISHED)
        assert await reading(setup) == (11_000, 0)
    assert setup.ledger.events[0].cost_nusd == 11_000
    assert setup.ledger.events[0].charges == {DAY: 11_000}


async def test_a_budget_lowers_the_length_to_what_is_left():
    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", 110_000))
    context = RequestContext("req-1", 0.0)
    async with setup.admit(10, 100, choices=2, context=context) as grant:
        assert (grant.max_tokens, grant.clamped, context.clamped_max_tokens) == (25, True, 25)
        await grant.settle(Usage(10, 50), Outcome.FINISHED)
    assert await reading(setup) == (110_000, 0)
    with pytest.raises(QuotaExceeded, match=r"tenant acme may use \$0.00011 per day"):
        async with setup.admit(10, 100):
            pass


@pytest.mark.parametrize(
    ("least", "min_tokens", "asked", "granted"),
    [(16, 0, 100, 20), (20, 0, 100, 20), (21, 0, 100, None), (100, 0, 20, 20), (1, 21, 100, None), (100, 0, 30, None)],
)
async def test_lengths_are_not_lowered_to_nothing(least, min_tokens, asked, granted):
    setup = AdmissionSetup(limit("tenant:acme", "usd_total", 50_000), least_output_tokens=least)
    context = setup.admit(10, asked, min_tokens=min_tokens)
    if granted is None:
        with pytest.raises(QuotaExceeded):
            await context.__aenter__()
    else:
        assert (await context.__aenter__()).max_tokens == granted
        await context.__aexit__(None, None, None)


async def test_the_tightest_level_rules():
    setup = AdmissionSetup(
        limit("key:alice", "usd_per_day", 500_000),
        limit("tenant:team", "usd_per_day", 110_000),
        limit("tenant:acme", "usd_per_day", 400_000),
    )
    async with setup.admit(10, 400) as grant:
        assert grant.max_tokens == 50
        await grant.settle(Usage(10, 50), Outcome.FINISHED)
    for subject in ("key:alice", "tenant:team", "tenant:acme"):
        assert await reading(setup, subject) == (110_000, 0)
    with pytest.raises(QuotaExceeded) as caught:
        async with setup.admit(principal=BOB):
            pass
    assert caught.value.subject == "tenant:team"


async def test_a_new_window_is_a_new_budget():
    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", 42_000))
    async with setup.admit(2, 20):
        setup.clock.now_s = 20.0
    async with setup.admit(2, 20) as grant:
        await grant.settle(Usage(2, 20), Outcome.FINISHED)
    with pytest.raises(QuotaExceeded) as caught:
        async with setup.admit(2, 20):
            pass
    assert caught.value.retry_after_s == pytest.approx((9 * 3600 - 20) * 1.05)
    setup.clock.now_s = 9 * 3600.0
    async with setup.admit(2, 20):
        pass


async def test_what_the_ledger_knows_is_spent():
    async def spent(counters):
        return dict.fromkeys(counters, 90_000)

    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", 110_000), spent=spent)
    with pytest.raises(QuotaExceeded):
        async with setup.admit(10, 100):
            pass


async def test_limits_on_one_request_come_first():
    setup = AdmissionSetup(limit("*", "context_tokens", 50), limit("*", "requests_per_minute", 1))
    with pytest.raises(ContextLengthExceeded):
        async with setup.admit(10, 100):
            pass
    async with setup.admit(10, None) as grant:
        assert (grant.max_tokens, grant.clamped) == (40, False)


async def test_the_longest_prompt_counts_for_the_context():
    setup = AdmissionSetup(limit("*", "context_tokens", 50))
    async with setup.admit(60, None, longest_prompt=20) as grant:
        assert grant.max_tokens == 30


async def test_a_limit_on_the_output_clamps_and_reports_it():
    setup = AdmissionSetup(limit("*", "output_tokens", 50))
    context = RequestContext("req-1", 0.0)
    async with setup.admit(10, 100, context=context) as grant:
        assert (grant.max_tokens, grant.clamped, context.clamped_max_tokens) == (50, True, 50)


# --- how requests end -----------------------------------------------------------------------------------------------


async def end_with(error, *, usage=None, context=None, replica=""):
    """A setup in which one request of 10 + 100 tokens ended with this error."""
    setup = AdmissionSetup(
        limit("tenant:acme", "usd_per_day", NANO),
        limit("*", "tokens_per_minute", 1000),
        limit("*", "requests_per_minute", 10),
        limit("*", "concurrent_tokens", 1000),
    )
    with pytest.raises(type(error)):
        async with setup.admit(10, 100, context=context) as grant:
            grant.set_replica(replica)
            if usage is not None:
                grant.record_usage(usage)
            raise error
    assert setup.admission.leases.active == 0
    assert (await reading(setup))[1] == 0
    return setup, setup.ledger.events[0]


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), asyncio.CancelledError("for some reason"), GeneratorExit()]
)
async def test_who_leaves_pays_for_what_was_done(error):
    setup, event = await end_with(error, usage=Usage(10, 5, 2))
    assert (event.outcome, event.prompt_tokens, event.output_tokens, event.cost_nusd) == ("cancelled", 10, 5, 18_200)
    assert await reading(setup) == (18_200, 0)
    assert (await left(setup, "tokens"), await left(setup, "requests")) == (985, 9)


async def test_who_leaves_before_the_first_token_pays_for_the_prompt():
    setup, event = await end_with(asyncio.CancelledError(), replica="r0")
    assert (event.outcome, event.cost_nusd) == ("cancelled", 10_000)
    assert await reading(setup) == (10_000, 0)


@pytest.mark.parametrize("error", [RuntimeError(), ReplicaLost(), asyncio.CancelledError(Draining())])
async def test_what_failed_costs_nothing(error):
    setup, event = await end_with(error, usage=Usage(10, 5))
    assert (event.outcome, event.prompt_tokens, event.output_tokens, event.cost_nusd) == ("failed", 10, 5, 0)
    assert await reading(setup) == (0, 0)
    assert (await left(setup, "tokens"), await left(setup, "requests")) == (985, 9), "what was processed was processed"


async def test_what_failed_before_anything_was_done_gives_its_tokens_back():
    setup, event = await end_with(ReplicaLost())
    assert (event.outcome, event.prompt_tokens) == ("failed", 0)
    assert (await left(setup, "tokens"), await left(setup, "requests")) == (1000, 9)


@pytest.mark.parametrize("error", [ReplicaUnavailable(), asyncio.CancelledError(Draining())])
async def test_what_is_turned_away_leaves_no_trace_in_the_rates(error):
    setup, event = await end_with(error)
    assert (event.outcome, event.prompt_tokens, event.cost_nusd) == ("refused", 0, 0)
    assert (await left(setup, "tokens"), await left(setup, "requests")) == (1000, 10)


async def test_usage_that_nobody_recorded_is_taken_from_the_context():
    context = RequestContext("req-1", 900.0)
    context.completion_tokens, context.cached_tokens, context.first_token_s = 7, 4, 950.0
    _, event = await end_with(asyncio.CancelledError(), context=context)
    assert (event.prompt_tokens, event.cached_tokens, event.output_tokens) == (10, 4, 7)
    assert (event.ttft_s, event.duration_s) == (50.0, 100.0)


async def test_a_reading_replica_without_a_token_has_processed_the_prompt():
    context = RequestContext("req-1", 900.0)
    context.first_token_s = 950.0
    _, event = await end_with(ReplicaUnavailable(), context=context)
    assert (event.outcome, event.prompt_tokens) == ("failed", 10)


async def test_leaving_in_peace_is_finishing():
    setup = AdmissionSetup()
    async with setup.admit(10, 100) as grant:
        grant.record_usage(Usage(10, 3))
    assert (setup.ledger.events[0].outcome, setup.ledger.events[0].output_tokens) == ("finished", 3)


async def test_only_the_first_settlement_counts():
    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", NANO))
    async with setup.admit(10, 100) as grant:
        await grant.settle(Usage(10, 5), Outcome.FINISHED)
        await grant.settle(Usage(10, 50), Outcome.FINISHED)
    assert len(setup.ledger.events) == len(setup.counters.settled) == 1


async def test_the_ledger_comes_before_the_counters():
    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", NANO))

    async def look():
        assert len(setup.ledger.events) == 1

    setup.counters.trouble = look
    async with setup.admit(10, 100) as grant:
        await grant.settle(Usage(10, 5), Outcome.FINISHED)
    assert len(setup.counters.settled) == 1


# --- trouble --------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_journaled_does_not_begin():
    setup = AdmissionSetup(limit("tenant:acme", "concurrent_requests", 1))
    setup.ledger.away = True
    with pytest.raises(StoreUnavailable):
        async with setup.admit():
            pass
    setup.ledger.away = False
    async with setup.admit():
        pass
    assert setup.admission.leases.active == 0


async def test_what_cannot_be_journaled_is_not_billed(caplog):
    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", NANO))
    with pytest.raises(StoreUnavailable):
        async with setup.admit(10, 100) as grant:
            setup.ledger.away = True
            await grant.settle(Usage(10, 5), Outcome.FINISHED)
    assert "req-1 could not be journaled" in caplog.text
    assert await reading(setup) == (0, 0)
    assert setup.admission.leases.active == 0


async def test_counters_that_are_away_hold_up_no_answer():
    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", NANO))
    async with setup.admit(10, 100) as grant:
        setup.counters.trouble = StoreUnavailable()
        await grant.settle(Usage(10, 5), Outcome.FINISHED)
    assert (setup.admission.leases.active, setup.admission.leases.late) == (1, 1)
    assert len(setup.ledger.events) == 1
    setup.counters.trouble = None
    await setup.admission.leases.settle_late()
    assert await reading(setup) == (20_000, 0)
    assert (setup.admission.leases.active, setup.admission.leases.late) == (0, 0)


async def test_a_cancellation_amid_the_settlement_loses_nothing():
    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", NANO))
    reached = asyncio.Event()

    async def hang():
        reached.set()
        await asyncio.Event().wait()

    async def request():
        async with setup.admit(10, 100) as grant:
            setup.counters.trouble = hang
            await grant.settle(Usage(10, 5), Outcome.FINISHED)

    task = asyncio.create_task(request())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    setup.counters.trouble = None
    await setup.admission.leases.settle_late()
    assert await reading(setup) == (20_000, 0)
    assert [event.outcome for event in setup.ledger.events] == ["finished"]


async def test_a_cancellation_amid_the_reservation_leaves_no_phantom():
    begun = asyncio.Event()

    async def spent(counters):
        begun.set()
        await asyncio.Event().wait()

    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", NANO), spent=spent)
    task = asyncio.create_task(setup.admission.admit(setup.request()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert setup.admission.leases.late == 1
    await setup.admission.leases.settle_late()
    assert setup.admission.leases.active == 0


async def test_counters_that_cannot_be_reached_let_nobody_in():
    async def spent(counters):
        raise StoreUnavailable

    setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", NANO), limit("*", "requests_per_minute", 5), spent=spent)
    with pytest.raises(StoreUnavailable):
        async with setup.admit():
            pass
    assert setup.ledger.begun == []
    assert await left(setup, "requests") == 5


# --- looking --------------------------------------------------------------------------------------------------------


async def test_looking_takes_nothing():
    setup = AdmissionSetup(limit("key:*", "requests_per_minute", 5), limit("*", "usd_per_day", 5))
    for _ in range(9):
        assert await left(setup, "requests") == 5


async def test_looking_without_rates_asks_nobody():
    async def spent(counters):
        raise AssertionError

    setup = AdmissionSetup(limit("*", "usd_per_day", 5), limit("*", "concurrent_requests", 5), spent=spent)
    assert await setup.admission.rate_limit_status(setup.request().principal, "tiny") is None


async def test_nobody_can_tell_where_the_counters_are_away(monkeypatch):
    setup = AdmissionSetup(limit("*", "requests_per_minute", 5))

    async def read(claims):
        raise StoreUnavailable

    monkeypatch.setattr(setup.counters, "read", read)
    assert await setup.admission.rate_limit_status(setup.request().principal, "tiny") is None


# --- before a request is decoded ------------------------------------------------------------------------------------


REFUSED_BEFORE = [
    (("requests_per_minute", 1), RateLimited, "1 are used, 0 are left, this request needs 1."),
    (("tokens_per_minute", 110), RateLimited, "110 are used, 0 are left, this request needs at least 2."),
    (("tokens_per_minute", 111), RateLimited, "110 are used, 1 are left, this request needs at least 2."),
    (("input_tokens_per_minute", 10), RateLimited, "this request needs at least 1."),
    (("output_tokens_per_minute", 100), RateLimited, "this request needs at least 1."),
    (("concurrent_requests", 1), RateLimited, "Too much at one time"),
    (("concurrent_tokens", 110), RateLimited, "Too much at one time"),
    (("usd_per_day", 210_000), RateLimited, "Budget held by running requests"),
]


@pytest.mark.parametrize(("rule", "error", "words"), REFUSED_BEFORE)
async def test_whose_limits_are_full_is_refused_before_its_request_is_decoded(rule, error, words):
    setup = AdmissionSetup(limit("tenant:acme", *rule))
    await setup.admission.check_limits(ALICE, 1)
    async with setup.admit(10, 100):
        with pytest.raises(error) as caught:
            await setup.admission.check_limits(ALICE, 1)
        assert words in caught.value.message
        assert caught.value.subject == "tenant:acme"
        assert caught.value.retry_after_s > 0


async def test_a_used_up_budget_refuses_before_only_if_no_model_is_free():
    for prices, refuses in (
        ({"*": {"prompt": 1.0, "output": 2.0}}, True),
        ({"*": {"prompt": 1.0, "output": 2.0}, "free": {}}, False),
        ({"tiny": {"prompt": 1.0, "output": 2.0}}, False),
    ):
        setup = AdmissionSetup(limit("tenant:acme", "usd_per_day", 210_000), price={"prompt": 1.0, "output": 2.0})
        setup.admission.reconfigure(
            AdmissionConfig(prices={name: PriceConfig(**price) for name, price in prices.items()})
        )
        async with setup.admit(10, 100) as grant:
            await grant.settle(Usage(10, 100), Outcome.FINISHED)
        if refuses:
            with pytest.raises(QuotaExceeded, match="Budget used up"):
                await setup.admission.check_limits(ALICE, 1)
        else:
            await setup.admission.check_limits(ALICE, 1)


async def test_limits_of_one_model_refuse_nothing_before_its_name_is_known():
    setup = AdmissionSetup(limit("tenant:acme", "tokens_per_minute", 110, model="tiny"))
    async with setup.admit(10, 100):
        await setup.admission.check_limits(ALICE, 1)


async def test_an_embedding_needs_no_output():
    setup = AdmissionSetup(limit("tenant:acme", "output_tokens_per_minute", 100))
    async with setup.admit(10, 100):
        await setup.admission.check_limits(ALICE, 0)
