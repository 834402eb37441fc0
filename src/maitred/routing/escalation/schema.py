"""Validation of a text against a JSON schema. It may take any time: schemas come from callers.

A pattern in a schema can take longer than the universe is old, and references can lead in circles. So the validation
runs in a process of its own (`worker`), which can be killed.
"""

from enum import Enum
from typing import Any

import msgspec


class SchemaResult(Enum):
    """Result of validating a text against a schema."""

    VALID = b"+"
    INVALID = b"-"
    UNKNOWN = b"?"
    """The schema is none, names another that is not in it, or takes too long."""


def validate_text(schema: Any, text: str) -> SchemaResult:  # noqa: ANN401 - whatever the caller sent
    """Validates a text against a schema. Nothing is ever fetched: a schema that points elsewhere gives UNKNOWN."""
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
        validator_class.check_schema(schema)  # type: ignore[arg-type]  # true and false are schemas, too
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
