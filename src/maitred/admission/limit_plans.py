"""Limit plans: combined limits and prices for the requests of one caller to one model.

Limits change rarely, prices change only with the configuration, and budget windows change once a day, but requests
arrive all the time. So the constant part is computed once and cached, and a request finds it with one lookup.
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
"""Maximum number of cached plans, about 3 KiB each with seven counters; the oldest is dropped first."""


class LimitPlan(msgspec.Struct, frozen=True):
    """Limits and prices for the requests of one caller to one model."""

    edition: int
    """Edition of the limits that the plan was made from."""
    day: int
    """Day that determines the budget windows."""
    bounds: PerRequestLimits
    demand: LimitDemand
    tag: PriceTag


class LimitPlanCache:
    """Makes and caches limit plans.

    Args:
        limits: Source of the limits.
        prices: Prices of the tokens.
    """

    def __init__(self, limits: LimitSource, prices: PriceList) -> None:
        self._limits = limits
        self._prices = prices
        self._plans: dict[tuple[str, tuple[str, ...], str], LimitPlan] = {}
        self._warned_free: set[str] = set()

    def plan_for(self, principal: Principal, model: str, wall_s: float) -> LimitPlan:
        """Returns the current plan of a caller for a model."""
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
        return LimitPlan(self._limits.edition, day, bounds=per_request_limits(rules), demand=demand, tag=tag)

    def _warn_free(self, model: str) -> None:
        """Warns once that budgets count nothing for a free model, which the operator may not expect."""
        if model not in self._warned_free:
            self._warned_free.add(model)
            log.warning(
                "Budgets hold for requests to %s, but its tokens have no price, so they count nothing. "
                "Set admission.prices for this model, or for `*`.",
                model,
            )
