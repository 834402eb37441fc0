"""Text files of outside data, compressed or not, read line by line."""

import gzip
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, TypeVar

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.load.workload.tables import fault


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Opens a text file by its suffix (``.gz``, ``.xz`` or neither); also reports errors while reading.

    Raises:
        InvalidRequest: The file does not exist, is not text, or has damaged compression.
    """
    try:
        with _open(path) as lines:
            yield lines
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is no text in UTF-8. Decompress it, or give another file.") from None
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile):
        raise InvalidRequest(f"{path} is cut short, or not compressed as its name says. Fetch it again.") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}. Check the path.") from None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


T = TypeVar("T")


def read_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Yields every line that is not empty, with its number from 1.

    Raises:
        InvalidRequest: The file cannot be read, or a line is not of this type.
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
