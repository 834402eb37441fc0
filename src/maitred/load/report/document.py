"""Document model of a report, whatever format it is written in."""

from dataclasses import dataclass, field
from enum import StrEnum


class CalloutLevel(StrEnum):
    """Level of a note: how important it is."""

    GOOD = "good"
    CARE = "care"
    BAD = "bad"


@dataclass(frozen=True)
class Callout:
    """Callout: a sentence that a reader must not miss."""

    tone: CalloutLevel
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Paragraph of running text."""

    text: str


@dataclass(frozen=True)
class CodeBlock:
    """Code block: text that is read or typed exactly."""

    text: str


@dataclass(frozen=True)
class KeyFigure:
    """Key figure: its name, its value, and a remark."""

    name: str
    value: str
    aside: str = ""


@dataclass(frozen=True)
class KeyFigures:
    """Key figures: the most important values of a report."""

    figures: list[KeyFigure]


@dataclass(frozen=True)
class Table:
    """Table with a head and rows.

    Attributes:
        head: Names of the columns.
        rows: Rows, each as long as the head.
        words: Number of text columns, from the left; the other columns are numbers and are aligned to the right.
    """

    head: list[str]
    rows: list[list[str]]
    words: int = 1


@dataclass(frozen=True)
class Plot:
    """Plot that is named by its figure; it is left out if the figure was not drawn.

    Attributes:
        name: Name of the figure in `plots.draw`.
        caption: Description of what it shows and how to read it.
    """

    name: str
    caption: str


Block = Callout | Paragraph | CodeBlock | KeyFigures | Table | Plot


@dataclass(frozen=True)
class Section:
    """Section with a heading and blocks."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    """Document of a report.

    Attributes:
        title: Title in one line.
        subtitle: One line with the subject, the time and the place.
        verdict: Most important statement.
        notes: Further important statements.
        sections: Sections with all details.
    """

    title: str
    subtitle: str
    verdict: Callout
    notes: list[Callout] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
