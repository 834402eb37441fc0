"""Report of a rehearsal: which promises held, the log of the faults, and the results of the load."""

from collections import Counter

import numpy as np

from maitred.load.chaos.outcome import ChaosRun, State
from maitred.load.chaos.timeline import FaultLog
from maitred.load.measure.record import UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.report import canvas, markdown
from maitred.load.report.document import (
    Block,
    Callout,
    CalloutLevel,
    CodeBlock,
    Document,
    Paragraph,
    Plot,
    Section,
    Table,
)
from maitred.load.report.quantity import NONE, count, duration, plural, significant

TONES: dict[State, CalloutLevel] = {
    "held": CalloutLevel.GOOD,
    "broken": CalloutLevel.BAD,
    "unchecked": CalloutLevel.CARE,
}
WORDS: dict[State, str] = {"held": "held", "broken": "BROKEN", "unchecked": "not checkable"}


def outline(rehearsal: ChaosRun) -> Document:
    """Builds the whole report of a rehearsal."""
    server = rehearsal.chaos.target
    return Document(
        title="Chaos rehearsal",
        subtitle=" · ".join(
            [
                server.url,
                server.model,
                plural(len(rehearsal.faults), "fault"),
                rehearsal.started,
                f"{rehearsal.seconds:.0f} s",
            ]
        ),
        verdict=_verdict(rehearsal),
        notes=[
            Callout(CalloutLevel.BAD, f"Broken: {verdict.name}. {verdict.examples[0]}") for verdict in rehearsal.broken
        ],
        sections=[
            Section("Invariants", _invariants(rehearsal)),
            Section("Faults", _faults(rehearsal)),
            Section("Load", [_load(rehearsal)]),
            *([Section("What it printed last", [CodeBlock(rehearsal.last_lines)])] if rehearsal.last_lines else []),
            *([Section("Command", [CodeBlock(rehearsal.command)])] if rehearsal.command else []),
        ],
    )


def render(rehearsal: ChaosRun) -> str:
    """Renders the report in Markdown, without the figure."""
    return markdown.write(outline(rehearsal), {})


def draw(rehearsal: ChaosRun) -> dict[str, str]:
    """Draws the text per second in both runs, with the faults shaded: name -> SVG.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    with canvas.style():
        figure, (axes,) = canvas.figure(height_in=2.6)
        for result, label, colour in (
            (rehearsal.calm, "in calm", canvas.GREY),
            (rehearsal.chaos, "with faults", canvas.BLUE),
        ):
            step_s, values = result.series.step_s, result.series.output_tokens_per_s
            middles_s = (np.arange(len(values)) + 0.5) * step_s
            canvas.line(axes, middles_s, np.array(values, dtype=np.float64), colour=colour, label=label)
        for entry in rehearsal.faults:
            if entry.began_s is not None:
                until_s = max(entry.ended_s or entry.began_s, entry.began_s + 0.1)
                axes.axvspan(entry.began_s, until_s, color=canvas.RED, alpha=0.2, linewidth=0)
                axes.annotate(
                    f"{entry.kind} {entry.target}".strip(),
                    (entry.began_s, 0.97),
                    xycoords=("data", "axes fraction"),
                    rotation=90,
                    ha="right",
                    va="top",
                    fontsize=7.5,
                )
        axes.set_xlabel("seconds")
        axes.set_title("Tokens per second")
        canvas.numbers_axis(axes)
        canvas.legend(axes)
        return {"chaos": canvas.svg(figure, "chaos", "Tokens per second in calm and with faults")}


def _verdict(rehearsal: ChaosRun) -> Callout:
    states = Counter(verdict.state for verdict in rehearsal.invariants)
    if states["broken"]:
        return Callout(
            CalloutLevel.BAD, f"{states['broken']} of {plural(len(rehearsal.invariants), 'promise')} broken."
        )
    held = f"All {states['held']} promises that could be checked held"
    if states["unchecked"]:
        return Callout(CalloutLevel.GOOD, f"{held}; {states['unchecked']} could not be checked.")
    return Callout(CalloutLevel.GOOD, f"{held}.")


def _invariants(rehearsal: ChaosRun) -> list[Block]:
    rows = [[verdict.name, WORDS[verdict.state], verdict.bound, verdict.found] for verdict in rehearsal.invariants]
    examples = [[verdict.name, example] for verdict in rehearsal.broken for example in verdict.examples]
    return [
        Table(["Invariant", "", "Bound", "Found"], rows, words=4),
        *([Table(["Broken", "For example"], examples, words=2)] if examples else []),
    ]


def _faults(rehearsal: ChaosRun) -> list[Block]:
    if not rehearsal.faults:
        return [Paragraph("The plan has none.")]
    rows = [
        [
            str(entry.number),
            entry.kind,
            entry.target or NONE,
            entry.error or "; ".join(entry.said),
            duration(entry.planned_s),
            duration(entry.began_s),
            duration(_lasted_s(entry)),
        ]
        for entry in rehearsal.faults
    ]
    return [
        Plot("chaos", "Text per second; the shades are the faults. The grey line is the same load in calm."),
        Table(["", "Fault", "Target", "What was done", "Planned at", "Began at", "Lasted"], rows, words=4),
    ]


def _lasted_s(entry: FaultLog) -> float | None:
    return None if entry.began_s is None or entry.ended_s is None else entry.ended_s - entry.began_s


def _load(rehearsal: ChaosRun) -> Table:
    runs = (rehearsal.calm, rehearsal.chaos)
    outcomes = [outcome.value for outcome in UserOutcome if any(outcome in _outcomes(run) for run in runs)]
    rows = [
        ["Requests", *(count(run.summary.requests) for run in runs)],
        *([f"… {outcome}", *(count(_outcomes(run).get(outcome, 0)) for run in runs)] for outcome in outcomes),
        ["Tokens per second", *(significant(run.summary.output_tokens_per_s) for run in runs)],
        ["TTFT p50", *(duration(run.summary.ttft.p50) for run in runs)],
        ["TTFT p99", *(duration(run.summary.ttft.p99) for run in runs)],
        ["ITL p50", *(duration(run.summary.itl.p50) for run in runs)],
        ["End to end p99", *(duration(run.summary.e2e.p99) for run in runs)],
    ]
    return Table(["", "In calm", "With faults"], rows)


def _outcomes(result: LoadResult) -> dict[str, int]:
    return result.summary.outcomes
