"""Lines of CSV that a spreadsheet can open without harm.

Names in the ledger are chosen by tenants. A spreadsheet runs a cell that begins like a formula, so such a cell gets an
apostrophe in front, which spreadsheets take as "this is text".
"""

import csv
import io
from collections.abc import Iterable, Sequence

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def cell(value: object) -> object:
    """A value as it may stand in a cell; numbers stay numbers."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def lines(rows: Iterable[Sequence[object]]) -> str:
    """Rows as text (RFC 4180); None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()
