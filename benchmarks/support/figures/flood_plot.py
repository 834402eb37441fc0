"""The light tenants' times to first token in a flood, as curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot(curves: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """For each model, the share of the light tenants' requests that had their first token by a time.

    Args:
        curves: Model -> situation -> times in seconds.
        path: Of the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5.5 * len(curves), 3.6), squeeze=False)
    for axis, (model, situations) in zip(axes[0], curves.items(), strict=True):
        for situation, times in situations.items():
            ordered = sorted(times)
            axis.step(
                ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], where="post", label=situation
            )
        axis.set_title(f"{model}: light tenants")
        axis.set_xscale("log")
        axis.set_xlabel("time to first token, s")
        axis.set_ylabel("share of requests")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
