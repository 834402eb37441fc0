"""Goodput over load, and the time to first token of what was served."""

from pathlib import Path
from typing import Any


def plot(figures: dict[str, Any], path: Path) -> None:
    """Both servers side by side.

    Args:
        figures: Of the benchmark.
        path: Of the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6))
    for name, label in (("maitred", "maitred"), ("naive", "unbounded FIFO")):
        loads = {float(load): values for load, values in figures[name].items()}
        axes[0].plot(list(loads), [values["goodput_per_s"] for values in loads.values()], marker="o", label=label)
        p99 = [values["ttft_s"].get("p99", float("nan")) for values in loads.values()]
        axes[1].plot(list(loads), p99, marker="o", label=label)
    axes[0].axhline(figures["capacity_per_s"], color="grey", linewidth=0.8, linestyle="--", label="capacity")
    axes[0].set_ylabel("good answers per second")
    axes[0].set_ylim(bottom=0)
    axes[1].axhline(figures["objective_s"], color="grey", linewidth=0.8, linestyle="--", label="objective")
    axes[1].set_ylabel("time to first token, p99, s")
    axes[1].set_yscale("log")
    ticks = [float(load) for load in figures["maitred"]]
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{load:g}×" for load in ticks])
        axis.minorticks_off()
        axis.set_xlabel("offered load over capacity")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
