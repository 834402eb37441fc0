"""The files that a load test leaves, and what the terminal shows of its report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from maitred.core.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from rich.console import Console

    from maitred.load.report.document import Block, Callout, Document

SUFFIXES = (".json", ".md", ".html")
STYLES = {"good": "bold green", "care": "bold yellow", "bad": "bold red"}


SHORTEST_WORDS = 12
"""Characters that a column of words keeps in a narrow terminal."""


def out_path(given: Path | None, verb: str) -> Path:
    """The files' common path without a suffix, below a folder that is there.

    Asked before the run, so that an hour of load does not end in a path that cannot be written.

    Args:
        given: What `--out` said.
        verb: Part of the default name in the working directory.

    Raises:
        InvalidRequest: Nothing can be written there.
    """
    import time

    path = given or Path(f"maitred-{verb}-{time.strftime('%Y%m%d-%H%M%S')}")
    if path.suffix in SUFFIXES:
        path = path.with_suffix("")
    probe = beside(path, ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidRequest(f"Cannot write {path}.json: {error.strerror}. Name another place with --out.") from None
    return path


def beside(path: Path, ending: str) -> Path:
    """The file of that ending. Unlike `Path.with_suffix` it keeps a name such as ``v1.2`` whole."""
    return path.with_name(path.name + ending)


def write_text(path: Path, text: str) -> Path:
    """Writes a report to a file.

    Raises:
        InvalidRequest: Nothing can be written there.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"Cannot write {path}: {error.strerror}. Name another place with --out.") from None
    return path


def write_reports(
    document: "Document", draw: Callable[[], dict[str, str]], path: Path, *, html: bool, plots: bool
) -> list[Path]:
    """The Markdown and HTML of a report; the files that were written.

    Where matplotlib is missing there are no plots and no HTML, and a line says so: the figures are worth having anyway.

    Args:
        document: The report.
        draw: Makes its plots: name -> SVG.
        path: Of the files, without a suffix.
        html: Whether HTML is wanted.
        plots: Whether the plots are wanted as files, which the Markdown then shows.
    """
    from maitred.load.report import html as html_report
    from maitred.load.report import markdown
    from maitred.load.report.canvas import draw_narrow

    svgs: dict[str, str] = {}
    if html or plots:
        try:
            svgs = draw()
        except Unavailable as error:
            typer.echo(error.message, err=True)
            html = plots = False
    files = {name: write_text(beside(path, f"-{name}.svg"), svg) for name, svg in svgs.items()} if plots else {}
    links = {name: Path(file.name) for name, file in files.items()}
    written = [write_text(beside(path, ".md"), markdown.write(document, links)), *files.values()]
    if html:
        written.append(write_text(beside(path, ".html"), html_report.write(document, svgs, draw_narrow(draw))))
    return written


def announce(files: Sequence[Path]) -> None:
    """Says what was written where."""
    typer.echo(f"Written: {', '.join(str(file) for file in files)}", err=True)


def print_document(document: "Document", *, sections: Sequence[str] | None = None) -> None:
    """A report on standard output: the verdict first; plots are for the files.

    Args:
        document: The report.
        sections: Titles of the sections to show; None: all.
    """
    from rich.console import Console

    console = Console(highlight=False)
    _print_note(console, document.verdict)
    for note in document.notes:
        _print_note(console, note)
    for section in document.sections:
        if sections is None or section.title in sections:
            console.print(f"\n{section.title}", style="bold", markup=False)
            for block in section.blocks:
                _print_block(console, block)


def _print_note(console: "Console", note: "Callout") -> None:
    console.print(note.text, style=STYLES[note.tone], markup=False, soft_wrap=True)


def _print_block(console: "Console", block: "Block") -> None:
    from rich.table import Table as Grid

    from maitred.load.report.document import Callout, CodeBlock, KeyFigures, Paragraph, Table

    match block:
        case Callout():
            _print_note(console, block)
        case Paragraph(text) | CodeBlock(text):
            console.print(text, markup=False, soft_wrap=True)
        case KeyFigures(figures):
            grid = Grid(box=None, show_header=False, pad_edge=False)
            for figure in figures:
                grid.add_row(_plain(figure.name), _plain(figure.value), _plain(figure.aside))
            console.print(grid)
        case Table():
            grid = Grid(box=None, pad_edge=False, header_style="dim")
            for number, name in enumerate(block.head):
                if number < block.words:
                    longest = max((len(row[number]) for row in block.rows), default=0)
                    grid.add_column(_plain(name), min_width=min(longest, SHORTEST_WORDS))
                else:
                    grid.add_column(_plain(name), justify="right")
            space = "\u00a0" if console.is_terminal else " "
            for row in block.rows:
                # A heading may take two lines in a narrow terminal; a number and its unit stay together. A pipe gets
                # plain spaces.
                cells = [cell if number < block.words else cell.replace(" ", space) for number, cell in enumerate(row)]
                grid.add_row(*map(_plain, cells))
            console.print(grid)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
