"""How far budgets are used: of everybody together, of tenants that are named, and the fullest one of the others.

A budget is counted where all gateways count, so its state is asked for, seldom and for many at once, and not followed
request by request: what other gateways spend, and a new day, are seen as well. Nobody's budgets are read who has not
asked for anything since the start.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.answer import RequestContext
from maitred.core.errors import StoreUnavailable
from maitred.observe.metrics.tenants import OTHER, LabelCap

_EVERY_S = 15.0
_MOST_AT_ONCE = 200
"""Tenants whose budgets are read before others have a turn."""
_MOST_OTHERS = 1_000
"""Of those that are not named: looked at in one go."""


class BudgetUse(NamedTuple):
    """One budget of one tenant."""

    tenant: str
    """``*``: everybody together."""
    budget: str
    """Its kind, such as ``usd_per_day``."""
    model: str
    """Empty: all models."""
    hard: bool
    share: float
    """Spent, or held by requests that run; above 1 where a soft budget was passed."""


ReadBudgets = Callable[[Sequence[str]], Awaitable[Sequence[BudgetUse]]]
"""The budgets of tenants, and with ``*`` among them those of everybody; may raise StoreUnavailable."""


class BudgetMetrics(Collector):
    """Shows them. Implements `maitred.core.answer.RequestObserver`.

    Args:
        named: How many tenants are told apart, organisations and teams together.

    Attributes:
        named: Those that are.
    """

    def __init__(self, named: int) -> None:
        self.named = LabelCap(named)
        self._others: set[str] = set()
        self._shares: dict[tuple[str, ...], float] = {}

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Notes who asked for work."""
        asked = [each.principal.tenants for each in contexts if each.principal is not None and each.model]
        for tenant in dict.fromkeys(tenant for tenants in asked for tenant in tenants):
            if self.named.label(tenant) == OTHER and len(self._others) < _MOST_OTHERS:
                self._others.add(tenant)

    async def run(self, read: ReadBudgets) -> None:
        """Looks until it is cancelled."""
        while True:
            await self.refresh(read)
            await asyncio.sleep(_EVERY_S)

    async def refresh(self, read: ReadBudgets) -> None:
        """Looks once; while the counters are away, nothing is told."""
        tenants = ["*", *self.named.names, *self._others]
        self._others = set()
        shares: dict[tuple[str, ...], float] = {}
        try:
            for start in range(0, len(tenants), _MOST_AT_ONCE):
                for use in await read(tenants[start : start + _MOST_AT_ONCE]):
                    tenant = use.tenant if use.tenant == "*" else self.named.label(use.tenant)
                    labels = (tenant, use.budget, use.model, "true" if use.hard else "false")
                    shares[labels] = max(use.share, shares.get(labels, 0.0))
                await asyncio.sleep(0)
        except StoreUnavailable:
            shares = {}
        self._shares = shares

    def collect(self) -> Iterable[Metric]:
        """Prometheus asks."""
        used = GaugeMetricFamily(
            "maitred_budget_used_ratio",
            "Share of a budget that is spent, or held by requests that run.",
            labels=["tenant", "budget", "model", "hard"],
        )
        for labels, share in self._shares.items():
            used.add_metric(labels, share)
        yield used
