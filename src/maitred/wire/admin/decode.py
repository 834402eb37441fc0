"""Decodes bodies and queries of the admin API; the result is a struct, or InvalidRequest.

The inference API must accept the extra fields of all clients. The admin API rejects unknown fields, because a limit
with a misspelt field would silently become a different limit.
"""

import re
from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

import msgspec
from msgspec import inspect

from maitred.core.errors import BodyTooLarge, InvalidRequest
from maitred.wire.openai.decode import check_known
from maitred.wire.openai.faults import DECODE_ERRORS, describe_fault, format_value

S = TypeVar("S", bound=msgspec.Struct)

_INVALID_ENUM = re.compile(r"Invalid enum value (?P<got>.*) - at `\$\.(?P<path>(?P<field>\w+).*)`$", re.DOTALL)
MAX_BODY_BYTES = 256 * 1024
"""Largest body in bytes: it has space for a tenant with a thousand long model names.

Parsing such a body does not noticeably delay other requests.
"""


def decode_body(body: bytes, kind: type[S]) -> S:
    """Decodes a JSON body.

    Args:
        body: The bytes of the body; an empty body is an empty object.
        kind: The struct to decode.

    Raises:
        BodyTooLarge: The body is far longer than any reasonable body.
        InvalidRequest: The body is malformed, mistyped, or has an unknown field; `param` says where.
    """
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"The request body is larger than {MAX_BODY_BYTES:,} bytes. Send a shorter one.")
    try:
        fields = msgspec.json.decode(body or b"{}")
        check_known(fields, kind)
        return msgspec.convert(fields, kind)
    except DECODE_ERRORS as error:
        raise _describe_fault(error, kind) from error


def decode_query(parameters: Iterable[tuple[str, str]], kind: type[S]) -> S:
    """Decodes the parameters of a query.

    Raises:
        InvalidRequest: A parameter is unknown, comes twice, or has a wrong value.
    """
    fields: dict[str, str] = {}
    for name, value in parameters:
        if name in fields:
            raise InvalidRequest(
                f"{format_value(name)[1:-1]} comes twice in the query. Send it once.", param=name[:128]
            )
        fields[name] = value
    check_known(fields, kind)
    try:
        return msgspec.convert(fields, kind, strict=False)
    except DECODE_ERRORS as error:
        raise _describe_fault(error, kind) from error


def _describe_fault(error: Exception, kind: type[msgspec.Struct]) -> InvalidRequest:
    """Describes a fault as `describe_fault` does, and also lists the allowed values of an enum."""
    match = _INVALID_ENUM.match(str(error)) if isinstance(error, msgspec.ValidationError) else None
    choices = _enum_choices(kind, match["field"]) if match is not None else None
    if match is None or choices is None:
        return describe_fault(error)
    names = ", ".join(choice.value for choice in choices)
    return InvalidRequest(
        f"{match['path']} must be one of {names}; got {format_value(match['got'][1:-1])}.", param=match["path"]
    )


def _enum_choices(kind: type[msgspec.Struct], name: str) -> type[Enum] | None:
    """Returns the enum of a field, or of the entries of a list field."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    pending = [field.type for field in info.fields if field.encode_name == name]
    while pending:
        match pending.pop():
            case inspect.EnumType(cls=choices):
                return choices
            case inspect.UnionType(types=types):
                pending.extend(types)
            case inspect.Metadata(type=described):
                pending.append(described)
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                pending.append(item)
    return None
