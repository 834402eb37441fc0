"""Report of a sweep: the highest sustained rate, and the server's behaviour around it."""

from collections.abc import Iterator

import msgspec

from maitred.load.analysis.sweep import Sweep, SweepTrial
from maitred.load.report import canvas
from maitred.load.report.document import (
    Block,
    Callout,
    CalloutLevel,
    CodeBlock,
    Document,
    KeyFigure,
    KeyFigures,
    Plot,
    Section,
    Table,
)
from maitred.load.report.quantity import NONE, duration, exact, plural, rate, share, significant
from maitred.load.spec import LoadSpec, ObjectivesSpec


def outline(sweep: Sweep) -> Document:
    """Builds the whole report of a sweep."""
    tones = {"found": CalloutLevel.GOOD, "tester": CalloutLevel.BAD, "below_lowest": CalloutLevel.BAD}
    target = msgspec.convert(sweep.spec.get("target", {}), dict[str, object])
    return Document(
        title="Load sweep: the highest rate that holds",
        subtitle=f"{target.get('url', '')} · {plural(len(sweep.trials), 'trial')}",
        verdict=Callout(tones.get(sweep.reason, CalloutLevel.CARE), sweep.verdict),
        sections=[
            Section("Key figures", [_key_figures(sweep)]),
            Section("Trials", list(_trials(sweep))),
            *([Section("Command", [CodeBlock(sweep.command)])] if sweep.command else []),
        ],
    )


def draw(sweep: Sweep) -> dict[str, str]:
    """Draws latency, attainment and throughput over the rate: name -> SVG.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    trials = sorted(sweep.trials, key=lambda trial: trial.rate_per_s)
    if not trials:
        return {}
    objectives = _objectives(sweep)
    with canvas.style():
        figure, (ttft, itl, attained, done) = canvas.figure(2, 2, height_in=5.2)
        for axes, title, fields in (
            (ttft, "Time to first token", {"p50": "ttft_p50_s", "p95": "ttft_p95_s"}),
            (itl, "Time between tokens", {"p95": "itl_p95_s"}),
        ):
            values = []
            for (label, field), dash in zip(fields.items(), ("-", (0, (4, 1.5))), strict=False):
                known = [(t.rate_per_s, y) for t in trials if (y := getattr(t, field)) is not None]
                values += [y for _, y in known]
                axes.plot(
                    [x for x, _ in known], [y for _, y in known], "o", color=canvas.BLUE, markersize=4, linestyle=dash
                )
                axes.plot([], [], color=canvas.BLUE, linestyle=dash, label=label)
            canvas.seconds_axis(axes, logarithmic=bool(values and min(values) > 0 and max(values) > 10 * min(values)))
            if not (values and min(values) > 0 and max(values) > 10 * min(values)):
                axes.set_ylim(bottom=0)
            axes.set_title(title)
        if objectives.ttft_s is not None:
            ttft.axhline(objectives.ttft_s, color=canvas.RED, linewidth=1, linestyle=(0, (1, 1.5)), label="objective")
        rates = [trial.rate_per_s for trial in trials]
        for passed, colour, marker, label in (
            (True, canvas.GREEN, "o", "holds"),
            (False, canvas.RED, "X", "does not"),
        ):
            chosen = [trial for trial in trials if trial.passed is passed]
            if chosen:
                attained.plot(
                    [trial.rate_per_s for trial in chosen],
                    [trial.attainment for trial in chosen],
                    marker,
                    color=colour,
                    markersize=6,
                    label=label,
                )
        if sweep.objective is not None:
            attained.axhline(sweep.objective, color=canvas.RED, linewidth=1, linestyle=(0, (1, 1.5)))
        attained.set_ylim(-0.03, 1.05)
        attained.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        attained.set_title("Met the objectives" if sweep.objective is not None else "Complete")
        done.plot(rates, [trial.requests_per_s for trial in trials], "o-", color=canvas.BLUE, markersize=4, label="all")
        if sweep.objective is not None:
            goodput = [trial.goodput_per_s for trial in trials]
            done.plot(rates, goodput, "s--", color=canvas.GREEN, markersize=4, label="goodput")
        canvas.numbers_axis(done)
        done.set_title("Requests per second")
        for axes in (ttft, itl, attained, done):
            axes.set_xlabel("sessions per second")
            if sweep.knee_per_s is not None:
                axes.axvline(sweep.knee_per_s, color=canvas.INK, linewidth=1, alpha=0.7, linestyle=(0, (6, 2)))
            if len(set(rates)) > 1 and max(rates) > 5 * min(rates):
                canvas.log_axis(axes, "x")
            canvas.legend(axes)
        return {"sweep": canvas.svg(figure, "sweep", "Latency, attainment and throughput over the rate")}


def _key_figures(sweep: Sweep) -> KeyFigures:
    bound = f"fails at {rate(sweep.fails_per_s)}" if sweep.fails_per_s is not None else "no rate failed"
    figures = [
        KeyFigure("Highest rate that holds", NONE if sweep.knee_per_s is None else rate(sweep.knee_per_s), bound),
        KeyFigure(
            "Goodput there" if sweep.objective is not None else "Complete requests there",
            NONE if sweep.goodput_per_s is None else rate(sweep.goodput_per_s),
            "requests per second",
        ),
        KeyFigure("Known to", f"± {exact(share(sweep.tolerance))}", plural(len(sweep.trials), "trial")),
    ]
    objectives = _objectives(sweep)
    bounds = [
        f"{name} ≤ {exact(duration(bound_s))}"
        for name, bound_s in (
            ("TTFT", objectives.ttft_s),
            ("TPOT", objectives.tpot_s),
            ("end to end", objectives.e2e_s),
        )
        if bound_s is not None
    ]
    if bounds and sweep.objective is not None:
        figures.append(KeyFigure("Objective", exact(share(sweep.objective)), ", ".join(bounds)))
    return KeyFigures(figures)


def _trials(sweep: Sweep) -> Iterator[Block]:
    yield Plot(
        "sweep",
        "Each mark is a run. The dashed line is the highest rate that holds: the server keeps up with what is due, and "
        "enough requests meet the objectives. In the table, a name in brackets says what else was at its limit.",
    )
    head = ["Sessions/s", "Holds", "Attainment", "Requests/s", "Goodput/s", "Tokens/s"]
    rows = [_trial(trial) for trial in sorted(sweep.trials, key=lambda trial: trial.rate_per_s)]
    yield Table([*head, "TTFT p50", "TTFT p95", "ITL p95", "Failed"], rows, words=0)


def _trial(trial: SweepTrial) -> list[str]:
    return [
        significant(trial.rate_per_s),
        ("yes" if trial.passed else "no") + (f" ({trial.limit})" if trial.limit != "none" else ""),
        share(trial.attainment) if trial.objective is not None else NONE,
        significant(trial.requests_per_s),
        significant(trial.goodput_per_s),
        significant(trial.output_tokens_per_s),
        duration(trial.ttft_p50_s),
        duration(trial.ttft_p95_s),
        duration(trial.itl_p95_s),
        share(trial.failed),
    ]


def _objectives(sweep: Sweep) -> ObjectivesSpec:
    return msgspec.convert(sweep.spec.get("objectives", {}), ObjectivesSpec) if sweep.spec else LoadSpec().objectives
