"""Result files: JSON that names its format and is written atomically."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from maitred.core.errors import InvalidRequest
from maitred.core.secret import Secret

T = TypeVar("T", bound=msgspec.Struct)


def save(result: msgspec.Struct, path: Path) -> None:
    """Writes a result to a file.

    Raises:
        InvalidRequest: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(result))
        part.replace(path)
    except OSError as error:
        raise InvalidRequest(f"Cannot write {path}: {error.strerror}. Name another file.") from None


def load(path: Path, kind: type[T], written_as: str, *, by: str, again: str) -> T:
    """Reads a file that `save` wrote.

    Args:
        path: Path of the file.
        kind: Type of the result in the file.
        written_as: Format name of `kind`, such as ``maitred-load/1``.
        by: Command that makes such files.
        again: Advice for a damaged file.

    Raises:
        InvalidRequest: The file does not exist, is of another kind, or is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"Cannot read {path}: {error.strerror}. Name a result of `{by}`.") from None
    try:
        found = msgspec.json.decode(content, type=_Header).format
    except msgspec.DecodeError:
        found = ""
    if found.partition("/")[0] != written_as.partition("/")[0]:
        raise InvalidRequest(f"{path} is not a result of `{by}`. Name a file that it wrote.")
    if found != written_as:
        raise InvalidRequest(
            f"{path} has the format {found}; this version of maitred reads {written_as}. Read it with the version that "
            "wrote it, or make it again."
        )
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{path} is damaged: {error}. {again}") from None


def plain(settings: msgspec.Struct) -> Any:  # noqa: ANN401 - whatever they hold
    """Converts settings to plain data; a secret becomes its reference."""
    return msgspec.to_builtins(settings, enc_hook=_encode_value)


class _Header(msgspec.Struct):
    format: str = ""


def _encode_value(value: object) -> object:
    if isinstance(value, Secret):
        return value.reference
    raise TypeError(type(value))
