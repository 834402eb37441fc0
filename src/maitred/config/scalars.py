"""Readers of single values by the type of their setting, with the expected form in words."""

import difflib
import math
import re
from collections.abc import Callable

from msgspec import UNSET, inspect

from maitred.config.nodes import ConfigNode
from maitred.config.units import format_bytes, parse_bytes, parse_seconds

NULL_WORDS = frozenset({"", "~", "null"})
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})

ReadResult = tuple[object, str]
"""Value that was read, or `UNSET` and the expected form."""


def bounds(kind: inspect.IntType | inspect.FloatType, unit: str = "") -> str:
    """Returns the range of a number in words; empty if there is none."""

    def format_bound(bound: float) -> str:
        return format_bytes(int(bound)) if unit == "bytes" else str(bound)

    if kind.ge is not None and kind.le is not None:
        return f"from {format_bound(kind.ge)} to {format_bound(kind.le)}"
    parts = [
        f"{word} {format_bound(bound)}"
        for word, bound in (("at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
        if bound is not None
    ]
    return " and ".join(parts)


def _within(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def _read_bool(kind: inspect.Type, node: ConfigNode, unit: str) -> ReadResult:
    if isinstance(node.value, bool):
        return node.value, ""
    if node.is_text and isinstance(node.value, str):
        word = node.value.lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE, ""
    return UNSET, "true or false"


def _read_int(kind: inspect.Type, node: ConfigNode, unit: str) -> ReadResult:
    assert isinstance(kind, inspect.IntType)
    value: object = node.value
    if unit == "bytes" and isinstance(value, str):
        value = parse_bytes(value)
    elif node.is_text and isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            value = None
    if isinstance(value, int) and not isinstance(value, bool) and _within(kind, value):
        return value, ""
    form = "a size such as 64MiB," if unit == "bytes" else "a whole number"
    return UNSET, f"{form} {bounds(kind, unit)}".rstrip(" ,")


def _read_float(kind: inspect.Type, node: ConfigNode, unit: str) -> ReadResult:
    assert isinstance(kind, inspect.FloatType)
    value: object = node.value
    if unit == "seconds" and isinstance(value, str):
        value = parse_seconds(value)
    elif isinstance(value, int) or (node.is_text and isinstance(value, str)):
        try:
            value = float(value) if not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            value = None
    if isinstance(value, float) and math.isfinite(value) and _within(kind, value):
        return value, ""
    form = "a duration such as 500ms or 2m," if unit == "seconds" else "a number"
    return UNSET, f"{form} {bounds(kind)}".rstrip(" ,")


def _read_str(kind: inspect.Type, node: ConfigNode, unit: str) -> ReadResult:
    assert isinstance(kind, inspect.StrType)
    if isinstance(node.value, str):
        longest = math.inf if kind.max_length is None else kind.max_length
        matches = kind.pattern is None or re.search(kind.pattern, node.value) is not None
        if matches and (kind.min_length or 0) <= len(node.value) <= longest:
            return node.value, ""
        if not matches:
            return UNSET, f"text that matches {kind.pattern}"
    if kind.max_length is not None:
        return UNSET, f"text of {kind.min_length or 0} to {kind.max_length} characters"
    return UNSET, "text that is not empty" if kind.min_length else "text ('' for none)"


def _read_literal(kind: inspect.Type, node: ConfigNode, unit: str) -> ReadResult:
    assert isinstance(kind, inspect.LiteralType)
    for choice in kind.values:
        if node.value == choice:
            return choice, ""
    expected = "one of " + ", ".join(str(choice) for choice in kind.values)
    words = [choice for choice in kind.values if isinstance(choice, str)]
    close = difflib.get_close_matches(node.value[:64], words, n=1) if isinstance(node.value, str) else []
    return UNSET, expected + (f" (did you mean {close[0]}?)" if close else "")


def describe_value(node: ConfigNode) -> str:
    """Describes a wrong value in short, printable form; says if it was quoted, as that may be the fault."""
    value = node.value
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        quoted = repr(value if len(value) <= 60 else value[:60] + "…")
        if not _looks_typed(value):
            return quoted
        return quoted.strip("'") if node.is_text else f"the quoted text {quoted}"
    return str(value) if isinstance(value, float) or abs(value) < 10**30 else "a number that long"


def _looks_typed(text: str) -> bool:
    return text.lower() in _TRUE | _FALSE | NULL_WORDS or text[:1].isdigit()


READERS: dict[type[inspect.Type], Callable[[inspect.Type, ConfigNode, str], ReadResult]] = {
    inspect.BoolType: _read_bool,
    inspect.IntType: _read_int,
    inspect.FloatType: _read_float,
    inspect.StrType: _read_str,
    inspect.LiteralType: _read_literal,
}
"""Reader for each type of setting: (type, node, unit) -> result."""
