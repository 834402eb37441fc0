"""The short texts that distributions, profiles and trace options are written in: ``kind:name=number,name=number``.

Everything here raises `ValueError` with the reason alone; whoever knows the place and the forms makes a sentence of it.
"""

import itertools
import math


def split_kind(text: str) -> tuple[str, str]:
    """The kind, and what comes after its colon."""
    kind, _, rest = text.strip().partition(":")
    return kind.strip(), rest.strip()


def number(text: str) -> float:
    """A finite number of at least 0.

    Raises:
        ValueError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text.strip()} is not a finite number of at least 0")
    return value


def pairs(text: str, between: str = "=") -> list[tuple[str, str]]:
    """The two sides of each ``left=right`` (or another sign `between`), in order.

    Raises:
        ValueError: There is a part without it, or none at all.
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
    """The numbers with these names, in the order of `names`; all of them, once, and no others.

    Raises:
        ValueError: One is missing, unknown, given twice or no number.
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
    """Pairs of numbers whose left sides rise.

    Raises:
        ValueError: One is no number, or they do not rise.
    """
    points = [(number(left), number(right)) for left, right in pairs(text)]
    for (before, _), (after, _) in itertools.pairwise(points):
        if after <= before:
            raise ValueError(f"{after:g} comes after {before:g}; the left sides must rise")
    return points
