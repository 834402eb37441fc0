"""Plans: what limits and prices come to for the requests of one caller to one model.

Limits change seldom, prices never under one configuration, and windows of budgets once a day; requests come all the
time. So what stays the same between two requests is worked out once and kept, and a request finds it by one look-up.
"""

import logging

import msgspec

from maitred.admission.policy.claims import LimitDemand, demand_of, watches_of
from maitred.admission.policy.output import PerRequestLimits, bounds_of
from maitred.admission.policy.rules import rules_for
from maitred.admission.policy.windows import day_at
from maitred.admission.prices import PriceList, PriceTag
from maitred.core.counters import CounterKind
from maitred.core.limits import LimitSource
from maitred.core.tenancy import Principal

log = logging.getLogger(__name__)

_MOST_KEPT = 10_000
"""Callers with each of their models, some 3 KiB for seven counters; the one that came first is forgotten first."""


class LimitPlan(msgspec.Struct, frozen=True):
    """What holds for the requests of one caller to one model."""

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
        self._kept: dict[tuple[str, tuple[str, ...], str], LimitPlan] = {}
        self._said_free: set[str] = set()

    def of(self, principal: Principal, model: str, wall_s: float) -> LimitPlan:
        """The plan that holds now."""
        name = (principal.key, principal.tenants, model)
        plan = self._kept.get(name)
        if plan is None or plan.edition != self._limits.edition or plan.day != day_at(wall_s):
            plan = self._made(principal, model, day_at(wall_s))
            self._kept.pop(name, None)
            if len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[name] = plan
        return plan

    def _made(self, principal: Principal, model: str, day: int) -> LimitPlan:
        rules = rules_for(principal.subjects, self._limits, model)
        watches, tag = watches_of(rules), self._prices.of(model)
        demand = demand_of(watches, tag.price, day)
        if any(watch.claim.kind is CounterKind.BUDGET for watch in watches) and not demand.budgets:
            self._say_it_is_free(model)
        return LimitPlan(self._limits.edition, day, bounds_of(rules), demand, tag)

    def _say_it_is_free(self, model: str) -> None:
        """Says once that budgets count nothing, which whoever set them does not expect."""
        if model not in self._said_free:
            self._said_free.add(model)
            log.warning(
                "Budgets hold for requests to %s, but its tokens have no price, so they count nothing. "
                "Set admission.prices for this model, or for `*`.",
                model,
            )
