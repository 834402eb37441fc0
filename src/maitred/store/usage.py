"""Usage reports: sums over the ledger, ledger entries with feedback, and both as CSV.

A time range is half open: it begins with `start_s` and ends before `end_s`, in seconds since the Unix epoch. Hours,
days and months are in UTC. Each page continues after the last row of the previous page, by the values of that row and
not by its number, so that new events neither repeat nor skip an entry.
"""

import base64
import csv
import io
import operator
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    Integer,
    String,
    cast,
    false,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
)

from maitred.core.context import Outcome
from maitred.core.errors import InvalidRequest
from maitred.core.usage import MIDDLE_SCORE, NANO, Feedback, FeedbackLabel, UsageEvent
from maitred.store.database import Database
from maitred.store.feedback import feedback_from_row
from maitred.store.schema import feedback, usage

FIELDS = ("tenant", "organisation", "key", "model", "rollout", "outcome", "cache")
"""Fields by which a report can group, and by which entries can be filtered."""
PERIODS = ("hour", "day", "month")
"""Periods by which a report can also group, such as ``2026-11-21T14:00:00Z`` or ``2026-11``.

The forms are ``2026-11-21T14:00:00Z``, ``2026-11-21`` and ``2026-11``.
"""
FILTERS = (*FIELDS, "request_id")
MAX_ROWS = 1_000
"""Largest number of rows on one page."""

# The formats are literals in the statement: with parameters, PostgreSQL would not see that the selected expression is
# the grouped one.
_SQLITE_FORMATS = {"hour": "'%Y-%m-%dT%H:00:00Z'", "day": "'%Y-%m-%d'", "month": "'%Y-%m'"}
_POSTGRES_FORMATS = {"hour": '\'YYYY-MM-DD"T"HH24:00:00"Z"\'', "day": "'YYYY-MM-DD'", "month": "'YYYY-MM'"}

_COMPARISONS = {FeedbackLabel.GOOD: operator.gt, FeedbackLabel.NEUTRAL: operator.eq, FeedbackLabel.BAD: operator.lt}
"""Comparison of a score with `MIDDLE_SCORE` that gives it a label; see `Feedback.verdict`."""

_SUM_FIELDS = ("prompt_tokens", "cached_tokens", "output_tokens", "cost_nusd")
_LINE_FIELDS = (
    "id", "request_id", "key", "tenant", "organisation", "model", "replica", "route", "outcome",
    "prompt_tokens", "cached_tokens", "output_tokens", "price", "cost_nusd", "ttft_s", "duration_s", "rollout",
    "cache_write_tokens", "cache", "saved_tokens",
)  # fmt: skip


class UsageSum(msgspec.Struct, frozen=True):
    """Row of a report: the usage of one group."""

    group: dict[str, str]
    """Value of each field or period of `group_by`."""
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Cached tokens, which are a part of the prompt tokens."""
    output_tokens: int
    cost_nusd: int
    saved_tokens: int
    """Prompt and output tokens of answers from caches, which were not computed."""
    cache_hits: int
    """Number of requests whose answers came from a cache as a whole."""
    rated: int
    """Number of requests with feedback."""
    mean_score: float | None
    """Mean score of the requests with feedback, or None if there are none."""


class UsagePage(msgspec.Struct, frozen=True):
    """Page of a usage report."""

    rows: list[UsageSum]
    next: str
    """Value of `after` for the next page; empty on the last page."""


class UsageLines(msgspec.Struct, frozen=True):
    """Page of ledger entries."""

    events: list[UsageEvent]
    feedback: Mapping[str, Feedback]
    """Maps the id of an entry to its feedback, for entries with feedback."""
    next: str
    """Value of `after` for the next page; empty on the last page."""


class UsageQueries:
    """Queries on the ledger; each raises `InvalidRequest` or `StoreUnavailable`.

    `InvalidRequest` means invalid arguments.

    Args:
        database: The database of the ledger. Events that are still in a journal are not included; these are usually the
            events of the last half second.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def report(
        self,
        start_s: float,
        end_s: float,
        *,
        group_by: Sequence[str] = (),
        filters: Mapping[str, str] | None = None,
        after: str = "",
        limit: int = 100,
    ) -> UsagePage:
        """Returns a page of sums per group, in the order of the groups.

        Args:
            start_s: Beginning of the time range.
            end_s: End of the time range.
            group_by: Any of `FIELDS` and `PERIODS`; if empty, the report has one row for all usage.
            filters: Maps any of `FILTERS` to the value that entries must have.
            after: `next` of the previous page; empty for the first page.
            limit: Largest number of rows on the page.
        """
        conditions = _conditions(start_s, end_s, filters or {})
        columns = [self._group_column(name).label(name) for name in _check_groups(group_by)]
        if after:
            conditions.append(tuple_(*columns) > decode_cursor(after, columns))
        sums = [cast(func.coalesce(func.sum(usage.c[name]), 0), BigInteger) for name in (*_SUM_FIELDS, "saved_tokens")]
        hits = func.count().filter(usage.c.cache.not_in(("", "partial")))
        feedback_columns = [func.count(feedback.c.score), func.avg(feedback.c.score)]
        query = (
            select(*columns, func.count(), *sums, hits, *feedback_columns)
            .select_from(usage.outerjoin(feedback))
            .where(*conditions)
            .limit(_check_limit(limit) + 1)
        )
        if columns:
            query = query.group_by(*columns).order_by(*columns)
        async with self._database.begin_read() as connection:
            found = (await connection.execute(query)).all()
        rows = [_row(group_by, row) for row in found[:limit]]
        return UsagePage(rows, encode_cursor(list(rows[-1].group.values())) if len(found) > limit else "")

    async def events(
        self,
        start_s: float,
        end_s: float,
        *,
        filters: Mapping[str, str] | None = None,
        verdicts: Collection[FeedbackLabel] | None = None,
        after: str = "",
        limit: int = 100,
    ) -> UsageLines:
        """Returns a page of ledger entries, newest first; the other arguments are those of `report`.

        Args:
            start_s: Beginning of the time range.
            end_s: End of the time range.
            filters: As for `report`.
            verdicts: Only entries with feedback of one of these labels; None: all entries, also without feedback.
            after: As for `report`.
            limit: As for `report`.
        """
        conditions = _conditions(start_s, end_s, filters or {})
        if verdicts is not None:
            scores = or_(false(), *(_COMPARISONS[verdict](feedback.c.score, MIDDLE_SCORE) for verdict in verdicts))
            conditions.append(usage.c.id.in_(select(feedback.c.usage).where(scores)))
        order = [usage.c.time_s, usage.c.id]
        if after:
            conditions.append(tuple_(*order) < decode_cursor(after, order))
        query = select(usage).where(*conditions).order_by(*(column.desc() for column in order))
        async with self._database.begin_read() as connection:
            found = (await connection.execute(query.limit(_check_limit(limit) + 1))).mappings().all()
            events = [UsageEvent(**{**row, "outcome": Outcome(row["outcome"])}) for row in found[:limit]]
            feedback_query = select(feedback).where(feedback.c.usage.in_([event.id for event in events]))
            feedback_rows = (await connection.execute(feedback_query)).mappings().all()
        after = encode_cursor([events[-1].time_s, events[-1].id]) if len(found) > limit else ""
        return UsageLines(events, {row["usage"]: feedback_from_row(row) for row in feedback_rows}, after)

    async def csv(
        self,
        start_s: float,
        end_s: float,
        *,
        group_by: Sequence[str] | None = None,
        filters: Mapping[str, str] | None = None,
    ) -> AsyncIterator[str]:
        """Yields all pages as CSV, one page at a time, to keep memory and transactions small.

        Costs appear twice: as `cost_nusd` and, with the same exact value, as `cost_usd`. No cell is readable as a
        formula.

        Args:
            start_s: Beginning of the time range.
            end_s: End of the time range.
            group_by: As for `report`; None gives the single entries, as `events` returns them.
            filters: As for `report`.
        """
        after = ""
        if group_by is None:
            header = csv_lines([("time", *_LINE_FIELDS, "cost_usd", "score")])
            while header or after:
                page = await self.events(start_s, end_s, filters=filters, after=after, limit=MAX_ROWS)
                yield header + csv_lines(_line(event, page.feedback.get(event.id)) for event in page.events)
                header, after = "", page.next
            return
        last_names = "cost_usd", "cache_hits", "saved_tokens", "rated", "mean_score"
        header = csv_lines([(*group_by, "requests", *_SUM_FIELDS, *last_names)])
        while header or after:
            report = await self.report(start_s, end_s, group_by=group_by, filters=filters, after=after, limit=MAX_ROWS)
            yield header + csv_lines(
                (
                    *(*row.group.values(), row.requests, *(getattr(row, name) for name in _SUM_FIELDS)),
                    *(_format_usd(row.cost_nusd), row.cache_hits, row.saved_tokens, row.rated, row.mean_score),
                )
                for row in report.rows
            )
            header, after = "", report.next

    def _group_column(self, name: str) -> ColumnElement[str]:
        if name in FIELDS:
            return usage.c[name]
        # Both databases would round a fraction of a second up, into the next period.
        if self._database.engine.dialect.name == "sqlite":
            whole_s = cast(usage.c.time_s, Integer)
            return func.strftime(
                literal_column(_SQLITE_FORMATS[name]), whole_s, literal_column("'unixepoch'"), type_=String()
            )
        time = func.timezone(literal_column("'UTC'"), func.to_timestamp(func.floor(usage.c.time_s)))
        return func.to_char(time, literal_column(_POSTGRES_FORMATS[name]), type_=String())


def _conditions(start_s: float, end_s: float, filters: Mapping[str, str]) -> list[ColumnElement[bool]]:
    if not start_s < end_s:
        raise InvalidRequest("The time range ends before it begins. Give an end that is later than the start.")
    for name in filters:
        if name not in FILTERS:
            raise InvalidRequest(f"Usage cannot be picked by {name!r}. Use {', '.join(FILTERS)}.", param=name)
    outcome = filters.get("outcome")
    if outcome is not None and outcome not in [known.value for known in Outcome]:
        raise InvalidRequest(f"No request ends as {outcome!r}. Use {', '.join(Outcome)}.", param="outcome")
    return [
        usage.c.time_s >= start_s,
        usage.c.time_s < end_s,
        *(usage.c[name] == value for name, value in filters.items()),
    ]


def _check_groups(group_by: Sequence[str]) -> Sequence[str]:
    for name in group_by:
        if name not in FIELDS and name not in PERIODS:
            choice = ", ".join((*FIELDS, *PERIODS))
            raise InvalidRequest(f"Usage cannot be grouped by {name!r}. Use {choice}.", param="group_by")
    if len(set(group_by)) < len(group_by):
        raise InvalidRequest("Usage is grouped by the same thing twice. Name each once.", param="group_by")
    return group_by


def _check_limit(limit: int) -> int:
    if not 1 <= limit <= MAX_ROWS:
        raise InvalidRequest(f"A page has 1 to {MAX_ROWS} rows.", param="limit")
    return limit


def _row(group_by: Sequence[str], row: Sequence[Any]) -> UsageSum:
    return UsageSum(dict(zip(group_by, row, strict=False)), *row[len(group_by) :])


def _line(event: UsageEvent, opinion: Feedback | None) -> tuple[object, ...]:
    time = datetime.fromtimestamp(event.time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    score = None if opinion is None else opinion.score
    return (time, *(getattr(event, name) for name in _LINE_FIELDS), _format_usd(event.cost_nusd), score)


def _format_usd(nusd: int) -> str:
    return f"{nusd // NANO}.{nusd % NANO:09d}"


_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def csv_cell(value: object) -> object:
    """Returns a value as a safe CSV cell; numbers stay numbers.

    Tenants choose the names in the ledger. A spreadsheet executes a cell that begins like a formula, so such a cell
    gets a leading apostrophe, which spreadsheets read as "this is text".
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def csv_lines(rows: Iterable[Sequence[object]]) -> str:
    """Formats rows as CSV text (RFC 4180); None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows([csv_cell(value) for value in row] for row in rows)
    return text.getvalue()


def encode_cursor(values: Sequence[str | float]) -> str:
    """Returns the cursor after a row that is sorted by these values."""
    return base64.urlsafe_b64encode(msgspec.json.encode(values)).decode().rstrip("=")


def decode_cursor(cursor: str, columns: Sequence[ColumnElement[Any]]) -> ColumnElement[Any]:
    """Returns the values of a cursor, for comparison with the columns that rows are sorted by.

    Raises:
        InvalidRequest: The text is not a cursor, or is the cursor of another query.
    """
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        values = msgspec.json.decode(text, type=list[str | float])
    except (ValueError, msgspec.DecodeError):
        raise _invalid_cursor() from None
    types = [column.type for column in columns]
    if not values or [isinstance(value, float) for value in values] != [isinstance(kind, Double) for kind in types]:
        raise _invalid_cursor()
    if any(isinstance(value, str) and "\0" in value for value in values):
        raise _invalid_cursor()  # PostgreSQL cannot store such text
    return tuple_(*(literal(value, kind) for value, kind in zip(values, types, strict=True)))


def _invalid_cursor() -> InvalidRequest:
    return InvalidRequest("This is not where a page ended. Use `next` of the page before, unchanged.", param="after")
