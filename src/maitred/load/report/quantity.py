"""Numbers for readers: three significant digits and a suitable unit."""

import math
import re

NONE = "–"
"""Text for a value that was not measured."""


def significant(value: float) -> str:
    """Formats three significant digits without scientific notation: ``0.0123``, ``12.3``, ``12,345``."""
    if not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    # The number of digits is that of the rounded value: 9.996 is 10.0, not 10.00.
    magnitude = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:,.{max(0, 2 - magnitude)}f}"


def duration(seconds: float | None) -> str:
    """Formats a time in a suitable unit, from microseconds to minutes."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 0.9995e-3:
        return f"{significant(seconds * 1e6)} µs"
    if size < 0.9995:
        return f"{significant(seconds * 1e3)} ms"
    if size < 120:
        return f"{significant(seconds)} s"
    minutes, rest = divmod(round(size), 60)
    return f"{'-' if seconds < 0 else ''}{minutes} min {rest} s"


def rate(per_s: float, unit: str = "") -> str:
    """Formats a rate per second."""
    return f"{significant(per_s)} {unit}/s" if unit else f"{significant(per_s)}/s"


def count(number: int) -> str:
    """Formats a whole number."""
    return f"{number:,}"


def share(part: float | None) -> str:
    """Formats a share in percent; only exact values give ``100 %`` or ``0 %``."""
    if part is None or not math.isfinite(part):
        return NONE
    if part in (0, 1):
        return f"{part:.0%}".replace("%", " %")
    percent = min(max(part * 100, 0.1), 99.9) if 0 < part < 1 else part * 100
    return f"{'< ' if 0 < part < 0.001 else ''}{percent:.1f} %"


def exact(text: str) -> str:
    """Formats a chosen number without trailing zeros: ``50 ms`` for ``50.0 ms``."""
    return re.sub(r"(\.\d*?)0+(?=\D|$)", lambda it: "" if it[1] == "." else it[1], text)


def size(amount_bytes: int) -> str:
    """Formats an amount of memory."""
    mebibytes = amount_bytes / 2**20
    return f"{significant(mebibytes)} MiB" if mebibytes < 1024 else f"{significant(mebibytes / 1024)} GiB"


def plural(number: int, noun: str) -> str:
    """Formats a count with its noun: ``1 request``, ``2 requests``."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"
