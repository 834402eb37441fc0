"""Times as the administration's API writes and reads them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import InvalidRequest
from maitred.wire.admin.times import MAX_TIME_S, parse_query_time, parse_time, to_iso

NOW_S = 1_795_276_800.0  # 2026-11-21T16:00:00Z


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (NOW_S, "2026-11-21T16:00:00Z"),
        (NOW_S + 0.25, "2026-11-21T16:00:00.250Z"),
        (0, "1970-01-01T00:00:00Z"),
        (-5, "1970-01-01T00:00:00Z"),
        (MAX_TIME_S, "9999-12-31T23:59:59Z"),
        (1e300, "9999-12-31T23:59:59Z"),
    ],
)
def test_times_are_written_in_utc(time_s, text):
    assert to_iso(time_s) == text


@given(st.integers(0, int(MAX_TIME_S)))
def test_what_is_written_can_be_read(time_s):
    assert parse_time("start", to_iso(time_s)) == time_s
    assert parse_query_time("start", to_iso(time_s), 0.0) == time_s


@pytest.mark.parametrize(
    ("value", "time_s"),
    [
        ("2026-11-21T16:00:00Z", NOW_S),
        ("2026-11-21T16:00:00", NOW_S),
        ("2026-11-21 16:00:00", NOW_S),
        ("2026-11-21T18:00:00+02:00", NOW_S),
        ("2026-11-21", NOW_S - 16 * 3600),
        (NOW_S, NOW_S),
        (int(NOW_S), NOW_S),
        (0, 0),
    ],
)
def test_bodies_give_iso_or_the_epoch(value, time_s):
    assert parse_time("expires_at", value) == time_s


@pytest.mark.parametrize(
    ("text", "time_s"),
    [
        ("now", NOW_S),
        ("-7d", NOW_S - 7 * 86_400),
        ("-90m", NOW_S - 5400),
        ("-2w", NOW_S - 14 * 86_400),
        ("-999999999w", 0.0),
        ("1795276800", NOW_S),
        ("1795276800.5", NOW_S + 0.5),
        ("2026-11-21T18:00:00 02:00", NOW_S),  # an unescaped plus
        ("2026-11-21T18:00:00+02:00", NOW_S),
    ],
)
def test_queries_give_more(text, time_s):
    assert parse_query_time("start", text, NOW_S) == time_s


@pytest.mark.parametrize(
    "value",
    ["", "tomorrow", "-7d", "2026-13-01", "0001-01-01T00:00:00+23:00", "2026-11-21T16:00:00Z" * 100_000, "\0", "٣"],
)
def test_other_texts_are_no_times(value):
    with pytest.raises(InvalidRequest, match="expires_at must") as caught:
        parse_time("expires_at", value)
    assert caught.value.param == "expires_at"


@pytest.mark.parametrize("value", [-1, MAX_TIME_S + 1, 1e300, 10**400, float("inf"), float("nan")])
def test_numbers_that_are_no_times(value):
    with pytest.raises(InvalidRequest, match="between the years"):
        parse_time("expires_at", value)


@given(st.text())
def test_any_text_is_a_time_or_refused(text):
    with contextlib.suppress(InvalidRequest):
        assert 0 <= parse_query_time("start", text, NOW_S) <= MAX_TIME_S
