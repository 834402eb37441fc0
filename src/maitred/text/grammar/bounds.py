"""Bounds of numbers in JSON schemas, as bounds that llguidance holds exactly.

llguidance reads a bound as a double, writes it in decimal, and builds a regular expression of the numbers beyond it. So
it takes an exclusive bound for an inclusive one in some ranges, rounds bounds that no double holds, and fails beyond 63
bits. Each bound is therefore moved inwards to the next inclusive one that it holds as it is: no number that the schema
excludes can be written. What is lost lies within a billionth beside an exclusive bound, or beyond 63 bits.
"""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any, TypeGuard

_MAX_INTEGER = 9_223_372_036_854_774_784
"""Largest double within 63 bits."""
_MAX_DECIMAL = Decimal(9_220_000_000_000_000_000)
_OPEN_END = 10**17
"""Magnitude up to which llguidance takes a bound without one on the other side."""
_DIGITS = 15
"""Significant digits that every double keeps."""
_STEP_EXPONENT = -9
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def narrow_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema whose bounds are inclusive and held exactly; every number within them is in the given ones."""
    low = _tightest(schema, "minimum", "exclusiveMinimum", 1)
    high = _tightest(schema, "maximum", "exclusiveMaximum", -1)
    if low is None and high is None:
        return schema
    narrowed: tuple[Decimal | None, Decimal | None]
    if _is_integer(schema):
        narrowed = _whole(low, 1), _whole(high, -1)
        largest = Decimal(_MAX_INTEGER)
    else:
        width = None if low is None or high is None else high[0] - low[0]
        narrowed = _decimal(low, 1, width), _decimal(high, -1, width)
        largest = _MAX_DECIMAL
    least, most = narrowed
    if least is not None and least >= _OPEN_END and most is None:
        most = largest
    if most is not None and most <= -_OPEN_END and least is None:
        least = -largest
    result = {keyword: value for keyword, value in schema.items() if keyword not in _BOUNDS}
    if least is not None:
        result["minimum"] = _number(max(least, -largest))
    if most is not None:
        result["maximum"] = _number(min(most, largest))
    return result


def holds_exactly(keyword: str, value: object) -> bool:
    """Returns whether llguidance holds the numbers of a keyword's value exactly, or bounds them from within."""
    if keyword in ("const", "enum", "multipleOf"):
        return _is_exact(value)
    if keyword in _BOUNDS and is_number(value):
        outwards = value if keyword in ("minimum", "exclusiveMinimum") else -value
        return outwards <= _MAX_INTEGER
    return True


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number in JSON; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: object) -> bool:
    match value:
        case int():
            try:
                return Decimal(repr(float(value))) == value
            except OverflowError:
                return False
        case list():
            return all(map(_is_exact, value))
        case dict():
            return all(map(_is_exact, value.values()))
        case _:
            return True


def _is_integer(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    return "integer" in types and "number" not in types


def _tightest(schema: Mapping[str, Any], inclusive: str, exclusive: str, sign: int) -> tuple[Decimal, bool] | None:
    """Returns the bound of one side that excludes most, and whether it is itself excluded.

    Before draft 6, the exclusive one is a boolean that tells how the other is meant.
    """
    bounds = []
    if is_number(value := schema.get(inclusive)):
        bounds.append((_with_sign(sign, Decimal(repr(value))), schema.get(exclusive) is True))
    if is_number(value := schema.get(exclusive)):
        bounds.append((_with_sign(sign, Decimal(repr(value))), True))
    if not bounds:
        return None
    bound, excluded = max(bounds)
    return _with_sign(sign, bound), excluded


def _whole(bound: tuple[Decimal, bool] | None, sign: int) -> Decimal | None:
    """Returns the next whole number inwards that a double holds."""
    if bound is None:
        return None
    value, excluded = _with_sign(sign, bound[0]), bound[1]
    if abs(value) > _MAX_INTEGER:
        return bound[0]
    least = math.ceil(value)
    least += excluded and least == value
    double = float(least)
    while int(double) < least:
        double = math.nextafter(double, math.inf)
    return Decimal(sign * int(double))


def _decimal(bound: tuple[Decimal, bool] | None, sign: int, width: Decimal | None) -> Decimal | None:
    """Returns the next decimal inwards with few enough digits; from an excluded bound, a billionth further."""
    if bound is None:
        return None
    value, excluded = _with_sign(sign, bound[0]), bound[1]
    exponent = _STEP_EXPONENT if not width else min(_STEP_EXPONENT, width.adjusted() - 3)
    with localcontext(prec=_DIGITS, rounding=ROUND_CEILING):
        moved = value + Decimal(1).scaleb(exponent) if excluded else +value
    return _with_sign(sign, moved)


def _with_sign(sign: int, value: Decimal) -> Decimal:
    """Returns a value or its negative, with all of its digits."""
    return value if sign > 0 else value.copy_negate()


def _number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)
