"""Health of stores, leases and the ledger, collected for metrics and health checks."""

import logging
from collections.abc import Callable, Mapping, Sequence

from maitred.admission.admission import Admission
from maitred.app.assembly.access import AccessServices
from maitred.app.assembly.stores import GatewayStores
from maitred.core.counters import CounterState
from maitred.core.limits import Limit
from maitred.core.request import Usage
from maitred.core.usage import to_usd
from maitred.observe.metrics.budgets import BudgetUse
from maitred.observe.metrics.stores import AccountsState

log = logging.getLogger(__name__)

_NOTHING = Usage(0, 0)


class SoftBudgetAlarm:
    """Alarm that logs and counts the soft budgets that were exceeded."""

    def __init__(self) -> None:
        self.passed_count = 0

    def __call__(self, limit: Limit, counter_state: CounterState) -> None:
        """Logs that a soft budget was exceeded."""
        self.passed_count += 1
        log.warning(
            "The soft budget %s of %s was passed: %.4f of %.4f USD are spent.",
            limit.kind.value,
            limit.subject,
            to_usd(counter_state.used),
            to_usd(limit.value),
        )


class StoreHealth:
    """Reads the state of stores, leases and the ledger.

    Args:
        stores: The database, the ledger and the counters.
        access: The directory of keys and limits.
        admission: Holds the leases.
        alarm: Counts the soft budgets that were exceeded.
        output_tokens: Returns the number of output tokens of the gateway's own engines, by model.
    """

    def __init__(
        self,
        stores: GatewayStores,
        access: AccessServices,
        admission: Admission,
        alarm: SoftBudgetAlarm,
        output_tokens: Callable[[], Mapping[str, int]],
    ) -> None:
        self._stores = stores
        self._alarm = alarm
        self._access = access
        self._admission = admission
        self._output_tokens = output_tokens

    def stores_up(self) -> Mapping[str, bool]:
        """Returns whether each store answers."""
        return {
            "database": not self._access.refresher.away,
            "counters": self._stores.counters.healthy,
            "journal": self._stores.journal.healthy,
        }

    def check_stores(self) -> None:
        """Raises StoreUnavailable if every request is rejected now, for lack of a fresh directory or of the journal."""
        self._access.refresher.check()
        self._stores.journal.check()

    async def budgets(self, tenants: Sequence[str]) -> list[BudgetUse]:
        """Returns the budgets of these tenants and how far they are used; ``*`` is all tenants together.

        Raises:
            StoreUnavailable: The counters cannot be read.
        """
        uses = await self._admission.uses([name if name == "*" else f"tenant:{name}" for name in tenants])
        return [
            BudgetUse(
                tenant=use.subject.removeprefix("tenant:"),
                budget=use.limit.kind,
                model=use.limit.model or "",
                hard=use.limit.hard,
                share=use.used / use.limit.value,
            )
            for use in uses
            if use.limit.kind.spend
        ]

    def state(self) -> AccountsState:
        """Returns the state of all accounts now."""
        ledger, leases = self._stores.ledger, self._admission.leases
        recorded = ledger.token_totals()
        return AccountsState(
            leases_held=leases.active,
            leases_late=leases.late,
            backlog=ledger.backlog,
            backlog_age_s=ledger.backlog_age_s,
            directory_age_s=self._access.refresher.age_s,
            stores_up=self.stores_up(),
            recorded=recorded,
            costs_usd={model: to_usd(nusd) for model, nusd in ledger.costs_nusd().items()},
            soft_budgets_passed=self._alarm.passed_count,
            drift_tokens={
                model: tokens - recorded.get(model, _NOTHING).completion_tokens
                for model, tokens in self._output_tokens().items()
            },
        )
