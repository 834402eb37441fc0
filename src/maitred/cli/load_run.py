"""`maitred load run`: users against a server, and what they would have seen."""

from pathlib import Path
from typing import Annotated

import typer

from maitred.cli.load_flags import takes_spec

EXAMPLES = """
Examples:

    maitred load run --users 50 --duration 1m

    maitred load run --url http://gpu-box:8000 --rate 5 --prompt-tokens lognormal:mean=500,cv=1 --objective ttft=1s

    maitred load run peak.yaml --rate 8 --out results/peak-8
"""

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
    from maitred.cli.load_output import announce, beside, is_good, out_path, print_summary, write_reports
    from maitred.cli.load_session import play
    from maitred.cli.load_spec import read_spec
    from maitred.cli.terminal import command_line

    wanted = read_spec(spec, given)
    path = out_path(out, "load")
    result = play(wanted, command_line())
    result.save(beside(path, ".json"))
    print_summary(result)
    announce([beside(path, ".json"), *write_reports(result, path, html=html, plots=plots)])
    if not is_good(result):
        raise typer.Exit(1)
