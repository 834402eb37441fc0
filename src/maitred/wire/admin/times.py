"""Times, as the administration's API writes and reads them.

It writes ISO 8601 in UTC (``2026-11-21T16:00:00Z``), to the second unless there is a fraction. It reads that, with any
offset; seconds since the Unix epoch; and in queries, where people type, what lies so far back: ``-7d``.
"""

import re
from datetime import UTC, datetime, timedelta

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import shown

LATEST_S = 253_402_300_799.0
"""The end of the year 9999, where ISO's years end."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_RELATIVE = re.compile(r"-(\d{1,9})([smhdw])", re.ASCII)
_EPOCH = re.compile(r"\d{1,12}(\.\d{1,9})?", re.ASCII)
_LOST_PLUS = re.compile(r"(T\S*) (\d\d:?\d\d)$", re.ASCII)
"""A plus that was not percent-encoded is a blank once a query is decoded."""


def iso_of(time_s: float) -> str:
    """A time since the epoch in ISO 8601, in UTC."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=min(max(time_s, 0.0), LATEST_S))
    return moment.isoformat(timespec="milliseconds" if moment.microsecond else "seconds").replace("+00:00", "Z")


def time_in(field: str, value: str | int | float) -> float:
    """The time that a body gives: ISO 8601, or seconds since the epoch.

    Raises:
        InvalidRequest: It is neither.
    """
    if isinstance(value, str):
        return _iso(field, value)
    if not 0 <= value <= LATEST_S:
        raise InvalidRequest(f"{field} must lie between the years 1970 and 9999; got {shown(value)}.", param=field)
    return float(value)


def time_in_query(field: str, text: str, now_s: float) -> float:
    """The time that a query gives: as a body, or so far before now.

    Raises:
        InvalidRequest: It is no time.
    """
    if text == "now":
        return now_s
    if back := _RELATIVE.fullmatch(text):
        return max(0.0, now_s - int(back[1]) * _UNITS_S[back[2]])
    if _EPOCH.fullmatch(text):
        return time_in(field, float(text))
    return _iso(field, _LOST_PLUS.sub(r"\1+\2", text))


def _iso(field: str, text: str) -> float:
    try:
        # Longer texts are no times, and only cost.
        moment = datetime.fromisoformat(text if len(text) <= 40 else "")
        # A time without an offset is UTC: what it means must not depend on where the server stands.
        moment_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{field} must be a time in ISO 8601, such as 2026-11-21T16:00:00Z; got {shown(text)}.", param=field
        ) from None
    return time_in(field, moment_s)
