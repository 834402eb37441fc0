"""Page cursors: the sort values of a page's last row as text, which callers send back to get the next page."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Double, literal, tuple_

from maitred.core.errors import InvalidRequest


def encode_cursor(values: Sequence[str | float]) -> str:
    """Returns the cursor after a row that is sorted by these values."""
    return base64.urlsafe_b64encode(msgspec.json.encode(values)).decode().rstrip("=")


def decode_cursor(cursor: str, columns: Sequence[ColumnElement[Any]]) -> ColumnElement[Any]:
    """Returns the values of a cursor, for comparison with the columns that rows are sorted by.

    Raises:
        InvalidRequest: The text is no cursor, or the cursor of another query.
    """
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        values = msgspec.json.decode(text, type=list[str | float])
    except ValueError:
        raise _invalid_cursor() from None
    types = [column.type for column in columns]
    if not values or [isinstance(value, float) for value in values] != [isinstance(kind, Double) for kind in types]:
        raise _invalid_cursor()
    if any(isinstance(value, str) and "\0" in value for value in values):
        raise _invalid_cursor()  # PostgreSQL has no such text
    return tuple_(*(literal(value, kind) for value, kind in zip(values, types, strict=True)))


def _invalid_cursor() -> InvalidRequest:
    return InvalidRequest("This is not where a page ended. Use `next` of the page before, unchanged.", param="after")
