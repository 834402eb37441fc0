"""The calendar of budgets, against that of the standard library."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.admission.policy.claims import BudgetWindow, day_at, window_on
from maitred.core.limits import LimitKind


def wall(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("kind", "now", "name", "ends"),
    [
        ("usd_per_day", "2026-11-21T15:00:00", "2026-11-21", "2026-11-22"),
        ("usd_per_day", "2026-11-21T23:59:59.999", "2026-11-21", "2026-11-22"),
        ("usd_per_day", "2026-11-22T00:00:00", "2026-11-22", "2026-11-23"),
        ("usd_per_week", "2026-11-22T23:59:59", "2026-11-16", "2026-11-23"),  # a Sunday
        ("usd_per_week", "2026-11-23T00:00:00", "2026-11-23", "2026-11-30"),  # a Monday
        ("usd_per_week", "2027-01-01T00:00:00", "2026-12-28", "2027-01-04"),
        ("usd_per_month", "2026-11-30T23:59:59", "2026-11", "2026-12-01"),
        ("usd_per_month", "2026-12-01T00:00:00", "2026-12", "2027-01-01"),
        ("usd_per_month", "2028-02-29T12:00:00", "2028-02", "2028-03-01"),
    ],
)
def test_windows(kind, now, name, ends):
    assert window_on(LimitKind(kind), day_at(wall(now))) == BudgetWindow(name, wall(ends))


def test_a_total_has_no_end():
    assert window_on(LimitKind.USD_TOTAL, day_at(wall("2026-11-21"))) == BudgetWindow("total", None)


@given(st.datetimes(datetime(1970, 1, 1), datetime(2399, 12, 30)))
def test_the_calendar_is_the_real_one(moment):
    moment = moment.replace(tzinfo=UTC)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    monday = midnight - timedelta(days=moment.weekday())
    next_month = (midnight.replace(day=1) + timedelta(days=31)).replace(day=1)
    expected = {
        LimitKind.USD_PER_DAY: (f"{moment:%Y-%m-%d}", midnight + timedelta(days=1)),
        LimitKind.USD_PER_WEEK: (f"{monday:%Y-%m-%d}", monday + timedelta(days=7)),
        LimitKind.USD_PER_MONTH: (f"{moment:%Y-%m}", next_month),
    }
    for kind, (name, ends) in expected.items():
        assert window_on(kind, day_at(moment.timestamp())) == BudgetWindow(name, ends.timestamp())
