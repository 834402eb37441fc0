"""How far budgets are used, for as many tenants as have their own series."""

from prometheus_client import CollectorRegistry

from maitred.core.context import RequestContext
from maitred.core.errors import StoreUnavailable
from maitred.core.tenancy import Principal
from maitred.observe.metrics.budgets import BudgetMetrics, BudgetUse
from maitred.observe.observer_batch import ObserverBatch


class Counters:
    """Every tenant has a daily budget of 100."""

    def __init__(self, **spent):
        self.spent, self.asked, self.away = spent, [], False

    async def read(self, tenants):
        if self.away:
            raise StoreUnavailable
        self.asked.append(list(tenants))
        return [BudgetUse(name, "usd_per_day", "", True, self.spent.get(name, 0) / 100) for name in tenants]


def watched(named):
    metrics, registry = BudgetMetrics(named, ObserverBatch()), CollectorRegistry()
    registry.register(metrics)
    return metrics, lambda tenant: registry.get_sample_value(
        "maitred_budget_used_ratio", {"tenant": tenant, "budget": "usd_per_day", "model": "", "hard": "true"}
    )


def asks(metrics, *tenants, model="m"):
    principal = Principal(key="k", tenants=tenants, scopes=frozenset())
    metrics.on_request_end(RequestContext("req-1", 0.0, model=model, principal=principal))


async def test_budgets_of_tenants_whose_requests_are_still_pending_are_read():
    batch = ObserverBatch()
    metrics = BudgetMetrics(10, batch)
    batch.add_observers(metrics)
    principal = Principal(key="k", tenants=("acme",), scopes=frozenset())
    batch.on_request_end(RequestContext("req-1", 0.0, model="m", principal=principal))
    counters = Counters(acme=50)
    await metrics.refresh(counters.read)
    assert counters.asked == [["*", "acme"]]


async def test_teams_organisations_and_everybody_have_their_own():
    metrics, used = watched(10)
    counters = Counters(team=25, acme=50)
    asks(metrics, "team", "acme")
    asks(metrics, "visitor", model="")
    await metrics.refresh(counters.read)
    assert (used("team"), used("acme"), used("*"), used("visitor")) == (0.25, 0.5, 0.0, None)


async def test_the_fullest_of_those_without_a_name_stands_for_them_while_they_ask():
    metrics, used = watched(1)
    counters = Counters(first=10, second=80, third=60)
    for tenant in ("first", "second", "third"):
        asks(metrics, tenant)
    await metrics.refresh(counters.read)
    assert (used("first"), used("other"), used("second")) == (0.1, 0.8, None)
    await metrics.refresh(counters.read)
    assert (used("first"), used("other")) == (0.1, None)


async def test_unknown_budgets_are_not_exported():
    metrics, used = watched(10)
    counters = Counters(acme=50)
    asks(metrics, "acme")
    await metrics.refresh(counters.read)
    counters.away = True
    await metrics.refresh(counters.read)
    assert used("acme") is None
    counters.away = False
    await metrics.refresh(counters.read)
    assert used("acme") == 0.5


async def test_thousands_of_tenants_are_a_bounded_number_of_series_and_of_questions_at_once():
    metrics, _ = watched(100)
    counters = Counters()
    for number in range(10_000):
        asks(metrics, f"t{number}")
    await metrics.refresh(counters.read)
    (family,) = metrics.collect()
    assert len(family.samples) == 102
    assert max(map(len, counters.asked)) == 200
    assert sum(map(len, counters.asked)) == 1_101
