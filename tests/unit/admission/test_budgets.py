"""How budgets stand, and the alarm of soft ones."""

import pytest

from maitred.core.context import Outcome
from maitred.core.request import Usage
from tests.support.admission_services import BOB, SATURDAY_S, AdmissionSetup, limit

MIDNIGHT_S = SATURDAY_S + 9 * 3600


async def spend(setup, output_tokens, **others):
    """A request that costs 2,000 nano-dollars a token."""
    async with setup.admit(0, output_tokens, **others) as grant:
        await grant.settle(Usage(0, output_tokens), Outcome.FINISHED)


async def test_the_budgets_of_a_subject():
    own, any_tenant = limit("tenant:acme", "usd_per_day", 100_000), limit("tenant:*", "usd_total", 50_000, hard=False)
    setup = AdmissionSetup(
        own, any_tenant, limit("tenant:acme", "requests_per_minute", 9), limit("*", "usd_total", 10**9)
    )
    await spend(setup, 10)
    async with setup.admit(0, 5):
        states = await setup.admission.budgets("tenant:acme")
    assert [(state.limit, state.charged, state.reserved, state.remaining, state.ends_s) for state in states] == [
        (own, 20_000, 10_000, 70_000, MIDNIGHT_S),
        (any_tenant, 20_000, 10_000, 20_000, None),
    ]
    assert {state.subject for state in states} == {"tenant:acme"}


@pytest.mark.parametrize("subject", ["tenant:*", "key:*"])
async def test_all_together_have_no_budget_of_each(subject):
    setup = AdmissionSetup(limit(subject, "usd_per_day", 100_000))
    assert await setup.admission.budgets(subject) == []


async def test_the_budget_of_the_installation():
    setup = AdmissionSetup(limit("*", "usd_total", 10**9))
    await spend(setup, 10)
    assert [state.charged for state in await setup.admission.budgets("*")] == [20_000]


async def test_limits_that_watch_one_fact_see_the_same_spending():
    setup = AdmissionSetup(
        limit("tenant:acme", "usd_per_day", 100_000), limit("tenant:acme", "usd_per_day", 10_000, hard=False)
    )
    await spend(setup, 10)
    states = await setup.admission.budgets("tenant:acme")
    assert [(state.charged, state.remaining) for state in states] == [(20_000, 80_000), (20_000, -10_000)]


async def test_a_soft_budget_refuses_nothing_and_raises_one_alarm():
    soft = limit("tenant:acme", "usd_per_day", 30_000, hard=False)
    setup = AdmissionSetup(soft)
    await spend(setup, 10)
    assert setup.alarms == []
    await spend(setup, 10)
    await spend(setup, 10)
    ((passed, reading),) = setup.alarms
    assert passed == soft.id
    assert (reading.capacity, reading.used, reading.remaining) == (30_000, 40_000, -10_000)


async def test_each_soft_budget_below_a_hard_one_raises_an_alarm():
    limits = [limit("tenant:acme", "usd_per_day", value, hard=value == 60_000) for value in (20_000, 40_000, 60_000)]
    setup = AdmissionSetup(*limits)
    for _ in range(3):
        await spend(setup, 10)
    assert [passed for passed, _ in setup.alarms] == [limits[0].id, limits[1].id]


async def test_each_subject_and_each_window_raises_an_alarm():
    setup = AdmissionSetup(limit("key:*", "usd_per_day", 1_000, hard=False))
    for _ in range(2):
        await spend(setup, 10)
        await spend(setup, 10, principal=BOB)
    assert len(setup.alarms) == 2
    setup.clock.now_s = 10 * 3600.0
    for _ in range(2):
        await spend(setup, 10)
    assert len(setup.alarms) == 3


async def test_a_budget_that_was_passed_before_this_gateway_began_raises_an_alarm():
    async def spent(counters):
        return dict.fromkeys(counters, 5_000)

    setup = AdmissionSetup(limit("*", "usd_total", 1_000, hard=False), spent=spent)
    async with setup.admit():
        assert len(setup.alarms) == 1
