"""`maitred load run`: users against a server, and what they would have seen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.extras import needing
from maitred.cli.load.flags import takes_spec

if TYPE_CHECKING:
    from maitred.load.measure.result import LoadResult

EXAMPLES = """
Examples:

    maitred load run --users 50 --duration 1m

    maitred load run --url http://gpu-box:8000 --rate 5 --prompt-tokens lognormal:mean=500,cv=1 --objective ttft=1s

    maitred load run peak.yaml --rate 8 --out results/peak-8
"""

SHOWN = ("Latency", "Throughput", "Objectives", "Tenants", "Outcomes")
"""Sections of the report that the terminal shows, too."""

SpecArgument = Annotated[
    Path | None, typer.Argument(metavar="SPEC", help="YAML file that describes the load. Options win over it.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="PATH", help="Writes PATH.json, PATH.md and PATH.html. Default: a name with the time."
    ),
]
HtmlOption = Annotated[bool, typer.Option("--html/--no-html", help="Whether to write the HTML report.")]
PlotsOption = Annotated[bool, typer.Option("--plots", help="Write the plots as SVG files, too, for the Markdown.")]


@takes_spec
def run(
    spec: SpecArgument = None,
    out: OutOption = None,
    html: HtmlOption = True,
    plots: PlotsOption = False,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="PATH", help="Also write what was asked when, as a trace to replay."),
    ] = None,
    **given: object,
) -> None:
    """Play users against a server that speaks OpenAI's API, and report what they saw.

    Exits with 1 when no answer was complete, or when objectives were given and missed.
    """
    from maitred.cli.load.output import announce, beside, out_path
    from maitred.cli.output.terminal import command_line

    with needing("load", "The load tester"):
        from maitred.cli.load.session import play
        from maitred.cli.load.spec import read_spec

        wanted = read_spec(spec, given)
        path = out_path(out, "load")
        result = play(wanted, command_line(), record=record)
        result.save(beside(path, ".json"))
        announce([beside(path, ".json"), *tell(result, path, html=html, plots=plots)])
    if not is_good(result):
        raise typer.Exit(1)


def tell(result: "LoadResult", path: Path, *, html: bool, plots: bool) -> list[Path]:
    """Prints the summary and writes the reports; the files that were written."""
    from maitred.cli.load.output import print_document, write_reports
    from maitred.load.report.outline import draw, outline

    document = outline(result)
    print_document(document, sections=SHOWN)
    return write_reports(document, lambda: draw(result), path, html=html, plots=plots)


def is_good(result: "LoadResult") -> bool:
    """Whether anything was answered, and the objectives, if there are any, were attained."""
    objectives, summary = result.objectives, result.summary
    if not summary.outcomes.get("complete"):
        return False
    given = any(limit is not None for limit in (objectives.ttft_s, objectives.tpot_s, objectives.e2e_s))
    return not given or (summary.attainment or 0.0) >= objectives.attainment
