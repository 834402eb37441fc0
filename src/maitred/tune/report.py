"""Report of a tuning, in words and as a figure."""

from maitred.load.report import canvas
from maitred.load.report.document import (
    Block,
    Callout,
    CalloutLevel,
    Document,
    KeyFigure,
    KeyFigures,
    Plot,
    Section,
    Table,
)
from maitred.load.report.quantity import NONE, count, duration, exact, plural, rate, significant
from maitred.tune.session import TuningResult

FIGURE = "batch-sizes"


def verdict(tuning: TuningResult) -> Callout:
    """Returns the verdict in a sentence or two."""
    objective = exact(duration(tuning.wishes.objective_s))
    if not tuning.sizes or tuning.limits is None:
        return Callout(CalloutLevel.BAD, "The time was too short to measure anything. Give it more with --budget.")
    if tuning.chosen is None:
        return Callout(
            CalloutLevel.BAD,
            f"Even one sequence alone has {exact(duration(tuning.sizes[0].itl_s))} between its tokens, more than the "
            f"objective of {objective}. Raise it with --itl, or take a smaller model or a faster machine.",
        )
    chosen = tuning.chosen
    gain = chosen.tokens_per_s / tuning.sizes[0].tokens_per_s
    found = (
        f"{plural(chosen.sequences, 'sequence')} at once give {significant(chosen.tokens_per_s)} tokens/s, "
        f"{significant(gain)} times what one gives alone, with {duration(chosen.itl_s)} or less between 95 % of the "
        "tokens. "
    )
    why = {
        "objective": f"More would break the objective of {objective}.",
        "plateau": "More give no more tokens, only longer waits.",
        "highest": f"More were not tried: {plural(tuning.wishes.highest, 'sequence')} is the limit of --highest or of "
        "the KV cache.",
        "budget": "More were not tried: the time was up. --budget gives it more.",
    }[tuning.reason]
    return Callout(CalloutLevel.GOOD if tuning.reason in ("objective", "plateau") else CalloutLevel.CARE, found + why)


def outline(tuning: TuningResult, model: str, command: str) -> Document:
    """Outlines the whole report."""
    sections = [Section("Chosen", [KeyFigures(_limits(tuning))])] if tuning.limits is not None else []
    sizes: list[Block] = [
        Plot(
            FIGURE,
            "Each mark is the median of all stretches of decoding at a size. The dotted line is the objective; the "
            "dashed one is the size that was chosen.",
        ),
        Table(
            ["Sequences", "Tokens/s", "Tokens/s each", "Between tokens p50", "p95", "Trials"],
            [
                [
                    count(size.sequences),
                    significant(size.tokens_per_s),
                    significant(size.tokens_per_s / size.sequences),
                    duration(size.step_s),
                    duration(size.itl_s),
                    count(len(size.trials)),
                ]
                for size in tuning.sizes
            ],
            words=0,
        ),
    ]
    prompts = Table(
        ["Tokens of the prompt", "Time of its step", "Prompt tokens/s"],
        [
            [count(prefill.tokens), duration(prefill.seconds), rate(prefill.tokens / prefill.seconds)]
            for prefill in tuning.prefills
        ],
        words=0,
    )
    return Document(
        title="How large batches can be",
        subtitle=f"{model} · prompts of {plural(tuning.wishes.prompt_tokens, 'token')} · {command}",
        verdict=verdict(tuning),
        sections=[*sections, Section("Batch sizes", sizes), Section("Prompts alone", [prompts])],
    )


def draw(tuning: TuningResult) -> dict[str, str]:
    """Draws throughput and latency over the batch size: name -> SVG.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    if not tuning.sizes:
        return {}
    sequences = [size.sequences for size in tuning.sizes]
    with canvas.style():
        figure, (tokens, itl) = canvas.figure(1, 2, height_in=2.9)
        tokens.plot(sequences, [size.tokens_per_s for size in tuning.sizes], "o-", color=canvas.BLUE, markersize=4)
        canvas.numbers_axis(tokens)
        tokens.set_title("Tokens per second")
        for label, values, dash in (
            ("p50", [size.step_s for size in tuning.sizes], (0, (4, 1.5))),
            ("p95", [size.itl_s for size in tuning.sizes], "-"),
        ):
            itl.plot(sequences, values, "o", color=canvas.BLUE, markersize=4, linestyle=dash)
            itl.plot([], [], color=canvas.BLUE, linestyle=dash, label=label)
        itl.axhline(
            tuning.wishes.objective_s, color=canvas.RED, linewidth=1, linestyle=(0, (1, 1.5)), label="objective"
        )
        itl.set_ylim(bottom=0)
        canvas.seconds_axis(itl)
        itl.set_title("Between tokens")
        for axes in (tokens, itl):
            if tuning.chosen is not None:
                axes.axvline(tuning.chosen.sequences, color=canvas.GREY, linewidth=1, linestyle=(0, (5, 3)))
            axes.set_xlabel("sequences at once")
            if len(sequences) > 1:
                canvas.log_axis(axes, "x")
        canvas.legend(itl)
        return {FIGURE: canvas.svg(figure, FIGURE, "Tokens per second and time between tokens by batch size")}


def _limits(tuning: TuningResult) -> list[KeyFigure]:
    assert tuning.limits is not None
    limits = tuning.limits
    return [
        KeyFigure("engine.max_sequences", count(limits.max_sequences), "sequences at once"),
        KeyFigure(
            "engine.step_tokens", NONE if limits.step_tokens is None else count(limits.step_tokens), "tokens in a step"
        ),
        KeyFigure("engine.itl_objective_s", exact(duration(limits.itl_objective_s)), "between two tokens"),
    ]
