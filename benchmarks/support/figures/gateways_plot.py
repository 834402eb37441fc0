"""Gateways side by side, one panel for each figure that is worth a look."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PANELS = (
    ("whole", "per_s", "requests/s on one core"),
    ("whole", "cpu_us", "CPU per request, µs"),
    ("streams", "per_s", "streams of 64 tokens/s"),
    ("latency", "c1_added_p50_ms", "added to one caller, p50, ms"),
    ("idle", "memory_mib", "memory, idle, MiB"),
)
_LEFT_OUT = ("direct", "workers")
"""No gateway, and one that has two cores."""
_OURS, _OTHERS = "tab:blue", "lightgrey"


def plot(parts: Mapping[str, Any], path: Path) -> None:
    """Bars on logarithmic scales, since they are a hundred times apart.

    Args:
        parts: Of the benchmark's figures.
        path: Of the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = {label: _values(parts.get(part), key) for part, key, label in PANELS}
    panels = {label: values for label, values in panels.items() if values}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(2.6 * len(panels), 2.4), squeeze=False)
    for axis, (label, values) in zip(axes[0], panels.items(), strict=True):
        colours = [_OURS if name == "maitred" else _OTHERS for name in values]
        bars = axis.barh(list(values), list(values.values()), color=colours)
        axis.bar_label(
            bars, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values.values()], fontsize=8
        )
        axis.set_xscale("log")
        axis.set_xlim(min(values.values()) / 3, max(values.values()) * 8)
        axis.set_title(label, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _values(part: Mapping[str, Any] | None, key: str) -> dict[str, float]:
    """Of the gateways that have one, from below."""
    gateways = part["gateways"] if part else {}
    values = {name: one[key] for name, one in gateways.items() if name not in _LEFT_OUT and one.get(key, 0) > 0}
    return dict(reversed(values.items()))
