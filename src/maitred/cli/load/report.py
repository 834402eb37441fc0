"""`maitred load report`: the reports of a result again, from its JSON file."""

from pathlib import Path
from typing import Annotated

import typer

from maitred.cli.extras import needing
from maitred.cli.load.run import HtmlOption, PlotsOption, tell

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
    from maitred.cli.load.output import announce, out_path

    with needing("load", "The load tester"):
        from maitred.load.measure.result import LoadResult

        announce(tell(LoadResult.load(result), out_path(out or result, "load"), html=html, plots=plots))
