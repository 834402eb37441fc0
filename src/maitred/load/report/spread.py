"""Figures of a run that show distributions, and differences between tenants."""

import numpy as np

from maitred.load.measure.record import UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.report import canvas
from maitred.load.report.canvas import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY
from maitred.load.report.quantity import count, duration, exact, share

CURVE_POINTS = 300
OUTCOME_COLOURS = {
    UserOutcome.COMPLETE: GREEN,
    UserOutcome.REFUSED: ORANGE,
    UserOutcome.FAILED: RED,
    UserOutcome.CUT: PURPLE,
    UserOutcome.TIMED_OUT: SKY,
    UserOutcome.CANCELLED: GREY,
    UserOutcome.UNFINISHED: BLUE,
}


def distributions(result: LoadResult, name: str) -> str:
    """Plots the share of requests (or gaps) that took at most a given time."""
    counted = result.counted_flags()
    gaps_s, request = result.itl_s()
    objectives = result.objectives
    panels = [
        (title, values[~np.isnan(values) & (values > 0)], bound_s)
        for title, values, bound_s in (
            ("Time to first token", result.ttft_s()[counted], objectives.ttft_s),
            ("Time between tokens", gaps_s[counted[request]], None),
            ("End to end", result.e2e_s()[counted], objectives.e2e_s),
        )
    ]
    panels = [panel for panel in panels if len(panel[1])]
    if not panels:
        return ""
    figure, all_axes = canvas.figure(1, len(panels), height_in=3.1)
    ranks = np.unique(np.concatenate([np.linspace(0, 1, CURVE_POINTS), 1 - np.geomspace(1e-3, 1, 60)]))
    for axes, (title, values, bound_s) in zip(all_axes, panels, strict=True):
        axes.plot(np.quantile(values, ranks), ranks, color=BLUE)
        for rank, marker in ((0.5, "o"), (0.95, "s"), (0.99, "D")):
            at_s = float(np.quantile(values, rank))
            axes.plot([at_s], [rank], marker, color=BLUE, markersize=4, label=f"p{rank * 100:.0f}: {duration(at_s)}")
        if bound_s is not None:
            axes.axvline(
                bound_s, color=RED, linewidth=1, linestyle=(0, (1, 1.5)), label=f"objective: {exact(duration(bound_s))}"
            )
        canvas.seconds_axis(axes, "x", logarithmic=bool(values.max() > 4 * values.min()))
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_title(title)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, handlelength=1, fontsize=8)
    return canvas.svg(figure, name, "Cumulative distributions of the latencies")


def tenants(result: LoadResult, name: str) -> str:
    """Plots how long each tenant waited, and which share of the tokens it got."""
    if len(result.tenants) < 2:
        return ""
    names = list(result.tenants)[::-1]
    figure, (latency, shares) = canvas.figure(1, 2, height_in=1.1 + 0.32 * len(names), widths=[3, 2])
    total = sum(summary.output_tokens for summary in result.tenants.values())
    for position, tenant in enumerate(names):
        summary = result.tenants[tenant]
        ttft = summary.ttft
        if ttft.p50 is not None and ttft.p95 is not None and ttft.p99 is not None:
            first = position == len(names) - 1
            latency.plot([ttft.p50, ttft.p99], [position, position], color=GREY, linewidth=1.2, zorder=1)
            for value, marker, label in ((ttft.p50, "o", "p50"), (ttft.p95, "s", "p95"), (ttft.p99, "D", "p99")):
                latency.plot([value], [position], marker, color=BLUE, markersize=4.5, label=label if first else None)
        part = summary.output_tokens / total if total else 0.0
        shares.barh(position, part, color=BLUE, alpha=0.75, height=0.6)
        canvas.beside(shares, part, position, share(part))
    for axes in (latency, shares):
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    ticks = [canvas.tick_name(name) for name in names]
    latency.set_yticks(range(len(names)), ticks)
    shares.set_yticks(range(len(names)), ticks if canvas.is_narrow() else [""] * len(names))
    latency.set_xlim(left=0)
    shares.set_xlim(0, 1.15)
    shares.set_xticks(np.linspace(0, 1, 6))
    shares.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    canvas.seconds_axis(latency, "x")
    latency.set_title("Time to first token")
    shares.set_title("Share of the output tokens")
    canvas.legend(latency)
    return canvas.svg(figure, name, "Time to first token and share of the tokens of each tenant")


def outcomes(result: LoadResult, name: str) -> str:
    """Plots the outcomes of the counted requests, if not all are complete."""
    ended = {outcome: result.summary.outcomes.get(outcome, 0) for outcome in UserOutcome}
    total = sum(ended.values())
    if not total or ended[UserOutcome.COMPLETE] == total:
        return ""
    shown = [outcome for outcome in UserOutcome if ended[outcome]][::-1]
    figure, (axes,) = canvas.figure(height_in=0.75 + 0.26 * len(shown))
    for position, outcome in enumerate(shown):
        part = ended[outcome] / total
        axes.barh(position, part, color=OUTCOME_COLOURS[outcome], alpha=0.8, height=0.62)
        canvas.beside(axes, part, position, f"{count(ended[outcome])} ({share(part)})")
    axes.set_yticks(range(len(shown)), [outcome.replace("_", " ") for outcome in shown])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.14)
    axes.set_xticks(np.linspace(0, 1, 6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title("How requests ended")
    return canvas.svg(figure, name, "How requests ended")


def ttft_by_prompt(result: LoadResult, name: str) -> str:
    """Plots the cost of longer prompts, and the saving by the prefix cache."""
    ttft_s, prompt = result.ttft_s(), result.column("prompt_tokens")
    usable = ~np.isnan(ttft_s) & (ttft_s > 0) & (prompt > 0)
    if not usable.any():
        return ""
    figure, (axes,) = canvas.figure(height_in=2.9)
    some = canvas.thin(np.flatnonzero(usable))
    cached = result.column("cached_tokens")
    part = cached[some] / prompt[some]
    several = bool((part > 0).any())
    groups = (
        (part == 0, BLUE, "nothing cached" if several else "requests"),
        ((part > 0) & (part <= 0.5), GREEN, "up to half cached"),
        (part > 0.5, ORANGE, "more than half cached"),
    )
    for group, colour, label in groups:
        canvas.dots(axes, prompt[some][group], ttft_s[some][group], colour, label)
    if prompt[some].max() > 5 * prompt[some].min():
        canvas.log_axis(axes, "x")
    canvas.fit_seconds(axes, ttft_s[some])
    axes.set_xlabel("tokens of the prompt")
    axes.set_title("Time to first token, by length of the prompt")
    if several:
        canvas.legend(axes)
    return canvas.svg(figure, name, "Time to first token by length of the prompt")
