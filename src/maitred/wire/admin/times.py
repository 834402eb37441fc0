"""Time formats that the admin API writes and reads.

The API writes ISO 8601 in UTC (``2026-11-21T16:00:00Z``), in whole seconds unless there is a fraction. The API reads
ISO 8601 with any offset and seconds since the Unix epoch; queries, which people type, may also have times before now,
such as ``-7d``.
"""

import re
from datetime import UTC, datetime, timedelta

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.faults import format_value

MAX_TIME_S = 253_402_300_799.0
"""Latest valid time: the end of the year 9999, which is the last year of ISO 8601."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_RELATIVE = re.compile(r"-(\d{1,9})([smhdw])", re.ASCII)
_EPOCH = re.compile(r"\d{1,12}(\.\d{1,9})?", re.ASCII)
_LOST_PLUS = re.compile(r"(T\S*) (\d\d:?\d\d)$", re.ASCII)
"""Pattern of a time with an unencoded plus sign, which is a blank after query decoding."""


def to_iso(time_s: float) -> str:
    """Formats a time since the epoch as ISO 8601 in UTC."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=min(max(time_s, 0.0), MAX_TIME_S))
    return moment.isoformat(timespec="milliseconds" if moment.microsecond else "seconds").replace("+00:00", "Z")


def parse_time(field: str, value: str | int | float) -> float:
    """Parses a time of a body: ISO 8601, or seconds since the epoch.

    Raises:
        InvalidRequest: The value has neither of these forms.
    """
    if isinstance(value, str):
        return _parse_iso(field, value)
    if not 0 <= value <= MAX_TIME_S:
        raise InvalidRequest(
            f"{field} must lie between the years 1970 and 9999; got {format_value(value)}.", param=field
        )
    return float(value)


def parse_query_time(field: str, text: str, now_s: float) -> float:
    """Parses a time of a query: as in a body, or relative to now.

    Raises:
        InvalidRequest: The text is not a time.
    """
    if text == "now":
        return now_s
    if back := _RELATIVE.fullmatch(text):
        return max(0.0, now_s - int(back[1]) * _UNITS_S[back[2]])
    if _EPOCH.fullmatch(text):
        return parse_time(field, float(text))
    return _parse_iso(field, _LOST_PLUS.sub(r"\1+\2", text))


def _parse_iso(field: str, text: str) -> float:
    try:
        # A longer text cannot be a time, and parsing it would cost time.
        moment = datetime.fromisoformat(text if len(text) <= 40 else "")
        # A time without an offset is in UTC, because its meaning must not depend on the location of the server.
        moment_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{field} must be a time in ISO 8601, such as 2026-11-21T16:00:00Z; got {format_value(text)}.", param=field
        ) from None
    return parse_time(field, moment_s)
