"""What is found in the caches, and when the first token comes, over load."""

from pathlib import Path
from typing import Any


def plot(figures: dict[str, Any], path: Path) -> None:
    """Hits over those of one cache, and mean time to first token, of each policy.

    Args:
        figures: Of the benchmark.
        path: Of the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (found, waited) = pyplot.subplots(1, 2, figsize=(11, 3.6))
    loads = {float(load): by_policy for load, by_policy in figures["by_load"].items()}
    for policy in figures["by_policy"]:
        of_policy = [by_policy[policy] for by_policy in loads.values()]
        found.plot(list(loads), [point["hit_rate_over_oracle"] for point in of_policy], marker="o", label=policy)
        waited.plot(list(loads), [point["ttft_s"]["mean"] for point in of_policy], marker="o", label=policy)
    found.axhline(1.0, color="grey", linewidth=0.8, linestyle="--", label="one cache of the same size")
    found.set_ylabel("prompt tokens found, over one cache")
    found.set_ylim(0, 1.05)
    waited.set_ylabel("time to first token, mean, s")
    waited.set_ylim(bottom=0)
    for axis in (found, waited):
        axis.set_xticks(list(loads), [f"{load:g}×" for load in loads])
        axis.minorticks_off()
        axis.set_xlabel("load over that of the trace")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
