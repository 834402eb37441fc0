"""Routes of LiteLLM's `/spend/logs` and `/global/spend`, from the ledger."""

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.exchange import HttpExchange
from maitred.api.litellm.accounts import LitellmAccounts
from maitred.api.litellm.dialect import answer, litellm_route
from maitred.api.routes import Route
from maitred.core.context import Outcome
from maitred.core.errors import InvalidRequest
from maitred.core.usage import UsageEvent, to_usd
from maitred.store.usage import MAX_ROWS, UsageQueries
from maitred.wire.admin.decode import decode_query
from maitred.wire.admin.times import to_iso
from maitred.wire.litellm.ids import USER_PREFIX, is_team, tenant_id_of, user_id_of
from maitred.wire.litellm.requests import NoQuery, SpendQuery
from maitred.wire.openai.faults import format_value

_MOST_LOGS = 10_000
"""Most lines of one answer, which has no pages."""


class LitellmSpendRoutes:
    """Routes of what was spent.

    Args:
        accounts: Keys, teams, users and budgets.
        admin: The parts that admin routes share.
        usage: Queries of the usage ledger.
    """

    def __init__(self, accounts: LitellmAccounts, admin: DirectoryAdmin, usage: UsageQueries) -> None:
        self._accounts = accounts
        self._admin = admin
        self._usage = usage

    def routes(self) -> list[Route]:
        """Returns the routes in the order of their paths."""
        return [
            litellm_route("GET", "/spend/logs", self.logs, query=SpendQuery),
            litellm_route("GET", "/global/spend", self.total, query=NoQuery),
        ]

    async def total(self, exchange: HttpExchange) -> None:
        """Answers with what all have spent, and the budget of all together."""
        decode_query(exchange.query, NoQuery)
        row = (await self._usage.report(0, self._admin.now_s() + 1)).rows[0]
        fields = await self._accounts.limit_fields("*", {})
        await answer(exchange, {"spend": to_usd(row.cost_nusd), "max_budget": fields["max_budget"] or 0.0})

    async def logs(self, exchange: HttpExchange) -> None:
        """Answers with the lines of the ledger, or with sums by day where dates are given."""
        query = decode_query(exchange.query, SpendQuery)
        start_s, end_s = _range_of(query, self._admin.now_s())
        filters: dict[str, str] = {}
        if query.api_key is not None:
            row = await self._accounts.find(query.api_key)
            filters["tenant" if row.owns_tenant else "key"] = row.tenant.id if row.owns_tenant else row.key.id
        if query.user_id is not None and query.team_id is not None:
            raise InvalidRequest("Send user_id or team_id: a key belongs to one of them.", param="team_id")
        if query.user_id is not None:
            filters["organisation"] = tenant_id_of(query.user_id, USER_PREFIX)
        if query.team_id is not None:
            filters["organisation"] = tenant_id_of(query.team_id)
        if query.request_id is not None:
            filters["request_id"] = query.request_id
        if query.start_date is not None and query.summarize:
            await answer(exchange, await self._days(start_s, end_s, filters))
            return
        events: list[UsageEvent] = []
        after = ""
        while len(events) < _MOST_LOGS:
            page = await self._usage.events(start_s, end_s, filters=filters, after=after, limit=MAX_ROWS)
            events += page.events
            if not (after := page.next):
                break
        else:
            raise InvalidRequest(
                f"There are more than {_MOST_LOGS:,} lines. Send start_date and end_date, or page through "
                "GET /admin/v1/usage/events.",
                param="start_date",
            )
        tokens = {row.key.id: row.token async for row in self._accounts.live_keys()}
        users = {tenant.id: user_id_of(tenant) async for tenant in self._accounts.tenants() if tenant.parent is None}
        await answer(exchange, [_line(event, tokens, users) for event in events])

    async def _days(self, start_s: float, end_s: float, filters: dict[str, str]) -> list[dict[str, Any]]:
        days: dict[str, dict[str, Any]] = {}
        after = ""
        while True:
            page = await self._usage.report(
                start_s, end_s, group_by=["day", "model", "key"], filters=filters, after=after, limit=MAX_ROWS
            )
            for row in page.rows:
                usd = to_usd(row.cost_nusd)
                day = days.setdefault(row.group["day"], {"spend": 0.0, "users": {}, "models": defaultdict(float)})
                day["spend"] += usd
                day["models"][row.group["model"]] += usd
                day[row.group["key"]] = day.get(row.group["key"], 0.0) + usd
            if not (after := page.next):
                return [{"startTime": name, **day} for name, day in sorted(days.items())]


def _range_of(query: SpendQuery, now_s: float) -> tuple[float, float]:
    if (query.start_date is None) != (query.end_date is None):
        raise InvalidRequest("Send both start_date and end_date, or neither.", param="start_date")
    if query.start_date is None or query.end_date is None:
        return 0.0, now_s + 1
    end = _date("end_date", query.end_date) + timedelta(days=1)
    return _date("start_date", query.start_date).timestamp(), end.timestamp()


def _date(name: str, text: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise InvalidRequest(f"{name} must be a date, as 2026-11-21; got {format_value(text)}.", param=name) from None


def _line(event: UsageEvent, tokens: dict[str, str], users: dict[str, str | None]) -> dict[str, Any]:
    start_s = event.time_s - event.duration_s
    first = None if event.ttft_s is None else to_iso(start_s + event.ttft_s)
    return {
        "request_id": event.request_id,
        "call_type": event.route,
        "api_key": tokens.get(event.key, event.key),
        "spend": to_usd(event.cost_nusd),
        "total_tokens": event.prompt_tokens + event.output_tokens,
        "prompt_tokens": event.prompt_tokens,
        "completion_tokens": event.output_tokens,
        "startTime": to_iso(start_s),
        "endTime": to_iso(event.time_s),
        "completionStartTime": first,
        "model": event.model,
        "model_group": event.model,
        "model_id": event.replica,
        "api_base": "",
        "user": users.get(event.organisation) or "",
        "team_id": event.organisation if is_team(event.organisation) else None,
        "metadata": {},
        "request_tags": [],
        "cache_hit": "True" if event.cache else "False",
        "status": "success" if event.outcome is Outcome.FINISHED else "failure",
    }
