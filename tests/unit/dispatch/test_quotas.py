"""Who may use which part, and who is above its fair share."""

import pytest

from maitred.core.flow import FlowLevel, PriorityClass
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.quotas import COMMON, Quotas, TenantHoldings

STANDARD = PriorityClass.STANDARD

TOTAL = Cost(10, 1000)


def test_the_narrowest_tenant_that_is_named_counts():
    quotas = Quotas({"acme": 0.2}, {"gold": (["team"], 0.3)})
    assert quotas.quota_for((FlowLevel("acme"), FlowLevel("team"), FlowLevel("key"))).name == "gold"
    assert quotas.quota_for((FlowLevel("acme"), FlowLevel("other"), FlowLevel("key"))).name == "acme"
    assert quotas.quota_for((FlowLevel("else"), FlowLevel("key"))) is quotas.common


def test_the_common_quota_is_what_the_others_leave():
    quotas = Quotas({"acme": 0.2}, {"gold": (["team"], 0.3)})
    assert quotas.limit(quotas.common, TOTAL) == Cost(5, 500)
    acme = quotas.quota_for((FlowLevel("acme"),))
    acme.allocate(Cost(1, 50))
    assert quotas.remaining(acme, TOTAL) == Cost(1, 150)
    acme.release(Cost(1, 50))
    assert quotas.remaining(acme, TOTAL) == Cost(2, 200)


@pytest.mark.parametrize(
    ("loads", "usable"),
    [
        ({"gold": 8}, 0.25),
        ({COMMON: 3}, 0.6),
        ({"gold": 1, COMMON: 3}, 0.8),
        ({"gold": 5, COMMON: 12, "acme": 3}, 1.0),
        ({"gold": 4, COMMON: 3}, 7 / 16),
        ({"acme": 4}, 0.75),
        ({"acme": 4, COMMON: 4}, 0.75),
        ({}, 1.0),
    ],
)
def test_what_confined_loads_can_use_is_the_share_of_the_fullest(loads, usable):
    quotas = Quotas({"acme": 0.15}, {"gold": (["team"], 0.25)})
    by_name = {quota.name: quota for quota in quotas.all}
    assert quotas.usable_share({by_name[name]: load for name, load in loads.items()}) == pytest.approx(usable)


def test_without_quotas_all_of_it_is_usable():
    quotas = Quotas({}, {})
    assert quotas.usable_share({quotas.common: 9}) == 1.0


def test_a_small_share_has_at_least_one_slot():
    quotas = Quotas({"acme": 0.01}, {})
    assert quotas.limit(quotas.all[0], TOTAL) == Cost(1, 10)


def test_the_fair_share_is_by_weight_among_those_seen_lately():
    holdings = TenantHoldings()
    light, heavy = FlowLevel("light"), FlowLevel("heavy", 3.0)
    holdings.observe(heavy, 0.0)
    holdings.allocate(heavy, 7, STANDARD)
    assert not holdings.above_share(heavy, 1, 8, 0.0), "alone"
    holdings.observe(light, 1.0)
    assert holdings.above_share(heavy, 1, 8, 1.0)
    holdings.release(heavy, 2, STANDARD)
    assert not holdings.above_share(heavy, 1, 8, 1.0)
    assert holdings.above_share(heavy, 2, 8, 1.0)


def test_a_tenant_that_holds_nothing_is_never_above_its_share():
    holdings = TenantHoldings()
    for number in range(20):
        holdings.observe(FlowLevel(f"t{number}"), 0.0)
    assert not holdings.above_share(FlowLevel("t3"), 4, 8, 0.0)


def test_a_tenant_not_seen_for_a_minute_is_forgotten_unless_it_runs_something():
    holdings = TenantHoldings()
    one, two = FlowLevel("one"), FlowLevel("two")
    holdings.observe(one, 0.0)
    holdings.observe(two, 0.0)
    holdings.allocate(one, 5, STANDARD)
    assert holdings.above_share(one, 1, 8, 59.0)
    assert not holdings.above_share(one, 1, 8, 61.0)
    assert len(holdings) == 1
    holdings.release(one, 5, STANDARD)
    holdings.observe(two, 200.0)
    assert len(holdings) == 1
    assert holdings.slots == 0


def test_overcommit_is_for_tenants_that_hold_less_per_weight_than_others_of_no_higher_class():
    holdings = TenantHoldings()
    light, flood = FlowLevel("light"), FlowLevel("flood", 2.0)
    holdings.observe(light, 0.0)
    holdings.observe(flood, 0.0)
    holdings.allocate(flood, 2, STANDARD)
    assert not holdings.may_overcommit(light, 1, STANDARD)  # half a place per weight would be left, for one
    holdings.allocate(flood, 1, PriorityClass.INTERACTIVE)
    assert not holdings.may_overcommit(light, 1, STANDARD)
    assert holdings.may_overcommit(light, 1, PriorityClass.INTERACTIVE)
    holdings.allocate(flood, 1, PriorityClass.BACKGROUND)
    assert holdings.may_overcommit(light, 1, STANDARD)
    assert not holdings.may_overcommit(light, 2, STANDARD)
    assert not holdings.may_overcommit(flood, 1, STANDARD)


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_a_weight_may_change(weight):
    holdings = TenantHoldings()
    holdings.observe(FlowLevel("one"), 0.0)
    holdings.observe(FlowLevel("two"), 0.0)
    holdings.observe(FlowLevel("one", weight), 1.0)
    holdings.allocate(FlowLevel("one"), 1, STANDARD)
    share = 12 * weight / (1 + weight)
    assert not holdings.above_share(FlowLevel("one", weight), int(share) - 1, 12, 1.0)
    assert holdings.above_share(FlowLevel("one", weight), int(share), 12, 1.0)
