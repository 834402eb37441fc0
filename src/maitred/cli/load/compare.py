"""`maitred load compare`: whether one side is worse than the other, or chance made it look so."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maitred.cli.extras import needing
from maitred.core.errors import InvalidRequest

if TYPE_CHECKING:
    from maitred.load.measure.result import LoadResult

EXAMPLES = """
Examples:

    maitred load compare before.json after.json

    maitred load compare before/ after/ --margin 5% --html compared.html
"""


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A result, or a folder of results.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The same, to compare with it.")],
    margin: Annotated[str, typer.Option("--margin", metavar="SHARE", help="Changes within this do not count.")] = "3%",
    confidence: Annotated[
        str, typer.Option("--confidence", metavar="SHARE", help="That all intervals of the table hold.")
    ] = "95%",
    html: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write the comparison as HTML.")] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the comparison as JSON.")] = None,
) -> None:
    """Say what differs between two sets of runs, and which of the differences are more than chance.

    Exits with 1 when something is worse by more than the margin, so that it can guard a release.
    """
    from maitred.cli.load.output import announce, print_document, write_text

    with needing("load", "The load tester"):
        from maitred.load.analysis.compare import compare
        from maitred.load.report import comparison as report
        from maitred.load.report import html as html_report
        from maitred.load.report.canvas import draw_narrow

        compared = compare(
            load_results(before),
            load_results(after),
            margin=parse_share("--margin", margin),
            confidence=parse_share("--confidence", confidence),
        )
        document = report.outline(compared)
        print_document(document)
        if json is not None:
            compared.save(json)
        if html is not None:
            narrow_svgs = draw_narrow(lambda: report.draw(compared))
            write_text(html, html_report.write(document, report.draw(compared), narrow_svgs))
        if written := [path for path in (json, html) if path is not None]:
            announce(written)
    if compared.worse:
        raise typer.Exit(1)


def load_results(path: Path) -> "list[LoadResult]":
    """The results in a file, or in all JSON files of a folder by name.

    Raises:
        InvalidRequest: There are none, or one of the files is something else.
    """
    from maitred.load.measure.result import LoadResult

    if not path.is_dir():
        return [LoadResult.load(path)]
    files = sorted(path.glob("*.json"))
    if not files:
        raise InvalidRequest(f"There are no results in {path}. Name a folder with files of `maitred load run --out`.")
    return [LoadResult.load(file) for file in files]


def parse_share(flag: str, text: str) -> float:
    """Parses a share that is written as ``3%`` or ``0.03``.

    Raises:
        InvalidRequest: It is neither.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if rest or not 0 <= share < 1:
        raise InvalidRequest(f"{flag} {text}: write a share below 1, such as 3% or 0.03.")
    return share
