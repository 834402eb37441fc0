"""JSON lines of outside data, one struct each."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from maitred.load.workload.files import open_text
from maitred.load.workload.tables import fault

T = TypeVar("T")


def read_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Every line that is not empty, with its number from 1.

    Raises:
        InvalidRequest: The file cannot be read, or a line is not of this kind.
    """
    decoder = msgspec.json.Decoder(kind)
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                yield number, decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise fault(path, number, str(error)) from None
