"""Rewriting of `contains` and `uniqueItems` as the items of arrays, place by place.

A grammar of an array says what stands at each place at its start, and what may follow. So an array that contains an
item of a schema is one of several: with the item in the first place, or in the second, and so on, up to a few. An array
in which only the last of a thousand items fits is valid, too, and not among them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

from maitred.text.grammar.bounds import is_number

_MAX_ARRAYS = 32
"""Largest number of alternatives for one `contains`."""
_MAX_PLACES = 8
"""Number of places at the start of an array at which the items are looked for."""
_MAX_LEAST = 64
_MAX_UNIQUE_ITEMS = 5
_NOTHING: dict[str, Any] = {"enum": []}
Schema = Mapping[str, Any]


def arrays_that_contain(
    item: Any,  # noqa: ANN401 - a schema is an object or a boolean
    least: int,
    most: int | None,
    longest: int | None,
    *,
    complement: Callable[[], Any],
    prefix_keywords: tuple[str, str],
) -> list[Any] | None:
    """Returns schemas of arrays with some items of a schema; None: there are too many.

    Args:
        item: Schema of these items.
        least: Smallest number of them.
        most: Largest number of them, or None if it is unlimited.
        longest: Largest length of the arrays, or None.
        complement: Makes the schema of all other items.
        prefix_keywords: Keywords of the draft for the items at the start, and for those that follow.
    """
    if (most is not None and most < least) or (longest is not None and longest < least):
        return [_NOTHING]
    if least > _MAX_LEAST:
        return None
    if most is None and least <= 0:
        return [True]
    prefix, rest = prefix_keywords
    if most is None:
        return [
            {prefix: [item if place in places else True for place in range(places[-1] + 1)], "minItems": places[-1] + 1}
            for places in _places(least, longest)
        ]
    other = complement()
    arrays: list[Any] = []
    for count in range(least, min(most, least + _MAX_PLACES) + 1):
        if count == 0:
            arrays.append({"items": other})
            continue
        if longest is not None and count > longest:
            break
        arrays += [
            {
                prefix: [item if place in places else other for place in range(places[-1] + 1)],
                rest: other,
                "minItems": places[-1] + 1,
            }
            for places in _places(count, longest)
        ]
        if len(arrays) >= _MAX_ARRAYS:
            break
    return arrays


def _places(count: int, longest: int | None) -> Iterator[tuple[int, ...]]:
    """Yields sets of places for a number of items, at the start of an array and within its length."""
    end = max(count, _MAX_PLACES) if longest is None else min(longest, max(count, _MAX_PLACES))
    found = 0
    for last in range(count - 1, end):
        for before in combinations(range(last), count - 1):
            found += 1
            if found > _MAX_ARRAYS:
                return
            yield (*before, last)


def arrays_of_unique_items(schema: dict[str, Any], items: Schema, kinds: Sequence[str]) -> list[Any] | None:
    """Returns all arrays of different items, where there are few; removes the keywords that they replace.

    Args:
        schema: Schema of the array, whose `uniqueItems` is true.
        items: Schema of its items, without a reference.
        kinds: Kinds of values that the type of `items` allows.
    """
    values = _values(items, kinds)
    if values is None or len(values) > _MAX_UNIQUE_ITEMS:
        return None
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    lengths = range(int(least), 1 + min(len(values), int(most) if is_number(most) else len(values)))
    arrays = [list(array) for length in lengths for array in permutations(values, length)]
    for keyword in ("uniqueItems", "items", "minItems", "maxItems"):
        schema.pop(keyword, None)
    return [{"enum": arrays}]


def _values(items: Schema, kinds: Sequence[str]) -> list[Any] | None:
    """Returns the values that an item may have, each once; None: they are too many to tell, or hard to tell apart."""
    match items:
        case {"enum": list() as values} if items.keys() <= {"enum", "type"}:
            pass
        case {"const": value} if items.keys() <= {"const", "type"}:
            values = [value]
        case {"type": "boolean", **others} if not others:
            return [True, False]
        case {"type": "null", **others} if not others:
            return [None]
        case {"type": "integer"}:
            return _integers(items)
        case _:
            return None
    names = {str: "string", int: "number", bool: "boolean", type(None): "null"}
    if not {type(value) for value in values} <= names.keys():
        return None
    # 1 and true are equal in Python, and two values of JSON.
    different = {(type(value), value): value for value in values}
    return [value for value in different.values() if names[type(value)] in kinds]


def _integers(items: Schema) -> list[Any] | None:
    """Returns the whole numbers between bounds; None: they are too many, or another keyword chooses among them."""
    if not items.keys() <= {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
        return None
    if not all(type(bound) is int for keyword, bound in items.items() if keyword != "type"):
        return None
    lows = [items[keyword] + more for keyword, more in (("minimum", 0), ("exclusiveMinimum", 1)) if keyword in items]
    highs = [items[keyword] - more for keyword, more in (("maximum", 0), ("exclusiveMaximum", 1)) if keyword in items]
    if not lows or not highs or min(highs) - max(lows) >= _MAX_UNIQUE_ITEMS:
        return None
    return [*range(max(lows), min(highs) + 1)]
