"""Enforceable JSON schemas: a grammar enforces a schema completely, or the schema is rejected.

llguidance rejects keywords that it cannot enforce, and interprets a few keywords too widely. This module narrows these
keywords (`formats`), or rejects them with their location. Every value that the result accepts is also valid for the
schema. The result rejects a few values that are valid for the schema: the members of an object must have the order of
the schema, and an integer must be written as an integer.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from maitred.text.grammar.bounds import holds_exactly, narrow_bounds
from maitred.text.grammar.formats import DEFINED, NARROWED
from maitred.text.grammar.language import GrammarFault
from maitred.text.grammar.object_members import members_are_counted
from maitred.text.grammar.static_cost import CommonDivisor, is_costly, is_costly_divisor

_ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_CONTENT = ("contentEncoding", "contentMediaType")
_BEYOND_CLASSES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
"""Escapes with a backslash in a regular expression, and whole character classes."""
_TOGETHER = ("$ref", "allOf", "anyOf", "oneOf", "then", "else")
"""Keywords whose schemas hold beside the others of their schema."""
_OTHER_MEMBERS = ("additionalProperties", "unevaluatedProperties")
_BESIDE = ("allOf/", "anyOf/", "oneOf/", "dependentSchemas/", "if", "then", "else")
"""Beginnings of the places of schemas that hold for the same value."""
_EARLIER_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")


def enforceable(schema: object, *, strict: bool, whitespace: str | None = None) -> str:
    """Returns a schema as JSON in the form that llguidance requires.

    Args:
        schema: The schema as the caller sent it.
        strict: Whether keywords that cannot be enforced are rejected; otherwise they are ignored.
        whitespace: Regular expression of the white space between JSON tokens, or None for no white space.

    Raises:
        GrammarFault: The value is not a schema, or the schema cannot be enforced.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarFault("It must be a JSON object that holds a schema.")
    if strict:
        for _, fault in loose_keywords(schema):
            raise GrammarFault(fault)
    schema = _narrow(schema)
    guidance: dict[str, Any] = {"whitespace_flexible": False}
    if whitespace is not None:
        guidance = {"whitespace_pattern": whitespace}
    if not strict:
        guidance["lenient"] = True
    return json.dumps({**schema, "x-guidance": guidance}, ensure_ascii=False)


def describe_location(schema: object, keyword: str) -> str | None:
    """Returns a JSON pointer to the first schema with a keyword, or None if no schema has it."""
    if isinstance(schema, dict) and keyword in schema:
        return "#"
    return next((place for place, inner in _schemas_in(schema, "#") if keyword in inner), None)


def without_keywords(schema: object, unusable: Callable[[str, Any], bool], removed: list[str], place: str = "#") -> Any:  # noqa: ANN401
    """Returns a copy of a schema without the keywords that a predicate finds unusable, in all schemas within.

    Args:
        schema: The schema.
        unusable: Takes a keyword and its value.
        removed: Is extended by the removed keywords, with their places.
        place: Location of the schema.
    """
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for keyword, value in schema.items():
        where = f"{place}/{keyword}"
        if keyword == "patternProperties" and unusable(keyword, value):
            removed.append(f"{keyword} at {place}")
            continue
        if keyword in _NAMED and isinstance(value, dict):
            result[keyword] = {
                name: without_keywords(inner, unusable, removed, f"{where}/{name}") for name, inner in value.items()
            }
        elif keyword in _SEVERAL and isinstance(value, list):
            result[keyword] = [
                without_keywords(inner, unusable, removed, f"{where}/{index}") for index, inner in enumerate(value)
            ]
        elif keyword in _ONE:
            result[keyword] = without_keywords(value, unusable, removed, where)
        elif unusable(keyword, value):
            removed.append(f"{keyword} at {place}")
        else:
            result[keyword] = value
        if keyword == "patternProperties" and isinstance(value, dict):
            for name in value:
                if unusable("pattern", name):
                    del result[keyword][name]
                    removed.append(f"{keyword} at {place}")
    if f"patternProperties at {place}" in removed:
        # Members with such a name are free, as nothing tells them from others.
        result["additionalProperties"] = True
        removed += [f"{keyword} at {place}" for keyword in _OTHER_MEMBERS if _restricts(schema, keyword)]
    elif _restricts(schema, "unevaluatedProperties") and _frees_members(removed, place, refers="$ref" in schema):
        removed.append(f"unevaluatedProperties at {place}")
    removed[:] = dict.fromkeys(removed)
    return result


def _restricts(schema: Mapping[str, Any], keyword: str) -> bool:
    return schema.get(keyword, True) not in (True, {})


def _frees_members(removed: list[str], place: str, *, refers: bool) -> bool:
    """Returns whether members of an object became free because a schema that holds beside its own lost its patterns."""
    places = [where for what, where in (entry.split(" at ", 1) for entry in removed) if what == "patternProperties"]
    return any(where.startswith(f"{place}/{keyword}") for where in places for keyword in _BESIDE) or (
        refers and any("/$defs/" in where or "/definitions/" in where for where in places)
    )


def _narrow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the schema in which too widely interpreted keywords are narrowed."""

    def inner(value: object) -> object:
        return _narrow(value) if isinstance(value, dict) else value

    narrowed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            narrowed[keyword] = {name: inner(subschema) for name, subschema in value.items()}
        elif keyword in _SEVERAL and isinstance(value, list):
            narrowed[keyword] = [inner(subschema) for subschema in value]
        elif keyword in _ONE:
            narrowed[keyword] = inner(value)
        elif keyword in _COUNTS and isinstance(value, float) and value.is_integer():
            narrowed[keyword] = int(value)
        elif keyword == "pattern" and isinstance(value, str):
            narrowed[keyword] = _narrow_pattern(value)
        elif keyword == "format" and isinstance(value, str) and value not in DEFINED:
            pass
        else:
            narrowed[keyword] = value
    return _with_narrow_format(narrow_bounds(narrowed))


def _with_narrow_format(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("format")
    if not isinstance(name, str) or name not in NARROWED:
        return schema
    narrow = NARROWED[name]
    strings: dict[str, Any] = {"pattern": narrow.pattern}
    if narrow.most_characters is not None:
        strings["maxLength"] = narrow.most_characters
    rest = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    if strings.keys() & rest.keys():
        return {**rest, "allOf": [*rest.get("allOf", ()), strings]}
    return {**rest, **strings}


def _narrow_pattern(pattern: str) -> str:
    """Excludes the byte order mark from the matches of an escape for "no space" .

    ECMAScript treats the byte order mark as a space, but Rust does not.
    """
    return _BEYOND_CLASSES.sub(lambda found: r"[^\s\uFEFF]" if found[0] == r"\S" else found[0], pattern)


def loose_keywords(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields keywords that would be interpreted too widely, in a schema and all within, each with its fault."""
    draft = schema.get("$schema")
    asserts_content = isinstance(draft, str) and any(name in draft for name in _EARLIER_DRAFTS)
    divisors = CommonDivisor(schema)
    for place, inner in (("#", schema), *_schemas_in(schema, "#")):
        if place != "#" and isinstance(inner.get("$id"), str):
            yield "$id", f"A schema with an `$id` of its own, at {place}, cannot be enforced. Remove the `$id`."
        for keyword, value in inner.items():
            if not holds_exactly(keyword, value):
                yield (
                    keyword,
                    f"The number of `{keyword}`, at {place}, is too large to be enforced: it has more than 53 bits. "
                    "Remove it, or use a string.",
                )
            elif is_costly(keyword, value) or (
                keyword == "patternProperties"
                and isinstance(value, dict)
                and any(is_costly("pattern", pattern) for pattern in value)
            ):
                yield keyword, f"`{keyword}`, at {place}, takes too much to be followed. Send a simpler one."
            elif keyword in _TOGETHER and is_costly_divisor(divisors.of(inner)):
                yield "multipleOf", f"`multipleOf`, at {place}, takes too much to be followed. Send a simpler one."
            elif asserts_content and keyword in _CONTENT:
                yield keyword, f"`{keyword}`, at {place}, cannot be enforced. Remove it."
        if not members_are_counted(inner):
            yield (
                "minProperties",
                f"`minProperties` above 1, at {place}, cannot be enforced where names may repeat: list the members in "
                "`properties` or `required`.",
            )


def _schemas_in(schema: object, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields all schemas within a schema, each with its location."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        inner: list[tuple[str, Any]] = []
        if keyword in _NAMED and isinstance(value, dict):
            inner = [(f"{place}/{keyword}/{name}", subschema) for name, subschema in value.items()]
        elif keyword in _SEVERAL and isinstance(value, list):
            inner = [(f"{place}/{keyword}/{index}", subschema) for index, subschema in enumerate(value)]
        elif keyword in _ONE:
            inner = [(f"{place}/{keyword}", value)]
        for where, subschema in inner:
            if isinstance(subschema, dict):
                yield where, subschema
                yield from _schemas_in(subschema, where)
