"""Reports, lines and CSV of the ledger, on both databases."""

import csv
import io
import random
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest

from maitred.core.context import Outcome
from maitred.core.errors import InvalidRequest
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.journal import Journal
from maitred.store.ledger import UsageLedger
from maitred.store.usage import UsageQueries
from tests.support.stores import DEADLINE_S
from tests.support.usage_events import SetClock, usage_event


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


EVER = (0.0, 4e9)
COUNTED = (
    *("requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost_nusd"),
    *("saved_tokens", "cache_hits"),
)


@asynccontextmanager
async def holding(config, folder, events):
    """Queries of a ledger that has these events."""
    async with open_database(config) as database:
        ledger = UsageLedger(database, Journal(folder), SetClock())
        for event in events:
            ledger.record(event)
        await ledger.close(DEADLINE_S)
        yield UsageQueries(database)


def some_events(count=300):
    """Events of several tenants over some months, with times that are close to the ends of periods."""
    chance = random.Random(3)
    ends = [at(text) for text in ("2025-11-21", "2025-12-01", "2026-01-01", "2026-02-28T23:00:00", "2028-02-29")]
    return [
        usage_event(
            number,
            time_s=chance.choice(ends) + chance.choice([-0.0004, -1e-6, 0.0, 0.4999, 0.9999996, 3_600.5, -86_400.25]),
            tenant=chance.choice(["acme", "Beta", "_c", "é", "a-b", "=1+1"]),
            model=chance.choice(["m1", "m2"]),
            key=f"k{number % 7}",
            outcome=chance.choice(list(Outcome)),
            **chance.choice(
                [
                    {},
                    {"cache": "exact", "saved_tokens": number},
                    {"cache": "coalesced", "saved_tokens": 7},
                    {"cache": "partial", "saved_tokens": 3},
                ]
            ),
        )
        for number in range(count)
    ]


def expected(events, group_by):
    """The same sums, by hand."""
    formats = {"hour": "%Y-%m-%dT%H:00:00Z", "day": "%Y-%m-%d", "month": "%Y-%m"}
    sums: dict[tuple[str, ...], Counter[str]] = {}
    for event in events:
        time = datetime.fromtimestamp(int(event.time_s), UTC)
        group = tuple(
            time.strftime(formats[name]) if name in formats else str(getattr(event, name)) for name in group_by
        )
        names = COUNTED[1:-1]
        counts = {"requests": 1, "cache_hits": int(event.cache not in ("", "partial"))}
        sums.setdefault(group, Counter()).update({name: getattr(event, name) for name in names} | counts)
    return sums


def found(rows):
    return {
        tuple(row.group.values()): Counter(
            {name: getattr(row, name) for name in COUNTED},
        )
        for row in rows
    }


@pytest.mark.parametrize(
    "group_by",
    [
        (),
        ("tenant",),
        ("organisation", "key"),
        ("outcome",),
        ("cache", "model"),
        ("hour",),
        ("day", "model"),
        ("month", "tenant", "outcome"),
    ],
)
async def test_reports_sum_what_is_there(store_config, tmp_path, group_by):
    events = some_events()
    async with holding(store_config, tmp_path / "journal", events) as queries:
        whole = await queries.report(*EVER, group_by=group_by, limit=1_000)
        assert whole.next == ""
        assert found(whole.rows) == expected(events, group_by)
        assert all(tuple(row.group) == group_by for row in whole.rows)
        pages, after = [], ""
        while True:
            page = await queries.report(*EVER, group_by=group_by, limit=3, after=after)
            assert len(page.rows) <= 3
            pages += page.rows
            after = page.next
            if not after:
                break
        assert pages == whole.rows


async def test_a_time_range_is_half_open_and_filters_pick(store_config, tmp_path):
    events = [usage_event(number, time_s=1_000.0 + number, tenant=f"t{number % 2}") for number in range(10)]
    async with holding(store_config, tmp_path / "journal", events) as queries:
        (row,) = (await queries.report(1_002.0, 1_006.0)).rows
        assert row.requests == 4
        (row,) = (await queries.report(1_002.0, 1_006.0, filters={"tenant": "t1", "outcome": "finished"})).rows
        assert (row.requests, row.cost_nusd) == (2, 1_003 + 1_005)
        assert (await queries.events(*EVER, filters={"cache": "exact"})).events == []
        lines = await queries.events(1_000.0, 2_000.0, filters={"request_id": "req-7"})
        assert lines.events == [events[7]]


async def test_a_report_of_nothing(store_config, tmp_path):
    async with holding(store_config, tmp_path / "journal", []) as queries:
        (row,) = (await queries.report(*EVER)).rows
        assert (row.group, row.requests, row.cost_nusd) == ({}, 0, 0)
        assert (await queries.report(*EVER, group_by=("day",))).rows == []
        assert (await queries.events(*EVER)).events == []
        assert [chunk async for chunk in queries.csv(*EVER, group_by=("day",))] == [
            "day,requests,prompt_tokens,cached_tokens,output_tokens,cost_nusd,cost_usd,cache_hits,saved_tokens,rated,"
            "mean_score\r\n"
        ]


async def test_lines_come_newest_first_and_whole(store_config, tmp_path):
    events = some_events(100)
    async with holding(store_config, tmp_path / "journal", events) as queries:
        listed, after = [], ""
        while True:
            page = await queries.events(*EVER, limit=7, after=after)
            listed += page.events
            after = page.next
            if not after:
                break
    assert listed == sorted(events, key=lambda event: (event.time_s, event.id), reverse=True)


async def test_csv_streams_every_line_with_harmless_cells(store_config, tmp_path):
    events = some_events(2_500)
    async with holding(store_config, tmp_path / "journal", events) as queries:
        chunks = [chunk async for chunk in queries.csv(*EVER)]
        sums = "".join([chunk async for chunk in queries.csv(*EVER, group_by=("tenant", "month"))])
    assert len(chunks) == 3
    rows = list(csv.DictReader(io.StringIO("".join(chunks), newline="")))
    assert sorted(row["id"] for row in rows) == [event.id for event in events]
    assert {row["tenant"] for row in rows} == {"acme", "Beta", "_c", "é", "a-b", "'=1+1"}
    assert rows[0]["cost_usd"] == f"0.{int(rows[0]['cost_nusd']):09d}"
    assert rows[0]["time"].startswith("2028-02-29T01:00:00.5")
    report = list(csv.DictReader(io.StringIO(sums, newline="")))
    assert sum(int(row["requests"]) for row in report) == 2_500
    assert sum(int(row["cost_nusd"]) for row in report) == sum(event.cost_nusd for event in events)


@pytest.mark.parametrize(
    "arguments",
    [
        {"group_by": ("colour",)},
        {"group_by": ("day", "day")},
        {"filters": {"colour": "red"}},
        {"filters": {"outcome": "lost"}},
        {"limit": 0},
        {"limit": 1_001},
        {"after": "x"},
        {"after": "%%%", "group_by": ("day",)},
        {"after": "WzFd", "group_by": ("day",)},
        {"after": "WyJhIiwiYiJd", "group_by": ("day",)},
        {"after": "ü", "group_by": ("day",)},
        {"after": "WyJcdTAwMDAiXQ", "group_by": ("outcome",)},
    ],
)
async def test_a_query_that_makes_no_sense_is_refused_with_the_reason(tmp_path, arguments):
    async with holding(StoreConfig(folder=str(tmp_path), deadline_s=DEADLINE_S), tmp_path / "journal", []) as queries:
        with pytest.raises(InvalidRequest):
            await queries.report(*EVER, **arguments)


async def test_a_range_that_ends_before_it_begins_is_refused(store_config, tmp_path):
    async with holding(store_config, tmp_path / "journal", []) as queries:
        with pytest.raises(InvalidRequest, match="later than the start"):
            await queries.events(2.0, 1.0)
        with pytest.raises(InvalidRequest):
            await queries.events(*EVER, after="WyJhIiwiYiJd")
