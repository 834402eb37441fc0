"""What requests took from rates lately, read back from the ledger when a gateway starts.

A line says what its request took, and when the request *ended*, while the bucket gave the tokens when it began. Taking
them at the end instead leaves a bucket no fuller than it was: between the two it refills as if nothing had been taken,
but then it is full sooner, and a full bucket gains nothing. Rounding times up errs to the same side.

What was taken before is not known, so whoever begins with this begins with empty buckets at `RecentRateUsage.since_s`.
That can only be less than there was, and makes no difference to a bucket that has been full since.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Text, cast, select, tuple_

from maitred.store.database import Database
from maitred.store.schema import usage

_PAGE = 20_000
"""Lines in one transaction, so that none meets its deadline."""
_MOST_LINES = 200_000
"""Some two seconds' work."""
_decode = msgspec.json.Decoder(dict[str, int]).decode


class RecentRateUsage(msgspec.Struct, frozen=True):
    """What was taken from rates."""

    since_s: float
    """Wall time from which on everything is known; -inf: since ever."""
    counters: Mapping[str, Sequence[tuple[float, int]]]
    """Counter -> wall times, ascending, and what was taken at each."""


async def taken_since(database: Database, since_s: float, most_lines: int = _MOST_LINES) -> RecentRateUsage:
    """What lines of the ledger say that ended since then, summed up second by second; the newest, if there are many.

    A counter has at most one pair for each second, however many requests there were.

    Args:
        database: Where the ledger is.
        since_s: Wall time.
        most_lines: To read.

    Raises:
        StoreUnavailable: It cannot be read.
    """
    sums = _Sums()
    order = (usage.c.time_s, usage.c.id)
    newest = select(*order, cast(usage.c.taken, Text)).order_by(*(column.desc() for column in order))
    page, left = newest, most_lines
    while left > 0:
        async with database.reading() as connection:
            rows = (await connection.execute(page.limit(min(left, _PAGE)))).all()
        for time_s, _, taken in rows:
            if time_s < since_s:
                return RecentRateUsage(since_s, sums.ascending())
            sums.add(time_s, _decode(taken))
        if len(rows) < min(left, _PAGE):
            return RecentRateUsage(-math.inf, sums.ascending())
        left -= len(rows)
        page = newest.where(tuple_(*order) < (rows[-1].time_s, rows[-1].id))
    return RecentRateUsage(rows[-1].time_s, sums.ascending())


class _Sums:
    """Sums for each second, which come one after the other, backwards."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[float, int]]] = {}
        self._second = math.inf
        self._sums: dict[str, int] = {}

    def add(self, time_s: float, taken: Mapping[str, int]) -> None:
        if time_s <= self._second - 1:
            self._end()
            self._second = math.ceil(time_s)
        sums = self._sums
        for counter, amount in taken.items():
            sums[counter] = sums.get(counter, 0) + amount

    def ascending(self) -> dict[str, list[tuple[float, int]]]:
        self._end()
        for pairs in self._pairs.values():
            pairs.reverse()
        return self._pairs

    def _end(self) -> None:
        for counter, amount in self._sums.items():
            self._pairs.setdefault(counter, []).append((self._second, amount))
        self._sums = {}
