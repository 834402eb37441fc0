"""Rows of a CSV file by the names of their columns, and the sentence for a row that is wrong."""

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from maitred.core.errors import InvalidRequest


class TableRows:
    """The rows of a table, each as the texts of the columns that were asked for.

    Args:
        path: Where the lines come from, for errors.
        lines: With the header first.
        choices: Names of columns that belong together; the first choice whose columns are all there is read.

    Attributes:
        names: The choice that is read.

    Raises:
        InvalidRequest: The header has none of the choices.
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
        """The error for the row that was read last."""
        return fault(self._path, self._reader.line_num, reason)

    def tokens(self, text: str) -> int:
        """A length of the row that was read last: a whole number of at least 0.

        Raises:
            InvalidRequest: It is none.
        """
        if text.isdecimal():
            return int(text)
        value = self.number(text)
        if not value.is_integer():
            raise self.fault(f"{text!r} should be a whole number")
        return int(value)

    def number(self, text: str) -> float:
        """A number of the row that was read last, at least 0.

        Raises:
            InvalidRequest: It is none.
        """
        try:
            value = float(text)
        except ValueError:
            raise self.fault(f"{text!r} should be a number") from None
        if not math.isfinite(value) or value < 0:
            raise self.fault(f"{text!r} should be a finite number of at least 0")
        return value


def fault(path: Path, line: int, reason: str) -> InvalidRequest:
    """The error for one line of a file of outside data."""
    return InvalidRequest(f"{path}, line {line}: {reason}. Correct or remove the line.")
