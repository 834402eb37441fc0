"""Validation of a text against a JSON schema, which can take unlimited time.

The schemas come from callers.

The match of a pattern in a schema can take longer than any realistic time limit, and references can form cycles. The
validation therefore runs in a separate process (`worker`), which can be killed.
"""

from enum import Enum
from typing import Any

import msgspec


class SchemaResult(Enum):
    """Result of validating a text against a schema."""

    VALID = b"+"
    INVALID = b"-"
    UNKNOWN = b"?"
    """The value is not a schema, refers to another schema outside itself, or takes too long."""


def validate_text(schema: Any, text: str) -> SchemaResult:  # noqa: ANN401 - whatever the caller sent
    """Validates a text against a schema, without network access.

    A schema that refers to an external schema gives UNKNOWN.
    """
    # The gateway needs only `SchemaResult`; importing these libraries here keeps its start fast.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if not isinstance(schema, dict | bool):
        return SchemaResult.UNKNOWN
    validator_class = validator_for(schema, default=Draft202012Validator)
    try:
        validator_class.check_schema(schema)  # type: ignore[arg-type]  # the values true and false are also schemas
        value = msgspec.json.decode(text)
    except (SchemaError, Unresolvable, RecursionError):
        return SchemaResult.UNKNOWN
    except msgspec.DecodeError:
        return SchemaResult.INVALID
    try:
        is_valid = validator_class(schema, registry=Registry()).is_valid(value)
    except (Unresolvable, RecursionError, ValueError, OverflowError):
        return SchemaResult.UNKNOWN
    return SchemaResult.VALID if is_valid else SchemaResult.INVALID
