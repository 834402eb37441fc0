"""Rewriting of keywords of JSON Schema that llguidance does not know, in terms of those that it knows.

=========================================  =============================================================================
keyword                                    what says the same
=========================================  =============================================================================
``not: S``                                 the complement of S: one of its keywords does not hold
``oneOf: [A, B]``                          ``anyOf`` of A without B, and of B without A
``if: C``, ``then: T``, ``else: E``        ``anyOf`` of C with T, and of the complement of C with E
``dependentRequired``, ``dependencies``,   ``anyOf`` of objects without the member, and of such that have it and what
``dependentSchemas``                       depends on it
``propertyNames``                          names of members without properties of their own
``uniqueItems``                            an array of at most one item; all arrays of different items of a short list
``contains``, ``minContains``,             ``anyOf`` of arrays with such items at some of the first places
``maxContains``
``minProperties``, ``maxProperties``       ``anyOf`` of objects in which members are required or missing
``unevaluatedProperties``,                 ``additionalProperties`` and ``items`` beside all members and items that the
``unevaluatedItems``                       parts of the schema know
``$id`` within                             nothing, where the document has no references
=========================================  =============================================================================

A complement may be too narrow, but is never too wide: what is written then still follows the schema. Where nothing says
the same, the keyword stays, and is refused later.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

from maitred.text.grammar.array_items import arrays_of_unique_items, arrays_that_contain
from maitred.text.grammar.bounds import is_number
from maitred.text.grammar.object_members import MemberNames, count_members
from maitred.text.grammar.unevaluated import close_unevaluated

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "$comment", "$schema", "$id", "id", "deprecated"),
        *("readOnly", "writeOnly", "$defs", "definitions"),
    }
)
_MAX_WORDS = 64
_MAX_WORD_CHARACTERS = 2_000
_MAX_DEPTH = 32
_NOTHING: dict[str, Any] = {"enum": []}
Schema = Mapping[str, Any]


class UnsupportedSchemaError(Exception):
    """Error for a schema whose complement cannot be written."""


def convert_schema(schema: Schema) -> dict[str, Any]:
    """Returns a schema in which unknown keywords are rewritten, wherever that is possible."""
    converted: dict[str, Any] = _SchemaConverter(schema).schema(schema, 0)
    return converted


class _SchemaConverter:
    """Converter of one document, whose local references it resolves."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._foreign = _foreign_keywords(root.get("$schema"))
        self._refers = re.search(r'"\$(ref|dynamicRef|recursiveRef)"', json.dumps(root)) is not None

    def schema(self, schema: Any, depth: int) -> Any:  # noqa: ANN401 - a schema is an object or a boolean
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return schema
        if not self._foreign & {"prefixItems"} and schema.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
            with suppress(UnsupportedSchemaError):
                schema = close_unevaluated(schema, self._resolve)
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
                result[keyword] = {name: self.schema(inner, depth + 1) for name, inner in value.items()}
            elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
                result[keyword] = [self.schema(inner, depth + 1) for inner in value]
            elif keyword in ("items", "additionalItems", "additionalProperties", "then", "else"):
                result[keyword] = self.schema(value, depth + 1)
            else:
                result[keyword] = value
        if depth and not self._refers and isinstance(result.get("$id"), str):
            del result["$id"]  # nothing refers to it, or by it
        further: list[Any] = []
        for rewritten in (
            *(self._not, partial(self._one_of, written=schema.get("oneOf"))),
            *(self._conditional, self._dependent, self._names, self._unique, self._contains, self._counts),
        ):
            try:
                further += rewritten(result, depth)
            except UnsupportedSchemaError:
                continue
        if further:
            result["allOf"] = [*result.get("allOf", ()), *further]
        return result

    def _not(self, schema: dict[str, Any], depth: int) -> list[Any]:
        if "not" not in schema:
            return []
        complement = self.complement(schema["not"], depth)
        del schema["not"]
        return [complement]

    def _one_of(self, schema: dict[str, Any], depth: int, *, written: Any) -> list[Any]:  # noqa: ANN401 - any JSON
        options = schema.get("oneOf")
        if not isinstance(options, list) or not options:
            return []
        if len(options) == 1:
            return [schema.pop("oneOf")[0]]
        # Only options that a value can follow together need the complement of each other. It is that of the option as
        # it was written: an option that was rewritten may be too narrow, and what is not in it too wide. For the same
        # reason they stay as they were written where there is no complement, for whoever tells them apart then.
        schema["oneOf"] = written
        together: list[list[Any]] = [[] for _ in options]
        for place, option in enumerate(options):
            for other, rival in enumerate(written):
                if other != place and not self.exclude(option, rival, depth):
                    together[place].append(self.complement(rival, depth))
        del schema["oneOf"]
        return [{"anyOf": [_all(option, *rivals) for option, rivals in zip(options, together, strict=True)]}]

    def _conditional(self, schema: dict[str, Any], depth: int) -> list[Any]:
        if "if" not in schema:
            for keyword in ("then", "else"):
                schema.pop(keyword, None)
            return []
        condition = schema["if"]
        otherwise = self.complement(condition, depth)
        then, else_ = schema.pop("then", True), schema.pop("else", True)
        del schema["if"]
        return [{"anyOf": [_all(condition, then), _all(otherwise, else_)]}]

    def _dependent(self, schema: dict[str, Any], depth: int) -> list[Any]:
        further: list[Any] = []
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            dependents = schema.get(keyword)
            if not isinstance(dependents, dict):
                continue
            del schema[keyword]
            for name, needed in dependents.items():
                needed = {"required": needed} if isinstance(needed, list) else self.schema(needed, depth + 1)
                present = {"type": "object", "properties": {name: True}, "required": [name]}
                further.append({"anyOf": [{"properties": {name: False}}, _all(present, needed)]})
        return further

    def _names(self, schema: dict[str, Any], depth: int) -> list[Any]:
        names = schema.get("propertyNames")
        if isinstance(names, bool):
            if names:
                del schema["propertyNames"]
            return []
        if not isinstance(names, dict) or schema.get("patternProperties"):
            return []
        names = {name: value for name, value in self._resolve(names).items() if name not in _ANNOTATIONS}
        allowed = MemberNames(names)
        if names.get("type", "string") != "string" or not allowed.known:
            return []
        del schema["propertyNames"]
        members = schema.get("additionalProperties", True)
        declared = {**dict.fromkeys(schema.get("required") or (), members), **(schema.get("properties") or {})}
        properties = {name: inner if allowed.allow(name) else False for name, inner in declared.items()}
        if allowed.words is not None:
            properties = {**dict.fromkeys(allowed.words, members), **properties}
            schema["additionalProperties"] = False
        elif allowed.pattern is not None and members is not False:
            schema |= {"patternProperties": {allowed.pattern: members}, "additionalProperties": False}
        if properties:
            schema["properties"] = properties
        return []

    def _unique(self, schema: dict[str, Any], depth: int) -> list[Any]:
        if schema.get("uniqueItems") is not True:
            schema.pop("uniqueItems", None)
            return []
        most = schema.get("maxItems")
        if is_number(most) and most <= 1:
            del schema["uniqueItems"]
            return []
        if schema.keys() & {"prefixItems", "contains"} or "array" not in _kinds_of(schema):
            return []
        items = {
            name: value for name, value in self._resolve(schema.get("items", {})).items() if name not in _ANNOTATIONS
        }
        arrays = arrays_of_unique_items(schema, items, _kinds_of(items))
        return [] if arrays is None else [self._of_kind(schema, "array", arrays)]

    def _contains(self, schema: dict[str, Any], depth: int) -> list[Any]:
        if "contains" not in schema:
            for keyword in ("minContains", "maxContains"):
                schema.pop(keyword, None)
            return []
        counts = [schema.get(keyword) for keyword in ("minContains", "maxContains", "maxItems")]
        if "minContains" in self._foreign:
            counts[:2] = None, None
        least, most, longest = (int(count) if is_number(count) else None for count in counts)
        item = self.schema(schema["contains"], depth + 1)
        arrays = arrays_that_contain(
            item,
            1 if least is None else least,
            most,
            longest,
            complement=lambda: self.complement(schema["contains"], depth),
            prefix_keywords=("items", "additionalItems")
            if "prefixItems" in self._foreign
            else ("prefixItems", "items"),
        )
        if arrays is None:
            return []
        for keyword in ("contains", "minContains", "maxContains"):
            schema.pop(keyword, None)
        return [self._of_kind(schema, "array", arrays)]

    def _counts(self, schema: dict[str, Any], depth: int) -> list[Any]:
        objects = count_members(schema) if "object" in _kinds_of(schema) else None
        return [] if objects is None else [self._of_kind(schema, "object", objects)]

    def _of_kind(self, schema: Schema, kind: str, options: list[Any]) -> Any:  # noqa: ANN401 - a schema
        """Returns a schema whose values of one kind follow one of the options, and whose other values are free."""
        others = [] if _kinds_of(schema) == [kind] else [_without(kind)]
        told = [{"type": kind, **option} if isinstance(option, dict) else option for option in options]
        return {"anyOf": [*told, *others]} if len(told) + len(others) > 1 else told[0]

    def exclude(self, left: Any, right: Any, depth: int) -> bool:  # noqa: ANN401 - a schema is an object or a boolean
        """Returns whether certainly no value follows both schemas."""
        if depth > _MAX_DEPTH:
            return False
        if left is False or right is False:
            return True
        lefts, rights = self._parts(left, depth), self._parts(right, depth)
        for one in lefts:
            for options in (one.get("anyOf"), one.get("oneOf")):
                if isinstance(options, list) and all(self.exclude(option, right, depth + 1) for option in options):
                    return True
        for other in rights:
            for options in (other.get("anyOf"), other.get("oneOf")):
                if isinstance(options, list) and all(self.exclude(left, option, depth + 1) for option in options):
                    return True
        return any(self._parts_exclude(one, other, depth) for one in lefts for other in rights)

    def _parts(self, schema: Any, depth: int) -> list[Schema]:  # noqa: ANN401 - a schema is an object or a boolean
        """Returns schemas that a value of this one follows all: itself, what it refers to, and the parts of `allOf`."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return []
        if "$ref" in schema:
            try:
                return self._parts(self._resolve({"$ref": schema["$ref"]}), depth + 1)
            except UnsupportedSchemaError:
                return []
        parts: list[Schema] = [{name: value for name, value in schema.items() if name not in self._foreign}]
        for part in schema.get("allOf") or ():
            parts += self._parts(part, depth + 1)
        return parts

    def _parts_exclude(self, left: Schema, right: Schema, depth: int) -> bool:
        kinds = {*_kinds_of(left)} & {*_kinds_of(right)}
        values = [_values_of(left), _values_of(right)]
        if values[0] is not None and values[1] is not None:
            return not values[0].keys() & values[1].keys()
        for known, schema in zip(values, (right, left), strict=True):
            if known is not None:
                return not {_kind(value) for value in known.values()} & {*_kinds_of(schema)}
        reasons = {
            "object": lambda: self._members_exclude(left, right, depth),
            "string": lambda: _counts_exclude(left, right, "Length") or _prefixes_exclude(left, right),
            "array": lambda: _counts_exclude(left, right, "Items"),
            "number": lambda: _bounds_exclude(left, right),
        }
        return all(kind in reasons and reasons[kind]() for kind in kinds)

    def _members_exclude(self, left: Schema, right: Schema, depth: int) -> bool:
        for one, other in ((left, right), (right, left)):
            members = other.get("properties") or {}
            for name in one.get("required") or ():
                if name in members:
                    if self.exclude((one.get("properties") or {}).get(name, True), members[name], depth + 1):
                        return True
                elif other.get("additionalProperties") is False and not other.get("patternProperties"):
                    return True
        return False

    def complement(self, schema: Any, depth: int) -> Any:  # noqa: ANN401 - a schema is an object or a boolean
        """Returns a schema of values that do not follow `schema`.

        Raises:
            UnsupportedSchemaError: No schema says so.
        """
        if depth > _MAX_DEPTH:
            raise UnsupportedSchemaError
        if isinstance(schema, bool):
            return _NOTHING if schema else True
        schema = self._resolve(schema)
        if schema.keys() & self._foreign:
            raise UnsupportedSchemaError  # the draft of the document does not know them
        branches: list[Any] = []
        kinds = _kinds_of(schema)
        for keyword in schema.keys() - _ANNOTATIONS:
            branches += self._without(schema, keyword, kinds, depth + 1)
        return {"anyOf": branches} if len(branches) > 1 else branches[0] if branches else _NOTHING

    def _without(self, schema: Schema, keyword: str, kinds: Sequence[str], depth: int) -> list[Any]:
        """Returns schemas of values for which a keyword does not hold; it holds for all values of other kinds."""
        value = schema[keyword]
        match keyword:
            case "type":
                return [_without(*kinds)] if len(kinds) < len(_TYPES) else []
            case "const":
                return _other_than([value])
            case "enum":
                return _other_than(value)
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                return [
                    {"type": "object", "required": [name], "properties": {name: self.complement(inner, depth)}}
                    for name, inner in value.items()
                    if inner is not True and inner != {}
                ]
            case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum" if not isinstance(value, bool):
                return [{"type": "number", _OPPOSITE_BOUNDS[keyword]: value}]
            case "minLength" | "minItems" | "minProperties":
                return [{"type": _COUNTED[keyword], keyword.replace("min", "max"): value - 1}] if value > 0 else []
            case "maxLength" | "maxItems" | "maxProperties":
                return [{"type": _COUNTED[keyword], keyword.replace("max", "min"): value + 1}]
            case "anyOf" | "oneOf":  # of `oneOf` only what follows no option
                return [{"allOf": [self.complement(option, depth) for option in value]}]
            case "allOf":
                return [self.complement(option, depth) for option in value]
            case "not":
                return [self.schema(value, depth)]
            case "contains" if not schema.keys() & {"minContains", "maxContains"}:
                return [{"type": "array", "items": self.complement(value, depth)}]
            case "items" if not isinstance(value, list) and not schema.keys() & {"prefixItems", "additionalItems"}:
                other = {"type": "array", "contains": self.complement(value, depth)}
                return [self.schema(other, depth)]
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                return [
                    _all({"type": "object", "required": [name]}, missing)
                    for name, needed in value.items()
                    for missing in self._without_dependent(needed, depth)
                ]
            case "additionalProperties" | "additionalItems" if value is True or value == {}:
                return []
            case "then" | "else" if value is True or value == {} or "if" not in schema:
                return []
            case _:
                raise UnsupportedSchemaError

    def _without_dependent(self, needed: Any, depth: int) -> list[Any]:  # noqa: ANN401 - names or a schema
        """Returns schemas of objects in which what a member needs is missing."""
        if isinstance(needed, list):
            return [{"type": "object", "properties": {name: False}} for name in needed]
        return [self.complement(needed, depth)]

    def _resolve(self, schema: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever stands there
        """Returns a schema in place of a reference to it.

        Raises:
            UnsupportedSchemaError: It is no schema, or one of another document.
        """
        seen: set[str] = set()
        while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            if reference in seen or schema.keys() - _ANNOTATIONS != {"$ref"} or not reference.startswith("#"):
                raise UnsupportedSchemaError
            seen.add(reference)
            schema = self._root
            for part in reference.removeprefix("#").split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(schema, dict) or part not in schema:
                    raise UnsupportedSchemaError
                schema = schema[part]
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError
        return dict(schema)


_SINCE = {
    "draft-06": {"const", "contains", "propertyNames"},
    "draft-07": {"if", "then", "else"},
    "2019-09": {
        *("dependentRequired", "dependentSchemas", "minContains", "maxContains", "unevaluatedProperties"),
        "unevaluatedItems",
    },
    "2020-12": {"prefixItems"},
}
"""Keywords by the draft that introduced them; what a document's own draft does not know means nothing in it."""
_UNTIL = {"dependencies": "2019-09"}
"""Keywords by the draft that dropped them."""


def _foreign_keywords(dialect: object) -> frozenset[str]:
    drafts = ["draft-03", "draft-04", *_SINCE]
    known = next((place for place, draft in enumerate(drafts) if draft in str(dialect)), len(drafts))
    later = {keyword for draft in drafts[known + 1 :] for keyword in _SINCE.get(draft, ())}
    dropped = {keyword for keyword, draft in _UNTIL.items() if draft in drafts[: known + 1] and known < len(drafts)}
    return frozenset(later | dropped)


_OPPOSITE_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "exclusiveMinimum": "maximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMaximum": "minimum",
}
_COUNTED = {
    **dict.fromkeys(("minLength", "maxLength"), "string"),
    **dict.fromkeys(("minItems", "maxItems"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}


def _all(*schemas: Any) -> Any:  # noqa: ANN401 - a schema is an object or a boolean
    told = [schema for schema in schemas if schema is not True and schema != {}]
    return {"allOf": told} if len(told) > 1 else told[0] if told else True


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _kinds_of(schema: Schema) -> list[str]:
    """Returns the kinds of values that the type of a schema allows; a whole number is a number."""
    types = schema.get("type", _TYPES)
    types = [types] if isinstance(types, str) else types
    return [kind for kind in _TYPES if kind in types or (kind == "number" and "integer" in types)]


def _without(*kinds: str) -> dict[str, Any]:
    """Returns a schema of values of other kinds."""
    return {"type": [kind for kind in _TYPES if kind not in kinds]}


def _other_than(values: Iterable[Any]) -> list[Any]:
    """Returns schemas of values that are none of some; among arrays and objects, no value is told from others."""
    values = list(values)
    kinds = {_kind(value) for value in values}
    branches: list[Any] = [_without(*kinds)] if kinds < set(_TYPES) else []
    if words := [value for value in values if isinstance(value, str)]:
        if len(words) > _MAX_WORDS or sum(map(len, words)) > _MAX_WORD_CHARACTERS:
            raise UnsupportedSchemaError
        branches.append({"type": "string", "pattern": f"^(?:{_other_words(words)})$"})
    if "boolean" in kinds:
        branches += [{"enum": [other]} for other in (True, False) if not any(other is value for value in values)]
    if numbers := sorted({value for value in values if _kind(value) == "number"}):
        edges = [None, *numbers, None]
        for low, high in pairwise(edges):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            branches.append({"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}})
    return branches


def _other_words(words: Sequence[str]) -> str:
    """Returns a regular expression of all texts but some words."""
    heads: dict[str, list[str]] = {}
    for word in words:
        if word:
            heads.setdefault(word[0], []).append(word[1:])
    options = [] if "" in words else [""]
    options.append(f"[^{''.join(map(_escape, heads))}](?s:.*)" if heads else "(?s:.+)")
    options += [f"{_escape(head)}(?:{_other_words(rests)})" for head, rests in heads.items()]
    return "|".join(options)


def _escape(character: str) -> str:
    return character if re.match(r"[a-zA-Z0-9_ ]", character) else f"\\x{{{ord(character):x}}}"


def _values_of(schema: Schema) -> dict[str, Any] | None:
    """Returns the only values that may follow a schema, by what tells them apart; None: there are others."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    # 1 and 1.0 are one value of JSON Schema.
    return {
        json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value, sort_keys=True): value
        for value in values
        if _kind(value) in _kinds_of(schema)
    }


def _counts_exclude(left: Schema, right: Schema, counted: str) -> bool:
    for one, other in ((left, right), (right, left)):
        most, least = one.get(f"max{counted}"), other.get(f"min{counted}")
        if isinstance(most, int | float) and isinstance(least, int | float) and most < least:
            return True
    return False


def _bounds_exclude(left: Schema, right: Schema) -> bool:
    for one, other in ((left, right), (right, left)):
        most = [one.get(name) for name in ("maximum", "exclusiveMaximum")]
        least = [other.get(name) for name in ("minimum", "exclusiveMinimum")]
        if any(high < low for high in most if is_number(high) for low in least if is_number(low)):
            return True
    return False


def _prefixes_exclude(left: Schema, right: Schema) -> bool:
    prefixes = [_prefix(schema.get("pattern")) for schema in (left, right)]
    return not (prefixes[0].startswith(prefixes[1]) or prefixes[1].startswith(prefixes[0]))


def _prefix(pattern: object) -> str:
    """Returns the characters with which every text begins that a pattern matches."""
    if not isinstance(pattern, str) or not pattern.startswith("^") or "|" in pattern:
        return ""
    prefix, rest = "", pattern[1:]
    while found := re.match(r"([a-zA-Z0-9_/:@ -]|\\[./^$*+?()\[\]{}-])(?![*?{])", rest):
        prefix, rest = prefix + found[1][-1], rest[found.end() :]
    return prefix
