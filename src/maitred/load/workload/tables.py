"""Rows of a CSV file by column names, and errors for invalid rows."""

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from maitred.core.errors import InvalidRequest


class TableRows:
    """Rows of a table, each as the texts of the requested columns.

    Args:
        path: File that the lines come from, for errors.
        lines: Lines of the file, the header first.
        choices: Groups of column names; the first group whose columns are all present is read.

    Attributes:
        names: Group of columns that is read.

    Raises:
        InvalidRequest: The header has none of the groups.
    """

    def __init__(self, path: Path, lines: Iterable[str], *choices: tuple[str, ...]) -> None:
        self._path = path
        self._reader = csv.reader(lines)
        header = [name.strip().removeprefix("\ufeff") for name in next(self._reader, [])]
        for names in choices:
            if set(names) <= set(header):
                self.names = names
                self._places = [header.index(name) for name in names]
                break
        else:
            forms = " or ".join(", ".join(f"`{name}`" for name in names) for names in choices)
            raise InvalidRequest(f"{path} must have a header with the columns {forms}.")

    def __iter__(self) -> Iterator[list[str]]:
        for row in self._reader:
            if not row:
                continue
            try:
                yield [row[place] for place in self._places]
            except IndexError:
                raise self.fault("there are fewer columns than in the header") from None

    def fault(self, reason: str) -> InvalidRequest:
        """Makes the error for the row that was read last."""
        return fault(self._path, self._reader.line_num, reason)

    def tokens(self, text: str) -> int:
        """Returns a length of the row that was read last: a whole number of at least 0.

        Raises:
            InvalidRequest: The text is not such a number.
        """
        if text.isdecimal():
            return int(text)
        value = self.number(text)
        if not value.is_integer():
            raise self.fault(f"{text!r} should be a whole number")
        return int(value)

    def number(self, text: str) -> float:
        """Returns a number of the row that was read last, at least 0.

        Raises:
            InvalidRequest: The text is not such a number.
        """
        try:
            value = float(text)
        except ValueError:
            raise self.fault(f"{text!r} should be a number") from None
        if not math.isfinite(value) or value < 0:
            raise self.fault(f"{text!r} should be a finite number of at least 0")
        return value


def fault(path: Path, line: int, reason: str) -> InvalidRequest:
    """Makes the error for one line of a file of outside data."""
    return InvalidRequest(f"{path}, line {line}: {reason}. Correct or remove the line.")
