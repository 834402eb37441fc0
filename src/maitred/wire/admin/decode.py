"""Bodies and queries of the administration to structs. Whatever came, the result is a struct, or InvalidRequest.

Unlike the inference API, which must live with every client's extra fields, this one refuses what it does not know: a
limit with a misspelt field would silently be another limit.
"""

import re
from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

import msgspec
from msgspec import inspect

from maitred.core.errors import BodyTooLarge, InvalidRequest
from maitred.wire.openai.faults import UNREADABLE, fault_of, shown
from maitred.wire.openai.rules import check_known

S = TypeVar("S", bound=msgspec.Struct)

_NO_CHOICE = re.compile(r"Invalid enum value (?P<got>.*) - at `\$\.(?P<path>(?P<field>\w+).*)`$", re.DOTALL)
MAX_BODY_BYTES = 256 * 1024
"""A tenant with a thousand long names of models fits; parsing it holds up nobody."""


def decode_body(body: bytes, kind: type[S]) -> S:
    """Reads a body.

    Args:
        body: As it came; an empty one is an empty object.
        kind: What it should be.

    Raises:
        BodyTooLarge: It is far longer than any that makes sense.
        InvalidRequest: Malformed, mistyped, or with a field that is unknown; `param` says where.
    """
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"The request body is larger than {MAX_BODY_BYTES:,} bytes. Send a shorter one.")
    try:
        fields = msgspec.json.decode(body or b"{}")
        check_known(fields, kind)
        return msgspec.convert(fields, kind)
    except UNREADABLE as error:
        raise _fault_of(error, kind) from error


def decode_query(parameters: Iterable[tuple[str, str]], kind: type[S]) -> S:
    """Reads the parameters of a query.

    Raises:
        InvalidRequest: One is unknown, comes twice, or is not what it should be.
    """
    fields: dict[str, str] = {}
    for name, value in parameters:
        if name in fields:
            raise InvalidRequest(f"{shown(name)[1:-1]} comes twice in the query. Send it once.", param=name[:128])
        fields[name] = value
    check_known(fields, kind)
    try:
        return msgspec.convert(fields, kind, strict=False)
    except UNREADABLE as error:
        raise _fault_of(error, kind) from error


def _fault_of(error: Exception, kind: type[msgspec.Struct]) -> InvalidRequest:
    """As `fault_of`; and where there is a choice, it is named."""
    match = _NO_CHOICE.match(str(error)) if isinstance(error, msgspec.ValidationError) else None
    choices = _choices_of(kind, match["field"]) if match is not None else None
    if match is None or choices is None:
        return fault_of(error)
    names = ", ".join(choice.value for choice in choices)
    return InvalidRequest(
        f"{match['path']} must be one of {names}; got {shown(match['got'][1:-1])}.", param=match["path"]
    )


def _choices_of(kind: type[msgspec.Struct], name: str) -> type[Enum] | None:
    """What a field, or each entry of it, chooses from."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    pending = [field.type for field in info.fields if field.encode_name == name]
    while pending:
        match pending.pop():
            case inspect.EnumType(cls=choices):
                return choices
            case inspect.UnionType(types=types):
                pending.extend(types)
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                pending.append(item)
    return None
