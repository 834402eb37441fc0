"""Where a page ended, as text that callers hand back: the values that its last row is sorted by."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Double, literal, tuple_

from maitred.core.errors import InvalidRequest


def encode_cursor(values: Sequence[str | float]) -> str:
    """The cursor after a row that is sorted by these values."""
    return base64.urlsafe_b64encode(msgspec.json.encode(values)).decode().rstrip("=")


def decode_cursor(cursor: str, columns: Sequence[ColumnElement[Any]]) -> ColumnElement[Any]:
    """The values of a cursor, to be compared with the columns that rows are sorted by.

    Raises:
        InvalidRequest: It is no cursor, or one of another question.
    """
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        values = msgspec.json.decode(text, type=list[str | float])
    except ValueError:
        raise _no_cursor() from None
    types = [column.type for column in columns]
    if not values or [isinstance(value, float) for value in values] != [isinstance(kind, Double) for kind in types]:
        raise _no_cursor()
    if any(isinstance(value, str) and "\0" in value for value in values):
        raise _no_cursor()  # PostgreSQL has no such text
    return tuple_(*(literal(value, kind) for value, kind in zip(values, types, strict=True)))


def _no_cursor() -> InvalidRequest:
    return InvalidRequest("This is not where a page ended. Use `next` of the page before, unchanged.", param="after")
