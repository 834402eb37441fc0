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

    panels = [panel for panel in PANELS if panel[0] in parts]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(2.6 * len(panels), 2.4), squeeze=False)
    for axis, (part, key, label) in zip(axes[0], panels, strict=True):
        values = {name: one[key] for name, one in parts[part]["gateways"].items() if one.get(key, 0) > 0}
        values.pop("direct", None)
        names = list(reversed(values))
        colours = [_OURS if name == "maitred" else _OTHERS for name in names]
        bars = axis.barh(names, [values[name] for name in names], color=colours)
        axis.bar_label(
            bars, [f"{values[name]:,.3g}" if values[name] < 100 else f"{values[name]:,.0f}" for name in names]
        )
        axis.set_xscale("log")
        axis.margins(x=0.4)
        axis.set_title(label, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
