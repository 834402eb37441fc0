"""`maitred load report`: the reports of a result again, from its JSON file."""

from pathlib import Path
from typing import Annotated

import typer

from maitred.cli.load_run import HtmlOption, PlotsOption

EXAMPLES = """
Examples:

    maitred load report results/peak-8.json

    maitred load report results/peak-8.json --out public/peak --plots
"""


def report(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="JSON file that `maitred load run` wrote.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="PATH", help="Writes PATH.md and PATH.html. Default: beside the result."),
    ] = None,
    html: HtmlOption = True,
    plots: PlotsOption = False,
) -> None:
    """Write the Markdown and HTML reports of a result again, and print its summary."""
    from maitred.cli.load_output import announce, out_path, print_summary, write_reports
    from maitred.load.result import Result

    loaded = Result.load(result)
    path = out_path(out or result, "load")
    print_summary(loaded)
    announce(write_reports(loaded, path, html=html, plots=plots))
