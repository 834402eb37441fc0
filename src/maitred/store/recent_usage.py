"""Recent usage of rates, read back from the ledger when a gateway starts.

A ledger entry has the amounts that its request took and the time when the request *ended*, but the bucket gave the
tokens when the request began. Subtracting these amounts at the end time instead never makes a bucket fuller than it
really was: between the two times it refills as if nothing had been taken, but then it is full sooner, and a full bucket
gains nothing. Rounding times up has an error in the same direction.

Usage before `RecentRateUsage.since_s` is unknown, so a gateway that starts from this record assumes empty buckets at
that time. An empty bucket is never more than the real one, and it makes no difference to a bucket that has been full at
any time since.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Text, cast, select, tuple_

from maitred.store.database import Database
from maitred.store.schema import usage

_PAGE_LINES = 20_000
"""Number of ledger entries that one transaction reads, so that none reaches its deadline."""
_MAX_LINES = 200_000
"""Largest number of ledger entries that are read, which takes about two seconds."""
_decode = msgspec.json.Decoder(dict[str, int]).decode


class RecentRateUsage(msgspec.Struct, frozen=True):
    """Recent usage of rates, by counter and time."""

    since_s: float
    """Wall time from which all usage is known; -inf if all usage is known."""
    counters: Mapping[str, Sequence[tuple[float, int]]]
    """Maps each counter to ascending wall times with the amount that was taken at each."""


async def read_rate_usage(database: Database, since_s: float, max_lines: int = _MAX_LINES) -> RecentRateUsage:
    """Sums the rate usage per second of requests that ended since a time, from the newest entry on.

    Each counter has at most one pair for each second, for any number of requests.

    Args:
        database: The database of the ledger.
        since_s: Wall time.
        max_lines: Largest number of ledger entries to read.

    Raises:
        StoreUnavailable: The database cannot be read.
    """
    sums = _SecondSums()
    order = (usage.c.time_s, usage.c.id)
    newest = select(*order, cast(usage.c.taken, Text)).order_by(*(column.desc() for column in order))
    page, remaining_lines = newest, max_lines
    while remaining_lines > 0:
        async with database.begin_read() as connection:
            rows = (await connection.execute(page.limit(min(remaining_lines, _PAGE_LINES)))).all()
        for time_s, _, taken in rows:
            if time_s < since_s:
                return RecentRateUsage(since_s, sums.ascending())
            sums.add(time_s, _decode(taken))
        if len(rows) < min(remaining_lines, _PAGE_LINES):
            return RecentRateUsage(-math.inf, sums.ascending())
        remaining_lines -= len(rows)
        page = newest.where(tuple_(*order) < (rows[-1].time_s, rows[-1].id))
    return RecentRateUsage(rows[-1].time_s, sums.ascending())


class _SecondSums:
    """Sums of usage for each second, added from the newest second to the oldest."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[float, int]]] = {}
        self._second = math.inf
        self._sums: dict[str, int] = {}

    def add(self, time_s: float, taken: Mapping[str, int]) -> None:
        if time_s <= self._second - 1:
            self._finish_second()
            self._second = math.ceil(time_s)
        sums = self._sums
        for counter, amount in taken.items():
            sums[counter] = sums.get(counter, 0) + amount

    def ascending(self) -> dict[str, list[tuple[float, int]]]:
        self._finish_second()
        for pairs in self._pairs.values():
            pairs.reverse()
        return self._pairs

    def _finish_second(self) -> None:
        for counter, amount in self._sums.items():
            self._pairs.setdefault(counter, []).append((self._second, amount))
        self._sums = {}
