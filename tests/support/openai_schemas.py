"""OpenAI's own schemas as assertions, for whoever has a response at hand."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

_DOCUMENT = Path(__file__).parents[1] / "data" / "openai" / "schemas.json"


def validate(schema_name: str, instance: Any) -> None:
    """Raises jsonschema.ValidationError unless the decoded JSON is what OpenAI's schema of that name says."""
    _validator(schema_name).validate(instance)


@cache
def _validator(schema_name: str) -> jsonschema.Draft202012Validator:
    document = json.loads(_DOCUMENT.read_text(encoding="utf-8"))
    assert schema_name in document["$defs"], f"{schema_name} is not among {sorted(document['$defs'])}"
    return jsonschema.Draft202012Validator({**document, "$ref": f"#/$defs/{schema_name}"})
