"""What is collected for metrics: how far the ledger is from the engines, and which budgets were passed."""

import logging
from types import SimpleNamespace

import pytest

from maitred.admission.admission import Admission
from maitred.admission.config import AdmissionConfig
from maitred.app.admin.store_health import SoftBudgetAlarm, StoreHealth
from maitred.core.counters import CounterState
from maitred.core.errors import StoreUnavailable
from maitred.core.limits import Limit, LimitKind
from maitred.core.request import Usage
from maitred.observe.metrics.budgets import BudgetUse
from maitred.store.counters.memory import MemoryCounters
from tests.support.admission_services import Limits, PaperLedger, StillClock


@pytest.fixture
def parts():
    """Of an installation; each test changes what it is about."""
    return SimpleNamespace(
        stores=SimpleNamespace(
            ledger=SimpleNamespace(
                token_totals=dict, costs_nusd=lambda: {"a": 500_000_000}, backlog=3, backlog_age_s=0.25
            ),
            counters=SimpleNamespace(healthy=True),
            journal=SimpleNamespace(healthy=True, check=lambda: None),
        ),
        access=SimpleNamespace(refresher=SimpleNamespace(away=False, age_s=0.5, check=lambda: None)),
        admission=SimpleNamespace(leases=SimpleNamespace(active=2, late=1)),
        alarm=SoftBudgetAlarm(),
        engine_tokens={},
    )


def view_of(parts):
    return StoreHealth(parts.stores, parts.access, parts.admission, parts.alarm, lambda: parts.engine_tokens)


def test_drift_is_what_an_engine_counted_and_the_ledger_has_not(parts):
    parts.engine_tokens = {"a": 30, "b": 7, "c": 0}
    parts.stores.ledger.token_totals = lambda: {"a": Usage(100, 30), "b": Usage(5, 2), "gone": Usage(1, 1)}
    state = view_of(parts).state()
    assert state.drift_tokens == {"a": 0, "b": 5, "c": 0}
    assert state.recorded["gone"] == Usage(1, 1)


def test_a_ledger_that_is_ahead_drifts_below_zero(parts):
    parts.engine_tokens = {"a": 3}
    parts.stores.ledger.token_totals = lambda: {"a": Usage(0, 5)}
    assert view_of(parts).state().drift_tokens == {"a": -2}


def test_costs_are_shown_in_dollars(parts):
    assert view_of(parts).state().costs_usd == {"a": 0.5}


def test_the_rest_is_passed_on(parts):
    parts.access.refresher.away = True
    parts.stores.journal.healthy = False
    state = view_of(parts).state()
    assert (state.leases_held, state.leases_late, state.backlog, state.backlog_age_s) == (2, 1, 3, 0.25)
    assert (state.directory_age_s, state.soft_budgets_passed) == (0.5, 0)
    assert state.stores_up == {"database": False, "counters": True, "journal": False}


def test_stores_that_refuse_every_request_are_reported(parts):
    def away():
        raise StoreUnavailable

    view_of(parts).check_stores()
    parts.stores.journal.check = away
    with pytest.raises(StoreUnavailable):
        view_of(parts).check_stores()


def test_soft_budgets_are_counted_and_logged(parts, caplog):
    limit = Limit(id="l", subject="tenant:acme", kind=LimitKind.USD_PER_DAY, value=2_000_000_000, hard=False)
    with caplog.at_level(logging.WARNING):
        parts.alarm(limit, CounterState(2_000_000_000, -1, 0.0, used=2_500_000_000))
    assert "usd_per_day of tenant:acme was passed: 2.5000 of 2.0000 USD" in caplog.text
    assert view_of(parts).state().soft_budgets_passed == 1


async def test_budgets_are_shown_as_shares_by_tenant(parts):
    async def spent(counters):
        return dict.fromkeys(counters, 100)

    limits = Limits(
        Limit(id="all", subject="*", kind=LimitKind.USD_TOTAL, value=1_000),
        Limit(id="org", subject="tenant:acme", kind=LimitKind.USD_PER_DAY, value=200, model="big", hard=False),
        Limit(id="each", subject="tenant:*", kind=LimitKind.USD_PER_DAY, value=400),
        Limit(id="rate", subject="tenant:acme", kind=LimitKind.REQUESTS_PER_MINUTE, value=5),
    )
    clock = StillClock()
    parts.admission = Admission(limits, MemoryCounters(clock, spent), PaperLedger(), AdmissionConfig(), clock)
    assert sorted(await view_of(parts).budgets(["*", "acme", "beta"])) == [
        BudgetUse("*", "usd_total", "", True, pytest.approx(0.1)),
        BudgetUse("acme", "usd_per_day", "", True, pytest.approx(0.25)),
        BudgetUse("acme", "usd_per_day", "big", False, pytest.approx(0.5)),
        BudgetUse("beta", "usd_per_day", "", True, pytest.approx(0.25)),
    ]
