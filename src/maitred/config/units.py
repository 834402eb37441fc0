"""Units of durations and sizes as people write them, such as ``500ms``, ``1.5 h`` and ``64MiB``.

A bare number is a duration in seconds, or a size in bytes.
"""

import math
import re
from fractions import Fraction

_SECONDS = {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(.+?)\s*([a-zµ]*)", re.DOTALL)


def parse_seconds(text: str) -> float | None:
    """Parses a duration to seconds; None if the text is not one, or not finite."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or match[2] not in _SECONDS:
        return None
    try:
        seconds = float(match[1]) * _SECONDS[match[2]]
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"([0-9_]{1,30}(?:\.[0-9]{1,30})?)\s*([a-z]{0,3})", re.IGNORECASE)


def parse_bytes(text: str) -> int | None:
    """Parses a size to bytes; None if the text is not one, or not a whole number of bytes.

    Binary units (KiB, MiB, GiB, TiB) count in 1024s, decimal ones (kB, MB, GB, TB) in 1000s. A bare ``M`` is refused:
    it means either, depending on the reader.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    digits, unit = match[1].replace("_", ""), match[2].lower()
    if not digits[:1].isdigit() or unit not in _BYTES:
        return None
    size = Fraction(digits) * _BYTES[unit]
    return int(size) if size.denominator == 1 else None


def format_bytes(size_bytes: int) -> str:
    """Formats a size in the shortest exact form that `parse_bytes` reads back."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)
