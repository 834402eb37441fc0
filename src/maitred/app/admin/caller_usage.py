"""Usage and limits of one API key, for clients that may see no others."""

from maitred.admission.admission import Admission
from maitred.admission.limit_status import LimitUsage
from maitred.api.console import OwnModelBody, OwnUseBody
from maitred.core.clock import Clock
from maitred.core.tenancy import Principal
from maitred.core.usage import to_usd
from maitred.store.usage import UsageQueries
from maitred.wire.admin.live import UseBody

_REPORT_DAYS = 30
_MAX_MODELS = 1000


class CallerUsage:
    """Reports the usage and the limits of a principal.

    Args:
        usage: Queries of the usage ledger.
        admission: Returns how far limits are used.
        clock: The clock.
    """

    def __init__(self, usage: UsageQueries, admission: Admission, clock: Clock) -> None:
        self._usage = usage
        self._admission = admission
        self._clock = clock

    async def __call__(self, principal: Principal) -> OwnUseBody:
        """Returns the usage and the limits of one principal.

        Raises:
            StoreUnavailable: The ledger or the counters cannot be read.
        """
        now_s = self._clock.wall_s()
        report = await self._usage.report(
            now_s - _REPORT_DAYS * 86_400,
            now_s,
            group_by=["model"],
            filters={"key": principal.key},
            limit=_MAX_MODELS,
        )
        limits: dict[str, list[UseBody]] = {}
        for use in await self._admission.uses(principal.subjects[:-1]):  # not the limits that all tenants share
            limits.setdefault(use.subject, []).append(limit_use_body(use))
        models = [
            OwnModelBody(
                model=row.group["model"],
                requests=row.requests,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                cost_usd=to_usd(row.cost_nusd),
            )
            for row in report.rows
        ]
        return OwnUseBody(days=_REPORT_DAYS, models=models, limits=limits)


def limit_use_body(use: LimitUsage) -> UseBody:
    """Builds the body of one limit's use, with money in dollars."""
    spend = use.limit.kind.spend
    return UseBody(
        limit=use.limit.id,
        kind=use.limit.kind,
        model=use.limit.model,
        hard=use.limit.hard,
        value=to_usd(use.limit.value) if spend else use.limit.value,
        used=to_usd(use.used) if spend else use.used,
        resets_in_s=use.reset_s,
    )
