"""Plans: what limits and prices come to for the requests of one caller to one model.

Limits change seldom, prices never under one configuration, and windows of budgets once a day; requests come all the
time. So what stays the same between two requests is worked out once and kept, and a request finds it by one look-up.
"""

import logging

import msgspec

from maitred.admission.policy.claims import LimitDemand, day_at, make_demand, watched_counters
from maitred.admission.policy.output import PerRequestLimits, per_request_limits
from maitred.admission.policy.rules import rules_for
from maitred.admission.prices import PriceList, PriceTag
from maitred.core.counters import CounterKind
from maitred.core.limits import LimitSource
from maitred.core.tenancy import Principal

log = logging.getLogger(__name__)

_MOST_KEPT = 10_000
"""Callers with each of their models, some 3 KiB for seven counters; the one that came first is forgotten first."""


class LimitPlan(msgspec.Struct, frozen=True):
    """Limits and prices for the requests of one caller to one model."""

    edition: int
    """Of the limits that it was made from."""
    day: int
    """Whose windows the budgets have."""
    bounds: PerRequestLimits
    demand: LimitDemand
    tag: PriceTag


class LimitPlanCache:
    """Makes plans and keeps them.

    Args:
        limits: Who is limited how.
        prices: What tokens cost.
    """

    def __init__(self, limits: LimitSource, prices: PriceList) -> None:
        self._limits = limits
        self._prices = prices
        self._plans: dict[tuple[str, tuple[str, ...], str], LimitPlan] = {}
        self._warned_free: set[str] = set()

    def plan_for(self, principal: Principal, model: str, wall_s: float) -> LimitPlan:
        """The plan that holds now."""
        name = (principal.key, principal.tenants, model)
        plan = self._plans.get(name)
        if plan is None or plan.edition != self._limits.edition or plan.day != day_at(wall_s):
            plan = self._make_plan(principal, model, day_at(wall_s))
            self._plans.pop(name, None)
            if len(self._plans) >= _MOST_KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[name] = plan
        return plan

    def _make_plan(self, principal: Principal, model: str, day: int) -> LimitPlan:
        rules = rules_for(principal.subjects, self._limits, model)
        watches, tag = watched_counters(rules), self._prices.price_for(model)
        demand = make_demand(watches, tag.price, day)
        if any(watch.claim.kind is CounterKind.BUDGET for watch in watches) and not demand.budgets:
            self._warn_free(model)
        return LimitPlan(self._limits.edition, day, per_request_limits(rules), demand, tag)

    def _warn_free(self, model: str) -> None:
        """Says once that budgets count nothing, which whoever set them does not expect."""
        if model not in self._warned_free:
            self._warned_free.add(model)
            log.warning(
                "Budgets hold for requests to %s, but its tokens have no price, so they count nothing. "
                "Set admission.prices for this model, or for `*`.",
                model,
            )
