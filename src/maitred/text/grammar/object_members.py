"""Rewriting of `minProperties`, `maxProperties` and `propertyNames` as members that must be there or must not.

The names that `additionalProperties` allows may repeat in what a grammar writes, and two members of one name count as
one. So only members of different names are counted: those of `properties`, and one further.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Any

from maitred.text.grammar.bounds import is_number
from maitred.text.grammar.language import matches_pattern

_MAX_OBJECTS = 48
"""Largest number of alternatives for one count."""
_COUNTS = ("minProperties", "maxProperties")
Schema = Mapping[str, Any]


def members_are_counted(schema: Schema) -> bool:
    """Returns whether a grammar counts the members of an object as the schema does."""
    least = schema.get("minProperties")
    if not is_number(least) or least <= 1 or has_fixed_members(schema):
        return True
    return least <= 1 + len(set(schema.get("required") or ()))


def has_fixed_members(schema: Schema) -> bool:
    """Returns whether an object has no other members than those of `properties`."""
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def count_members(schema: dict[str, Any]) -> list[Any] | None:
    """Returns schemas of which an object has to follow one, and removes the counts that they replace.

    The members that a grammar counts itself are left to it: those of an object whose members are all required, but for
    one or for any number of others.

    Returns:
        The schemas; None: nothing is replaced, as a grammar counts these members or as they cannot be counted.
    """
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if not is_number(least) or not (most is None or is_number(most)):
        return None
    fixed = has_fixed_members(schema)
    required = dict.fromkeys(schema.get("required") or ())
    declared: Mapping[str, Any] = schema.get("properties") or {}
    optional = [name for name, inner in declared.items() if name not in required and inner is not False]
    if not schema.keys() & {*_COUNTS} or (not optional and members_are_counted(schema)):
        return None
    further = max(0, int(least) - len(required))
    counts = {keyword: schema[keyword] for keyword in _COUNTS if keyword in schema}
    objects: list[Any] = []
    if most is None:
        objects = [{"required": [*chosen]} if chosen else True for chosen in _sets(optional, further)]
    elif (allowed := min(int(most) - len(required), len(optional))) >= further:
        for names in _sets(optional, allowed):
            closed = {"properties": {name: name in names or name in required for name in [*declared, *required]}}
            objects += [
                {**closed, "required": [*chosen], "additionalProperties": False} for chosen in _sets(names, further)
            ]
    # One member more may have any name that is not declared; a grammar counts it.
    fewer = max(0, further - 1)
    if not fixed and (most is None or fewer + len(required) <= most):
        objects += [
            {"properties": {name: name in chosen for name in optional}, "required": [*chosen], **counts}
            for chosen in _sets(optional, fewer)
        ]
    if not objects:
        return None
    for keyword in _COUNTS:
        schema.pop(keyword, None)
    return objects[:_MAX_OBJECTS]


def _sets(names: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yields sets of so many of the names: all of them if they are few, otherwise those of neighbours."""
    if comb(len(names), size) <= _MAX_OBJECTS:
        yield from combinations(names, size)
    else:
        for start in range(len(names) - size + 1):
            yield tuple(names[start : start + size])


class MemberNames:
    """Names that a `propertyNames` allows.

    Args:
        names: Its schema, without references and annotations.

    Attributes:
        words: All of them, or None if there are too many.
        pattern: Regular expression of the others, or None if all are allowed.
    """

    def __init__(self, names: Schema) -> None:
        self.words: list[str] | None = None
        self.pattern: str | None = None
        keywords = names.keys() - {"type"}
        if keywords & {"enum", "const"}:
            words = names["enum"] if "enum" in names else [names["const"]]
            self.words = [word for word in words if isinstance(word, str)]
        elif keywords == {"pattern"}:
            self.pattern = names["pattern"]
        elif keywords and keywords <= {"minLength", "maxLength"}:
            least, most = int(names.get("minLength", 0)), names.get("maxLength")
            self.pattern = f"^(?s:.{{{least},{'' if most is None else int(most)}}})$"
        self.known = not keywords or self.pattern is not None or (self.words is not None and len(keywords) == 1)
        """Whether no other names are allowed."""

    def allow(self, name: str) -> bool:
        """Returns whether a name is allowed."""
        if self.words is not None:
            return name in self.words
        return self.pattern is None or matches_pattern(self.pattern, name)
