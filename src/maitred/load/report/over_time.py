"""Figures of a run over time."""

from typing import TYPE_CHECKING, Any

import numpy as np

from maitred.load.measure.record import UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.measure.series import TimeSeries, quantile_by_step
from maitred.load.measure.times import Flags, Floats
from maitred.load.report import canvas
from maitred.load.report.canvas import BLUE, GREEN, GREY, INK, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))


def ttft_over_time(result: LoadResult, name: str) -> str:
    """Plots the time to first token of every request by its due time, with p50 and p95 of each step."""
    ttft_s = result.ttft_s()
    if not _some(ttft_s):
        return ""
    figure, (axes,) = canvas.figure()
    _time_axis(axes, result)
    met = result.met_flags()
    due_s = result.times.intended_s
    judged = _has_objectives(result)
    groups: list[tuple[str, str, Flags]] = [
        ("met objectives" if judged else "complete", BLUE, met),
        ("missed", ORANGE, result.times.complete & ~met),
        ("not complete", RED, ~result.times.complete),
    ]
    # The smallest share of dots that keeps the picture is used for all groups, so that their sizes stay comparable.
    some = canvas.thin(np.flatnonzero(~np.isnan(ttft_s)))
    for label, colour, group in groups:
        chosen = some[group[some]]
        canvas.dots(axes, due_s[chosen], ttft_s[chosen], colour, label)
    _quantile_lines(axes, result, due_s, ttft_s, (0.5, 0.95), INK)
    _objective(axes, result.objectives.ttft_s)
    canvas.fit_seconds(axes, ttft_s)
    axes.set_title("Time to first token")
    canvas.legend(axes)
    return canvas.svg(figure, name, "Time to first token over the run")


def itl_over_time(result: LoadResult, name: str) -> str:
    """Plots the median and p99 of the time between tokens by arrival time."""
    values, _ = result.itl_s()
    if not len(values):
        return ""
    figure, (axes,) = canvas.figure(height_in=2.4)
    _time_axis(axes, result)
    drawn_s = _quantile_lines(axes, result, result.times.itl_arrival_s, values, (0.5, 0.95, 0.99), BLUE)
    _objective(axes, result.objectives.tpot_s)
    canvas.fit_seconds(axes, drawn_s)
    axes.set_title("Time between tokens")
    canvas.legend(axes)
    return canvas.svg(figure, name, "Time between tokens over the run")


def throughput(result: LoadResult, name: str) -> str:
    """Plots the tokens per second, and the number of open requests."""
    series = result.series
    if not any(series.output_tokens_per_s):
        return ""
    figure, (tokens, still_open) = canvas.figure(2, 1, height_in=3.6, share_x=True, heights=[3, 2])
    _steps(tokens, series, series.output_tokens_per_s, BLUE)
    tokens.set_title("Output tokens per second")
    _steps(still_open, series, series.open, GREY)
    still_open.set_title("Open requests")
    for axes in (tokens, still_open):
        _time_axis(axes, result, label=axes is still_open, named=axes is tokens)
        canvas.numbers_axis(axes)
    return canvas.svg(figure, name, "Output tokens per second and open requests over the run")


def arrivals(result: LoadResult, name: str) -> str:
    """Plots due requests against ended requests, per second."""
    series = result.series
    if not any(series.due):
        return ""
    figure, (axes,) = canvas.figure(height_in=2.4)
    _time_axis(axes, result)
    width = max(1, len(series.due) // 40)
    others = np.sum(
        [ended for outcome, ended in series.ended.items() if outcome != UserOutcome.COMPLETE]
        or [[0] * len(series.due)],
        axis=0,
    )
    for label, counts, colour in (
        ("due", np.array(series.due), GREY),
        ("complete", np.array(series.ended.get(UserOutcome.COMPLETE, [0] * len(series.due))), GREEN),
        ("ended otherwise", others, RED),
    ):
        if counts.any():
            axes.plot(*_whole_steps(series, _smooth(counts / series.step_s, width)), color=colour, label=label)
    canvas.numbers_axis(axes)
    mean = f", mean over {width * series.step_s:g} s" if width * series.step_s > 1 else ""
    axes.set_title(f"Requests per second{mean}")
    canvas.legend(axes)
    return canvas.svg(figure, name, "Requests due and ended per second")


def goodput(result: LoadResult, name: str) -> str:
    """Plots due requests against requests that met all objectives."""
    series = result.series
    if not _has_objectives(result) or not any(series.due):
        return ""
    figure, (axes,) = canvas.figure(height_in=2.4)
    _time_axis(axes, result)
    width = max(1, len(series.due) // 40)
    ended = np.sum(list(series.ended.values()), axis=0) / series.step_s
    middles, all_ended = _whole_steps(series, _smooth(ended, width))
    _, good = _whole_steps(series, _smooth(np.array(series.goodput_per_s), width))
    axes.fill_between(middles, 0, good, color=GREEN, alpha=0.35, linewidth=0, label="met all objectives")
    axes.fill_between(middles, good, all_ended, color=ORANGE, alpha=0.45, linewidth=0, label="missed, or not complete")
    axes.plot(*_whole_steps(series, _smooth(np.array(series.due) / series.step_s, width)), color=GREY, label="due")
    canvas.numbers_axis(axes)
    mean = f", mean over {width * series.step_s:g} s" if width * series.step_s > 1 else ""
    axes.set_title(f"Requests per second{mean}")
    canvas.legend(axes)
    return canvas.svg(figure, name, "Requests per second that met the objectives, and that did not")


def tester(result: LoadResult, name: str) -> str:
    """Plots the tester's own load, which shows whether the other figures can be trusted."""
    series = result.series
    if all(value is None for value in series.cpu_share):
        return ""
    figure, (cpu, lag) = canvas.figure(1, 2, height_in=2.2)
    for axes in (cpu, lag):
        _time_axis(axes, result, named=False)
    canvas.line(cpu, _middles(series), _floats(series.cpu_share), colour=BLUE)
    cpu.axhline(1, color=RED, linewidth=1, linestyle=(0, (1, 1.5)))
    cpu.set_ylim(0, max(1.08, 1.05 * float(np.nanmax(_floats(series.cpu_share)))))
    cpu.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    cpu.set_title("The tester's processor time, of one core")
    canvas.line(lag, _middles(series), _floats(series.lag_s), colour=BLUE)
    lag.set_ylim(bottom=0)
    canvas.seconds_axis(lag)
    lag.set_title("Its longest delay of each step")
    return canvas.svg(figure, name, "The tester's own use of the processor and its delays")


def _some(values: Floats) -> bool:
    return bool((~np.isnan(values)).any())


def _has_objectives(result: LoadResult) -> bool:
    objectives = result.objectives
    return any(bound is not None for bound in (objectives.ttft_s, objectives.tpot_s, objectives.e2e_s))


def _floats(values: list[float | None]) -> Floats:
    return np.array(values, dtype=np.float64)


def _middles(series: TimeSeries) -> Floats:
    middles: Floats = (np.arange(len(series.due), dtype=np.float64) + 0.5) * series.step_s
    return middles


def _whole_steps(series: TimeSeries, values: Floats) -> tuple[Floats, Floats]:
    """Returns times and values of a line from the start of the first step to the end of the last.

    From middle to middle, a run of one step would be a line without length.
    """
    end_s = len(values) * series.step_s
    return np.concatenate([[0], _middles(series), [end_s]]), np.concatenate([values[:1], values, values[-1:]])


def _smooth(values: Floats, width: int) -> Floats:
    """Computes a moving mean; its window is narrower at the ends."""
    kernel = np.ones(width)
    means: Floats = np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
    return means


def _quantile_lines(
    axes: "Axes", result: LoadResult, at_s: Floats, values: Floats, ranks: tuple[float, ...], colour: str
) -> Floats:
    """Draws quantiles over time as lines, solid to dotted, and returns all their values.

    A step is wide enough to hold about 20 values, because the p95 of three values is noise.
    """
    known = ~np.isnan(values)
    at_s, values = at_s[known], values[known]
    bins = int(np.clip(len(values) / 20, 1, 90))
    width_s = max(result.seconds, 1e-9) / bins
    step = np.minimum((at_s / width_s).astype(np.int64), bins - 1)
    middles = (np.arange(bins) + 0.5) * width_s
    lines = [_floats(quantile_by_step(rank, step, values, bins)) for rank in ranks]
    for rank, line, dash in zip(ranks, lines, DASHES, strict=False):
        canvas.line(axes, middles, line, colour=colour, label=f"p{rank * 100:.0f}", dashes=dash)
    return np.concatenate(lines)


def _steps(axes: "Axes", series: TimeSeries, values: list[float] | list[int], colour: str) -> None:
    edges = np.arange(len(values) + 1) * series.step_s
    axes.stairs(values, edges, fill=True, color=colour, alpha=0.3)
    axes.stairs(values, edges, color=colour, linewidth=1.1)


def _time_axis(axes: "Axes", result: LoadResult, *, label: bool = True, named: bool = True) -> None:
    """Makes a time axis of the whole run; parts outside the window are shaded, and named if they fit."""
    window = result.window
    end_s = max(result.seconds, 1e-3)
    for from_s, until_s, name in ((0.0, window.from_s, "warm-up"), (window.until_s, end_s, "drain")):
        if until_s - from_s > 0.002 * end_s:
            axes.axvspan(from_s, until_s, color=INK, alpha=0.06, linewidth=0)
            if named and until_s - from_s > 0.07 * end_s:
                middle_s = (from_s + until_s) / 2
                axes.text(
                    middle_s,
                    0.97,
                    name,
                    transform=axes.get_xaxis_transform(),
                    ha="center",
                    va="top",
                    fontsize=8,
                    alpha=0.6,
                )
    axes.set_xlim(0, end_s)
    if label:
        axes.set_xlabel("seconds since the start of the run")


def _objective(axes: "Axes", bound_s: float | None) -> None:
    if bound_s is not None:
        axes.axhline(bound_s, color=RED, linewidth=1, linestyle=(0, (1, 1.5)), label="objective")
