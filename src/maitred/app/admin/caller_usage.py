"""What a caller used and how far its limits are used, for those who may not see what others do."""

from maitred.admission.admission import Admission
from maitred.admission.limit_status import LimitUsage
from maitred.api.console import OwnModelBody, OwnUseBody
from maitred.core.clock import Clock
from maitred.core.money import usd_of
from maitred.core.tenancy import Principal
from maitred.store.usage import UsageQueries
from maitred.wire.admin.live import UseBody

_DAYS = 30
_MOST_MODELS = 1000


class CallerUsage:
    """Tells it.

    Args:
        usage: The ledger.
        admission: How far limits are used.
        clock: The time.
    """

    def __init__(self, usage: UsageQueries, admission: Admission, clock: Clock) -> None:
        self._usage = usage
        self._admission = admission
        self._clock = clock

    async def __call__(self, principal: Principal) -> OwnUseBody:
        """Of one caller.

        Raises:
            StoreUnavailable: The ledger or the counters cannot be read.
        """
        now_s = self._clock.wall_s()
        report = await self._usage.report(
            now_s - _DAYS * 86_400,
            now_s,
            group_by=["model"],
            filters={"key": principal.key},
            limit=_MOST_MODELS,
        )
        limits: dict[str, list[UseBody]] = {}
        for use in await self._admission.uses(principal.subjects[:-1]):  # what all use together is not its business
            limits.setdefault(use.subject, []).append(limit_use(use))
        models = [
            OwnModelBody(
                model=row.group["model"],
                requests=row.requests,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                cost_usd=usd_of(row.cost_nusd),
            )
            for row in report.rows
        ]
        return OwnUseBody(days=_DAYS, models=models, limits=limits)


def limit_use(use: LimitUsage) -> UseBody:
    """A limit as the API writes it: money in dollars."""
    spend = use.limit.kind.spend
    return UseBody(
        limit=use.limit.id,
        kind=use.limit.kind,
        model=use.limit.model,
        hard=use.limit.hard,
        value=usd_of(use.limit.value) if spend else use.limit.value,
        used=usd_of(use.used) if spend else use.used,
        resets_in_s=use.reset_s,
    )
