"""Durations as people write them: ``500ms``, ``30s``, ``2m``, ``1.5 h``; a bare number counts seconds."""

import math
import re

_UNITS = {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(.+?)\s*([a-zµ]*)", re.DOTALL)


def parse_seconds(text: str) -> float | None:
    """The duration in seconds; None if the text is not one, or not finite."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        return None
    try:
        seconds = float(match[1]) * _UNITS[match[2]]
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
