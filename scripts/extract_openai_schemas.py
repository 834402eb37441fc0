"""Cuts the schemas that our tests need out of OpenAI's API description.

    python scripts/extract_openai_schemas.py openapi.yaml tests/data/openai/schemas.json

The description is OpenAPI 3.1, whose schemas are JSON Schema 2020-12, but it still says ``nullable: true`` here and
there, as 3.0 did. That is rewritten, texts and examples are dropped, and what remains is the named schemas with
everything that they refer to, as one JSON Schema document under ``$defs``.
"""

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import yaml

NAMES = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateEmbeddingResponse",
    "ListModelsResponse",
    "Model",
    "ErrorResponse",
)
_IN_DESCRIPTION = "#/components/schemas/"
_IN_DOCUMENT = "#/$defs/"
_DROPPED = frozenset(("description", "title", "example", "examples", "deprecated", "discriminator", "externalDocs"))


def main(source: Path, target: Path) -> None:
    """Reads the description (YAML, or YAML under xz) and writes the document."""
    data = source.read_bytes()
    description = yaml.load(lzma.decompress(data) if source.suffix == ".xz" else data, yaml.CSafeLoader)
    schemas = description["components"]["schemas"]
    found: dict[str, Any] = {}
    wanted = list(NAMES)
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = _cleaned(schemas[name])
            wanted += _references(found[name])
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"From {description['info']['title']} {description['info']['version']}; see README.md.",
        "$defs": dict(sorted(found.items())),
    }
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _cleaned(node: Any, *, names: bool = False) -> Any:  # noqa: ANN401 - a JSON value
    """The schema without texts and with JSON Schema's own null.

    Args:
        node: A schema, or something inside one.
        names: The keys of this object are property names, not keywords.
    """
    if isinstance(node, list):
        return [_cleaned(item) for item in node]
    if not isinstance(node, dict):
        return node
    if names:
        return {key: _cleaned(value) for key, value in node.items()}
    kept = {
        key: _cleaned(value, names=key == "properties")
        for key, value in node.items()
        if key not in _DROPPED and key != "nullable" and not key.startswith("x-")
    }
    if "$ref" in kept:
        kept["$ref"] = kept["$ref"].replace(_IN_DESCRIPTION, _IN_DOCUMENT)
    return {"anyOf": [kept, {"type": "null"}]} if node.get("nullable") is True else kept


def _references(node: Any) -> list[str]:  # noqa: ANN401 - a JSON value
    """Names of the schemas that this one refers to."""
    if isinstance(node, list):
        return [name for item in node for name in _references(item)]
    if not isinstance(node, dict):
        return []
    own = node.get("$ref")
    names = [own.removeprefix(_IN_DOCUMENT)] if isinstance(own, str) else []
    return names + [name for value in node.values() for name in _references(value)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
