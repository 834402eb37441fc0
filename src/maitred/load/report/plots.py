"""Figures of a run, all together."""

from collections.abc import Callable

from maitred.load.measure.result import LoadResult
from maitred.load.report import canvas, over_time, spread

PLOTS: dict[str, Callable[[LoadResult, str], str]] = {
    plot.__name__.replace("_", "-"): plot
    for plot in (
        over_time.ttft_over_time,
        over_time.itl_over_time,
        spread.distributions,
        spread.ttft_by_prompt,
        over_time.throughput,
        over_time.arrivals,
        over_time.goodput,
        spread.tenants,
        spread.outcomes,
        over_time.tester,
    )
}


def draw(result: LoadResult) -> dict[str, str]:
    """Draws every figure that the run has data for: name -> SVG.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    with canvas.style():
        drawn = {name: plot(result, name) for name, plot in PLOTS.items()}
    return {name: text for name, text in drawn.items() if text}
