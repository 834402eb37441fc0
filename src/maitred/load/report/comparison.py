"""Report of a comparison: which differences are real, and how large they may be."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from maitred.load.analysis.comparison import ComparisonSide, RunComparison, Verdict
from maitred.load.measure.record import UserOutcome
from maitred.load.report import canvas
from maitred.load.report.document import Block, Callout, CalloutLevel, Document, Paragraph, Plot, Section, Table
from maitred.load.report.quantity import NONE, count, duration, exact, plural, rate, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS: dict[Verdict, str] = {"same": "no difference", "better": "better", "worse": "worse", "unclear": "cannot be told"}
COLOURS: dict[Verdict, str] = {
    "same": canvas.GREY,
    "better": canvas.GREEN,
    "worse": canvas.RED,
    "unclear": canvas.SKY,
}
MARKERS: dict[Verdict, str] = {"same": "o", "better": "D", "worse": "s", "unclear": "o"}


def outline(comparison: RunComparison) -> Document:
    """Builds the whole report of a comparison."""
    tone = CalloutLevel.BAD if comparison.worse else CalloutLevel.GOOD
    if tone is CalloutLevel.GOOD and (comparison.warnings or all(row.verdict == "unclear" for row in comparison.rows)):
        tone = CalloutLevel.CARE
    sections = [
        Section("What differs", list(_rows(comparison))),
        Section("The two sides", list(_sides(comparison))),
        Section("Method", list(_method(comparison))),
    ]
    before, after = comparison.before, comparison.after
    return Document(
        title="Load test: before and after",
        subtitle=f"{before.target}, {before.started} → {after.target}, {after.started}",
        verdict=Callout(tone, comparison.verdict),
        notes=[Callout(CalloutLevel.CARE, warning) for warning in comparison.warnings],
        sections=sections,
    )


def draw(comparison: RunComparison) -> dict[str, str]:
    """Draws the intervals of all changes in one figure: name -> SVG.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    panels = [
        (scale, title, rows)
        for scale, title in (("ratio", "After over before"), ("difference", "After minus before, in points"))
        if (rows := [row for row in comparison.rows if row.scale == scale and row.change is not None][::-1])
    ]
    if not panels:
        return {}
    heights = [len(rows) + 1.5 for _, _, rows in panels]
    with canvas.style():
        figure, all_axes = canvas.figure(len(panels), 1, height_in=0.5 + 0.3 * sum(heights), heights=heights)
        for axes, (scale, title, rows) in zip(all_axes, panels, strict=True):
            neutral = 1.0 if scale == "ratio" else 0.0
            margin = max(row.margin for row in rows)
            low = neutral / (1 + margin) if scale == "ratio" else -margin
            axes.axvspan(low, neutral + margin, color=canvas.INK, alpha=0.07, linewidth=0)
            axes.axvline(neutral, color=canvas.INK, linewidth=0.8, alpha=0.6)
            for position, row in enumerate(rows):
                colour = COLOURS[row.verdict]
                if row.low is not None and row.high is not None:
                    axes.plot([row.low, row.high], [position, position], color=colour, linewidth=2)
                if row.change is not None:
                    axes.plot([row.change], [position], MARKERS[row.verdict], color=colour, markersize=5.5)
            if scale == "ratio":
                canvas.log_axis(axes, "x")
                _ratio_ticks(axes, [value for row in rows for value in (row.low, row.change, row.high) if value])
            else:
                axes.xaxis.set_major_formatter(lambda value, _: exact(_format_signed(value * 100)))
            axes.set_yticks(range(len(rows)), [canvas.tick_name(row.label) for row in rows])
            axes.set_ylim(-0.7, len(rows) - 0.3)
            axes.tick_params(axis="y", length=0)
            axes.grid(visible=False, axis="y")
            axes.set_title(title)
        for verdict in ("better", "worse", "same", "unclear"):
            if any(row.verdict == verdict for row in comparison.rows):
                all_axes[0].plot([], [], MARKERS[verdict], color=COLOURS[verdict], label=WORDS[verdict])
        canvas.legend(all_axes[0])
        return {"changes": canvas.svg(figure, "changes", "The change of each metric with its interval")}


def _rows(comparison: RunComparison) -> Iterator[Block]:
    rows = [
        [
            row.label,
            value(row.before, row.unit),
            value(row.after, row.unit),
            change(row.change, row.scale),
            f"{change(row.low, row.scale)} … {change(row.high, row.scale)}" if row.low is not None else NONE,
            WORDS[row.verdict] + (f" ({row.note})" if row.note else ""),
        ]
        for row in comparison.rows
    ]
    yield Table(["", "Before", "After", "Change", f"{exact(share(comparison.confidence))} interval", "Verdict"], rows)
    yield Plot(
        "changes",
        f"Each change with its interval. Grey is the margin of {exact(share(comparison.margin))}, within which a "
        "change is no difference; the verdict is clear where the interval lies on one side of an edge.",
    )


def _sides(comparison: RunComparison) -> Iterator[Block]:
    before, after = comparison.before, comparison.after
    rows = [
        ["Target", before.target, after.target],
        ["Workload", before.workload, after.workload],
        ["Started", before.started, after.started],
        ["Runs", plural(before.runs, "run"), plural(after.runs, "run")],
        ["Requests", count(before.requests), count(after.requests)],
        *(
            [outcome.replace("_", " ").capitalize(), _outcome(before, outcome), _outcome(after, outcome)]
            for outcome in UserOutcome
            if outcome in before.outcomes or outcome in after.outcomes
        ),
    ]
    yield Table(["", "Before", "After"], rows, words=3)
    if comparison.differences:
        yield Table(["Settings that differ"], [[difference] for difference in comparison.differences])


def _method(comparison: RunComparison) -> Iterator[Block]:
    yield Paragraph(comparison.method)
    if comparison.caveat:
        yield Paragraph(comparison.caveat)


def _outcome(side: ComparisonSide, outcome: UserOutcome) -> str:
    number = side.outcomes.get(outcome, 0)
    return f"{count(number)} ({share(number / side.requests)})" if side.requests else NONE


def value(amount: float | None, unit: str) -> str:
    """Formats a value of a metric with its unit."""
    if amount is None:
        return NONE
    match unit:
        case "s":
            return duration(amount)
        case "share":
            return share(amount)
        case _:
            return rate(amount)


def change(amount: float | None, scale: str) -> str:
    """Formats a change for people: ``+3.2 %``, or ``-1.5 points`` of a share."""
    if amount is None:
        return NONE
    if scale == "ratio":
        return f"{_format_signed((amount - 1) * 100)} %" if amount < 3 else f"× {amount:.2g}"
    return f"{_format_signed(amount * 100)} points"


def _format_signed(number: float) -> str:
    """Formats a number with a sign as wide as a plus; a value that rounds to 0 has no sign."""
    text = f"{number:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def _ratio_ticks(axes: "Axes", values: list[float]) -> None:
    """Returns a few ticks at round percents that fit the range, on both sides of no change."""
    from matplotlib.ticker import FixedLocator, NullLocator

    most = max([abs(value - 1) for value in values] + [0.04])
    step = next((step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if most / step <= 5), 1.0)
    ticks = [1 + step * number for number in range(-int(0.9 / step), int(most / step) + 2)]
    low, high = min([*values, 1 - 0.04]), max([*values, 1 + 0.04])
    axes.set_xlim(low * 0.98, high * 1.02)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low * 0.97 <= tick <= high * 1.03]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{exact(_format_signed((value - 1) * 100))} %")
