"""Routes of the usage ledger: sums of the usage, and single ledger entries."""

from maitred.api.admin.directory_admin import DirectoryAdmin
from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import InvalidRequest
from maitred.core.tenancy import Scope
from maitred.core.usage import FeedbackLabel, to_usd
from maitred.store.usage import FIELDS, PERIODS, UsageQueries
from maitred.wire.admin import rules
from maitred.wire.admin.decode import decode_query
from maitred.wire.admin.requests import UsageEventsQuery, UsageQuery
from maitred.wire.admin.responses import UsageEventBody, UsageEventList, UsageReport, UsageRow
from maitred.wire.admin.times import parse_query_time, to_iso
from maitred.wire.openai.faults import format_value

PATH = "/admin/v1/usage"
GROUPS = (*FIELDS, *PERIODS)
_FILTERS = (*FIELDS, "request_id")
_ANY = "any"
_CSV = b"text/csv; charset=utf-8"


class UsageRoutes:
    """Admin routes of usage.

    Args:
        admin: The parts that admin routes share.
        usage: Queries of the usage ledger.
    """

    def __init__(self, admin: DirectoryAdmin, usage: UsageQueries) -> None:
        self._admin = admin
        self._usage = usage

    def routes(self) -> list[Route]:
        """Returns the routes in the order of the documentation."""
        needs = Scope.ADMIN
        events, lines = f"{PATH}/events", "Usage, line by line, the newest first."
        return [
            Route(
                *("GET", PATH, self.report, "Usage, in sums."),
                returns=UsageReport,
                query=UsageQuery,
                also="text/csv",
                needs=needs,
            ),
            Route("GET", events, self.events, lines, returns=UsageEventList, query=UsageEventsQuery, needs=needs),
        ]

    async def report(self, exchange: HttpExchange) -> None:
        """Answers with sums of the usage: one page as JSON, or all of them as CSV."""
        query = decode_query(exchange.query, UsageQuery)
        rules.check_page(query.limit, query.after)
        groups = _groups_in(query.group_by)
        start_s, end_s = self._span(query)
        filters = _filters_in(query)
        if query.format == "csv":
            pieces = [piece async for piece in self._usage.csv(start_s, end_s, group_by=groups, filters=filters)]
            await exchange.respond("".join(pieces).encode("utf-8", "replace"), content_type=_CSV)
            return
        if query.format != "json":
            raise InvalidRequest(f"format must be json or csv; got {format_value(query.format)}.", param="format")
        page = await self._usage.report(
            start_s, end_s, group_by=groups, filters=filters, after=query.after, limit=query.limit
        )
        data = [
            UsageRow(
                **row.group,
                requests=row.requests,
                prompt_tokens=row.prompt_tokens,
                cached_tokens=row.cached_tokens,
                output_tokens=row.output_tokens,
                cost_usd=to_usd(row.cost_nusd),
                cache_hits=row.cache_hits,
                saved_tokens=row.saved_tokens,
                rated=row.rated,
                mean_score=None if row.mean_score is None else round(row.mean_score, 4),
            )
            for row in page.rows
        ]
        answer = UsageReport(
            start=to_iso(start_s),
            end=to_iso(end_s),
            group_by=groups,
            data=data,
            has_more=bool(page.next),
            next=page.next or None,
        )
        await self._admin.reply(exchange, answer)

    async def events(self, exchange: HttpExchange) -> None:
        """Answers with a page of ledger entries."""
        query = decode_query(exchange.query, UsageEventsQuery)
        rules.check_page(query.limit, query.after)
        start_s, end_s = self._span(query)
        page = await self._usage.events(
            start_s,
            end_s,
            filters=_filters_in(query),
            verdicts=_verdicts_in(query.feedback),
            after=query.after,
            limit=query.limit,
        )
        data = [UsageEventBody.of(event, page.feedback.get(event.id)) for event in page.events]
        await self._admin.reply(exchange, UsageEventList(data=data, has_more=bool(page.next), next=page.next or None))

    def _span(self, query: UsageQuery | UsageEventsQuery) -> tuple[float, float]:
        now_s = self._admin.now_s()
        start_s, end_s = parse_query_time("start", query.start, now_s), parse_query_time("end", query.end, now_s)
        if start_s >= end_s:
            raise InvalidRequest("start must be earlier than end.", param="start")
        return start_s, end_s


def _filters_in(query: UsageQuery | UsageEventsQuery) -> dict[str, str]:
    given = {name: getattr(query, name, None) for name in _FILTERS}
    filters = {name: value for name, value in given.items() if value is not None}
    for name, value in filters.items():
        rules.check_filter(name, value)
    return filters


def _verdicts_in(feedback: str | None) -> list[FeedbackLabel] | None:
    """Returns the labels that `feedback` asks for; None: it is not asked for."""
    if feedback is None:
        return None
    if feedback == _ANY:
        return [*FeedbackLabel]
    if feedback not in [*FeedbackLabel]:
        raise InvalidRequest(
            f"feedback must be {_ANY}, {', '.join(FeedbackLabel)}; got {format_value(feedback)}.", param="feedback"
        )
    return [FeedbackLabel(feedback)]


def _groups_in(text: str) -> list[str]:
    groups = [name.strip() for name in text.split(",")] if text else []
    for position, name in enumerate(groups):
        if name not in GROUPS:
            raise InvalidRequest(
                f"group_by must hold some of {', '.join(GROUPS)}, with commas; got {format_value(name)}.",
                param="group_by",
            )
        if name in groups[:position]:
            raise InvalidRequest(f"group_by names {name} twice. Name it once.", param="group_by")
    return groups
