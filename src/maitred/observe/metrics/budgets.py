"""Metrics of budget use: of the whole installation, of named tenants, and of the fullest other tenant.

Budgets are counted in a store that all gateways share. So their state is read periodically in batches instead of
request by request: this includes the spending of other gateways and the start of a new day. Only tenants that have sent
requests since the start are read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maitred.core.context import RequestContext
from maitred.core.errors import StoreUnavailable
from maitred.observe.metrics.requests import OTHER, LabelCap
from maitred.observe.observer_batch import ObserverBatch

_INTERVAL_S = 15.0
_MAX_PER_BATCH = 200
"""Tenants whose budgets are read before other tasks may run."""
_MAX_OTHERS = 1_000
"""Most unnamed tenants whose budgets are read in one round."""


class BudgetUse(NamedTuple):
    """Use of one budget of one tenant."""

    tenant: str
    """Id of the tenant; ``*``: the whole installation."""
    budget: str
    """Kind of the budget, such as ``usd_per_day``."""
    model: str
    """Model of the budget; empty: all models."""
    hard: bool
    share: float
    """Share that is spent, or held by running requests; above 1 where a soft budget was exceeded."""


ReadBudgets = Callable[[Sequence[str]], Awaitable[Sequence[BudgetUse]]]
"""Function that reads the budgets of tenants, and for ``*`` those of the installation; may raise StoreUnavailable."""


class BudgetMetrics(Collector):
    """Metrics of budget use. Implements `maitred.core.context.RequestObserver`.

    Args:
        max_named: Largest number of tenants with series of their own, organisations and teams together.
        batch: Batch that delivers ended requests; its pending requests are delivered before budgets are read.

    Attributes:
        tenant_labels: Tenants that have series of their own.
    """

    def __init__(self, max_named: int, batch: ObserverBatch) -> None:
        self._batch = batch
        self.tenant_labels = LabelCap(max_named)
        self._others: set[str] = set()
        self._shares: dict[tuple[str, ...], float] = {}

    def on_request_end(self, *contexts: RequestContext) -> None:
        """Notes the tenants of ended requests."""
        tenant_paths = [
            context.principal.tenants for context in contexts if context.principal is not None and context.model
        ]
        for tenant in dict.fromkeys(tenant for tenants in tenant_paths for tenant in tenants):
            if self.tenant_labels.label(tenant) == OTHER and len(self._others) < _MAX_OTHERS:
                self._others.add(tenant)

    async def run(self, read: ReadBudgets) -> None:
        """Reads the budgets periodically until it is cancelled."""
        while True:
            await self.refresh(read)
            await asyncio.sleep(_INTERVAL_S)

    async def refresh(self, read: ReadBudgets) -> None:
        """Reads the budgets once; while the counters are unavailable, no series are shown."""
        self._batch.flush_pending()
        tenants = ["*", *self.tenant_labels.names, *self._others]
        self._others = set()
        shares: dict[tuple[str, ...], float] = {}
        try:
            for start in range(0, len(tenants), _MAX_PER_BATCH):
                for use in await read(tenants[start : start + _MAX_PER_BATCH]):
                    tenant = use.tenant if use.tenant == "*" else self.tenant_labels.label(use.tenant)
                    labels = (tenant, use.budget, use.model, "true" if use.hard else "false")
                    shares[labels] = max(use.share, shares.get(labels, 0.0))
                await asyncio.sleep(0)
        except StoreUnavailable:
            shares = {}
        self._shares = shares

    def collect(self) -> Iterable[Metric]:
        """Collects the shares for Prometheus."""
        used = GaugeMetricFamily(
            "maitred_budget_used_ratio",
            "Share of a budget that is spent, or held by requests that run.",
            labels=["tenant", "budget", "model", "hard"],
        )
        for labels, share in self._shares.items():
            used.add_metric(labels, share)
        yield used
