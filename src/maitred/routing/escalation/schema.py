"""Whether a text is JSON that follows a schema. It may take any time: schemas come from callers.

A pattern in a schema can take longer than the universe is old, and references can lead in circles. So this runs in a
process of its own (`worker`), which can be ended.
"""

from enum import Enum
from typing import Any

import msgspec


class SchemaResult(Enum):
    """What is known of a text."""

    FOLLOWS = b"+"
    BREAKS = b"-"
    UNKNOWN = b"?"
    """The schema is none, names another that is not in it, or takes too long."""


def check_schema(schema: Any, text: str) -> SchemaResult:  # noqa: ANN401 - whatever the caller sent
    """Checks a text. Nothing is ever fetched: a schema that points elsewhere cannot be judged by."""
    # The gateway knows verdicts, and its start need not wait for what only the process that finds them needs.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if not isinstance(schema, dict | bool):
        return SchemaResult.UNKNOWN
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)  # type: ignore[arg-type]  # true and false are schemas, too
        value = msgspec.json.decode(text)
    except (SchemaError, Unresolvable, RecursionError):
        return SchemaResult.UNKNOWN
    except msgspec.DecodeError:
        return SchemaResult.BREAKS
    try:
        follows = kind(schema, registry=Registry()).is_valid(value)
    except (Unresolvable, RecursionError, ValueError, OverflowError):
        return SchemaResult.UNKNOWN
    return SchemaResult.FOLLOWS if follows else SchemaResult.BREAKS
