"""Parser of the short texts ``kind:name=number,name=number`` for distributions, profiles and options.

All functions here raise `ValueError` with only the reason; the caller, which knows the setting and its forms, makes the
full message.
"""

import itertools
import math


def split_kind(text: str) -> tuple[str, str]:
    """Splits a text into its kind and the part after the colon."""
    kind, _, rest = text.strip().partition(":")
    return kind.strip(), rest.strip()


def number(text: str) -> float:
    """Parses a finite number of at least 0.

    Raises:
        ValueError: The text is not such a number.
    """
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text.strip()} is not a finite number of at least 0")
    return value


def pairs(text: str, between: str = "=") -> list[tuple[str, str]]:
    """Splits a text into the two sides of each ``left=right`` (or another separator), in order.

    Raises:
        ValueError: A part has no separator, or there is no part.
    """
    found: list[tuple[str, str]] = []
    for part in text.split(","):
        left, sign, right = part.partition(between)
        if not sign:
            raise ValueError(
                f"{part.strip()!r} should be `name{between}number`" if part.strip() else "a value is missing"
            )
        found.append((left.strip(), right.strip()))
    return found


def named_numbers(text: str, *names: str) -> list[float]:
    """Parses numbers by name, in the order of `names`; each name must occur exactly once.

    Raises:
        ValueError: A name is missing, unknown or given twice, or a value is not a number.
    """
    given: dict[str, float] = {}
    for name, value in pairs(text):
        if name not in names:
            raise ValueError(f"{name!r} is not one of {', '.join(names)}")
        if name in given:
            raise ValueError(f"{name!r} is given twice")
        given[name] = number(value)
    for name in names:
        if name not in given:
            raise ValueError(f"{name!r} is missing")
    return [given[name] for name in names]


def rising_numbers(text: str) -> list[tuple[float, float]]:
    """Parses pairs of numbers whose left sides rise.

    Raises:
        ValueError: A side is not a number, or the left sides do not rise.
    """
    points = [(number(left), number(right)) for left, right in pairs(text)]
    for (before, _), (after, _) in itertools.pairwise(points):
        if after <= before:
            raise ValueError(f"{after:g} comes after {before:g}; the left sides must rise")
    return points
