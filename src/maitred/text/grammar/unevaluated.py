"""Rewriting of `unevaluatedProperties` and `unevaluatedItems` in terms of the members and items that a schema knows.

What the parts of a schema evaluate that always hold (`allOf`, references) is known beforehand. Of the options of an
`anyOf`, `oneOf` or `if`, what is evaluated depends on the value; so each option becomes a schema of its own, in which
only the members that it knows are known. Deeper alternatives are taken as if they evaluated nothing, which is narrower.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_KEYWORDS = ("unevaluatedProperties", "unevaluatedItems")
_MAX_DEPTH = 16
Schema = Mapping[str, Any]


class _EvaluatedParts:
    """Members and items that a schema evaluates in every value that follows it."""

    def __init__(self) -> None:
        self.names: dict[str, bool] = {}
        self.patterns: dict[str, bool] = {}
        self.items = 0
        self.all_names = False
        self.all_items = False

    def add(self, schema: Any, resolve: Callable[[Any], dict[str, Any]], depth: int = 0) -> None:  # noqa: ANN401
        """Adds what a schema evaluates, with all that always holds beside it."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return
        self.names |= dict.fromkeys(schema.get("properties") or (), True)
        self.patterns |= dict.fromkeys(schema.get("patternProperties") or (), True)
        self.all_names |= "additionalProperties" in schema or (depth > 0 and "unevaluatedProperties" in schema)
        self.items = max(self.items, len(schema.get("prefixItems") or ()))
        self.all_items |= "items" in schema or (depth > 0 and "unevaluatedItems" in schema)
        for part in schema.get("allOf") or ():
            self.add(part, resolve, depth + 1)
        if isinstance(schema.get("$ref"), str):
            self.add(resolve({"$ref": schema["$ref"]}), resolve, depth + 1)

    def close(self, schema: dict[str, Any], values: Schema) -> None:
        """Adds keywords to a schema that hold for everything but what is evaluated."""
        if "unevaluatedProperties" in values and not self.all_names:
            schema["properties"] = {**self.names, **(schema.get("properties") or {})}
            schema["patternProperties"] = {**self.patterns, **(schema.get("patternProperties") or {})}
            if not schema["patternProperties"]:
                del schema["patternProperties"]
            schema["additionalProperties"] = values["unevaluatedProperties"]
        if "unevaluatedItems" in values and not self.all_items:
            known = schema.get("prefixItems") or []
            if self.items:
                schema["prefixItems"] = [*known, *([True] * (self.items - len(known)))]
            schema["items"] = values["unevaluatedItems"]


def close_unevaluated(schema: Schema, resolve: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Returns a schema without the keywords for what is not evaluated; the others close it instead.

    Args:
        schema: Schema that has such a keyword.
        resolve: Returns a schema in place of a reference to it, and raises UnsupportedSchemaError for others.
    """
    values = {keyword: schema[keyword] for keyword in _KEYWORDS if keyword in schema}
    rest = {keyword: value for keyword, value in schema.items() if keyword not in values}
    values = {keyword: value for keyword, value in values.items() if value is not True and value != {}}
    if not values:
        return rest
    options = [*_options(rest)]
    if not options:
        known = _EvaluatedParts()
        known.add(rest, resolve)
        known.close(rest, values)
        return rest
    alternatives: list[Any] = []
    for parts in options:
        known = _EvaluatedParts()
        known.add(rest, resolve)
        for part in parts:
            known.add(part, resolve, depth=1)
        alternative: dict[str, Any] = {"allOf": [*parts]}
        known.close(alternative, values)
        alternatives.append(alternative)
    rest["allOf"] = [*(rest.get("allOf") or ()), {"anyOf": alternatives}]
    return rest


def _options(schema: Schema) -> Iterator[list[Any]]:
    """Yields schemas that may hold together beside the rest of a schema, of the first keyword that has such."""
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            yield from ([option] for option in schema[keyword])
            return
    if "if" in schema:
        yield [schema["if"], schema.get("then", True)]
        yield [{"not": schema["if"]}, schema.get("else", True)]
