"""Markdown report, in the form that GitHub and most other readers accept."""

from collections.abc import Mapping
from pathlib import Path

from maitred.load.measure.result import LoadResult
from maitred.load.report.document import (
    Block,
    Callout,
    CalloutLevel,
    CodeBlock,
    Document,
    KeyFigures,
    Paragraph,
    Plot,
    Table,
)
from maitred.load.report.outline import outline

MARKS = {CalloutLevel.GOOD: "✅", CalloutLevel.CARE: "⚠️", CalloutLevel.BAD: "❌"}
_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#~$"} | {"&": "&amp;", "\n": " "})


def render(result: LoadResult, plots: Mapping[str, Path] | None = None) -> str:
    """Renders the report of a run.

    Args:
        result: Result of the run.
        plots: Path of each figure, relative to the report's own folder.
    """
    return write(outline(result), plots or {})


def write(document: Document, plots: Mapping[str, Path]) -> str:
    """Renders any report as Markdown."""
    parts = [f"# {_text(document.title)}", _text(document.subtitle), f"**{_note(document.verdict)}**"]
    if document.notes:
        parts.append("\n".join(f"- {_note(note)}" for note in document.notes))
    for section in document.sections:
        blocks = [text for block in section.blocks if (text := _block(block, plots))]
        parts += [f"## {_text(section.title)}", *blocks]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, plots: Mapping[str, Path]) -> str:
    match block:
        case Callout():
            return _note(block)
        case Paragraph(text):
            return _text(text)
        case CodeBlock(text):
            # The fence is longer than any run of backticks inside.
            fence = "```"
            while fence in text:
                fence += "`"
            return f"{fence}sh\n{text}\n{fence}"
        case KeyFigures(figures):
            return _table(Table(["", "", ""], [[it.name, it.value, it.aside] for it in figures]))
        case Table():
            return _table(block)
        case Plot(name, caption):
            return f"![{_text(caption)}](<{plots[name].as_posix()}>)\n\n*{_text(caption)}*" if name in plots else ""


def _table(table: Table) -> str:
    rule = ["---" if column < table.words else "---:" for column in range(len(table.head))]
    lines = [[_text(cell) for cell in table.head], rule, *([_text(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _note(note: Callout) -> str:
    return f"{MARKS[note.tone]} {_text(note.text)}"


def _text(text: str) -> str:
    return text.translate(_SPECIAL)
