"""Document model of a report, whatever format it is written in."""

from dataclasses import dataclass, field
from enum import StrEnum


class CalloutLevel(StrEnum):
    """How a note is meant."""

    GOOD = "good"
    CARE = "care"
    BAD = "bad"


@dataclass(frozen=True)
class Callout:
    """A sentence that a reader must not miss."""

    tone: CalloutLevel
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Paragraph of running text."""

    text: str


@dataclass(frozen=True)
class CodeBlock:
    """Text to be read, or typed, letter by letter."""

    text: str


@dataclass(frozen=True)
class KeyFigure:
    """A key figure: its name, its value, and what else to know of it."""

    name: str
    value: str
    aside: str = ""


@dataclass(frozen=True)
class KeyFigures:
    """The figures that a reader came for."""

    figures: list[KeyFigure]


@dataclass(frozen=True)
class Table:
    """Rows under a head.

    Attributes:
        head: Names of the columns.
        rows: Each as long as the head.
        words: How many columns, from the left, are words; the others are numbers and stand to the right.
    """

    head: list[str]
    rows: list[list[str]]
    words: int = 1


@dataclass(frozen=True)
class Plot:
    """A figure by its name, where it was drawn; left out where it was not.

    Attributes:
        name: As `plots.draw` names it.
        caption: What it shows and how to read it.
    """

    name: str
    caption: str


Block = Callout | Paragraph | CodeBlock | KeyFigures | Table | Plot


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    """Document of a report.

    Attributes:
        title: One line.
        subtitle: One line on what, where and when.
        verdict: The first thing to know.
        notes: The next things to know.
        sections: The rest.
    """

    title: str
    subtitle: str
    verdict: Callout
    notes: list[Callout] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
