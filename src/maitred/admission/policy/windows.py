"""The windows of budgets: days, weeks that begin on Monday, and months, all of UTC; or no window at all.

A pure package may not ask the `datetime` module for the time, so the calendar is a few lines of arithmetic here. It is
the proleptic Gregorian calendar counted in days since 1970-01-01, after Howard Hinnant, "chrono-Compatible Low-Level
Date Algorithms" (``civil_from_days``): years begin in March, so that the leap day comes last.
"""

import msgspec

from maitred.core.limits import LimitKind

_DAY_S = 86_400
_ERA_DAYS = 146_097
"""Days in 400 years, after which the calendar repeats."""
_FROM_MARCH_0000 = 719_468
"""Days from 0000-03-01 to 1970-01-01."""


class BudgetWindow(msgspec.Struct, frozen=True):
    """One window: its name is part of a counter's name, so a new window is a new counter."""

    name: str
    """``2026-11-21`` (of a week: its Monday), ``2026-11``, or ``total``."""
    ends_s: float | None
    """Wall time; None: never."""


def day_at(wall_s: float) -> int:
    """The day that a time lies in, counted from 1970-01-01."""
    return int(wall_s // _DAY_S)


def window_on(kind: LimitKind, day: int) -> BudgetWindow:
    """The window of this kind of budget that a day lies in."""
    if kind is LimitKind.USD_TOTAL:
        return BudgetWindow("total", None)
    if kind is LimitKind.USD_PER_DAY:
        return BudgetWindow(_written(day), float((day + 1) * _DAY_S))
    if kind is LimitKind.USD_PER_WEEK:
        monday = day - (day + 3) % 7  # 1970-01-01 was a Thursday
        return BudgetWindow(_written(monday), float((monday + 7) * _DAY_S))
    year, month, date = _date_of(day)
    first = day - (date - 1)
    after = first + 31
    next_first = after - (_date_of(after)[2] - 1)
    return BudgetWindow(f"{year:04}-{month:02}", float(next_first * _DAY_S))


def _written(day: int) -> str:
    year, month, date = _date_of(day)
    return f"{year:04}-{month:02}-{date:02}"


def _date_of(day: int) -> tuple[int, int, int]:
    """Year, month and day of the month, of a day counted from 1970-01-01."""
    era, day_of_era = divmod(day + _FROM_MARCH_0000, _ERA_DAYS)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_from_march = (5 * day_of_year + 2) // 153
    date = day_of_year - (153 * month_from_march + 2) // 5 + 1
    month = month_from_march + 3 if month_from_march < 10 else month_from_march - 9
    return year_of_era + era * 400 + (month <= 2), month, date
