"""The training text: three sources, cleaned the same way, each with its tail held out.

Only text that may be redistributed inside a package is read: two public-domain collections and one
CC BY 4.0 set of dialogues. The last few percent of each book, of the plays and of the dialogues are
held out and reach neither the tokenizer nor the model.
"""

from __future__ import annotations

import json
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

BOOKS_FILE = "gutenberg_children_14books.txt.xz"
PLAYS_FILE = "tinyshakespeare.txt.xz"
DIALOGUES_FILE = "taskmaster4_coffee_dialogues.jsonl.xz"

HELD_OUT_FRACTION = 0.04
"""Share of every book, of the plays and of the dialogues that is never trained on."""

_SHORTEST_SECTION_CHARS = 400  # below this a section is a title page, a heading or a list
_SPEECHES_PER_SCENE = 48  # the plays carry no scene marks; whole speeches are grouped instead

# Project Gutenberg's slug -> the names that a reader would use.
_BOOKS = {
    "Alice-s-Adventures-in-Wonderland": ("Alice in Wonderland", "Lewis Carroll"),
    "Through-the-Looking-Glass": ("Through the Looking-Glass", "Lewis Carroll"),
    "The-Secret-Garden": ("The Secret Garden", "Frances Hodgson Burnett"),
    "The-Jungle-Book": ("The Jungle Book", "Rudyard Kipling"),
    "Just-So-Stories": ("Just So Stories", "Rudyard Kipling"),
    "The-Wind-in-the-Willows": ("The Wind in the Willows", "Kenneth Grahame"),
    "Black-Beauty": ("Black Beauty", "Anna Sewell"),
    "The-Adventures-of-Pinocchio": ("The Adventures of Pinocchio", "Carlo Collodi"),
    "The-Railway-Children": ("The Railway Children", "E. Nesbit"),
    "The-Blue-Fairy-Book": ("The Blue Fairy Book", "Andrew Lang"),
    "Heidi": ("Heidi", "Johanna Spyri"),
    "Grimms-Fairy-Tales": ("Grimms' Fairy Tales", "the Brothers Grimm"),
    "Andersen-s-Fairy-Tales": ("Andersen's Fairy Tales", "Hans Christian Andersen"),
    "The-Wonderful-Wizard-of-Oz": ("The Wonderful Wizard of Oz", "L. Frank Baum"),
}

_SPELLINGS = str.maketrans("’‘“”", "''\"\"", "_")

Document = tuple[str, ...]
"""The paragraphs of one chapter, tale or scene, in order."""


@dataclass(frozen=True)
class Book:
    """One book, or the plays taken together, as documents to learn from and documents to test on."""

    title: str
    author: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


@dataclass(frozen=True)
class Dialogue:
    """Turns of one conversation as (role, text); a role is "user" or "assistant"."""

    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Corpus:
    """Everything that is read, already split."""

    books: tuple[Book, ...]
    plays: Book
    dialogues: tuple[Dialogue, ...]
    held_out_dialogues: tuple[Dialogue, ...]


def read_corpus(folder: Path) -> Corpus:
    """Read and split the three sources.

    Args:
        folder: Holds the three `.xz` files named above.

    Raises:
        FileNotFoundError: Names the missing file and the flag that points elsewhere.
    """
    for name in (BOOKS_FILE, PLAYS_FILE, DIALOGUES_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"The training text {name} is not in {folder}; pass its folder with --text DIR.")
    dialogues, held_out_dialogues = _read_dialogues(folder / DIALOGUES_FILE)
    return Corpus(
        books=_read_books(folder / BOOKS_FILE),
        plays=_read_plays(folder / PLAYS_FILE),
        dialogues=dialogues,
        held_out_dialogues=held_out_dialogues,
    )


def _read_text(path: Path) -> str:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def _read_books(path: Path) -> tuple[Book, ...]:
    text = _read_text(path)
    parts = re.split(r"^=== (.+)_\d+ ===$", text, flags=re.MULTILINE)
    books = []
    for slug, body in zip(parts[1::2], parts[2::2], strict=True):
        title, author = _BOOKS[slug]
        sections = [_paragraphs(section) for section in re.split(r"\n{3,}", body)]
        documents = [
            section
            for section in sections
            if sum(map(len, section)) >= _SHORTEST_SECTION_CHARS and not _is_front_matter(section)
        ]
        train, held_out = _split_tail(documents)
        books.append(Book(title, author, train, held_out))
    return tuple(books)


def _read_plays(path: Path) -> Book:
    text = _read_text(path)
    speeches = [_plain(speech).strip() for speech in text.split("\n\n") if speech.strip()]
    scenes = [
        tuple(speeches[start : start + _SPEECHES_PER_SCENE]) for start in range(0, len(speeches), _SPEECHES_PER_SCENE)
    ]
    train, held_out = _split_tail(scenes)
    return Book("the plays", "William Shakespeare", train, held_out)


def _read_dialogues(path: Path) -> tuple[tuple[Dialogue, ...], tuple[Dialogue, ...]]:
    roles = {"u": "user", "a": "assistant"}
    dialogues = []
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            turns = [(roles[role], " ".join(_plain(text).split())) for role, text in json.loads(line)["turns"]]
            if turns[-1][0] == "user":  # an unanswered question teaches nothing about answering
                turns.pop()
            if turns:
                dialogues.append(Dialogue(tuple(turns)))
    cut = round(len(dialogues) * (1 - HELD_OUT_FRACTION))
    train = dialogues[:cut]
    # Short orders repeat word for word; one that was trained on would not be a test.
    seen = set(train)
    held_out = [dialogue for dialogue in dialogues[cut:] if dialogue not in seen]
    return tuple(train), tuple(held_out)


def _split_tail(
    documents: list[Document],
) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Cut the last `HELD_OUT_FRACTION` of the characters off, between two paragraphs."""
    total = sum(len(paragraph) for document in documents for paragraph in document)
    budget = total * (1 - HELD_OUT_FRACTION)
    train: list[Document] = []
    held_out: list[Document] = []
    position = 0
    for document in documents:
        keep = 0
        for paragraph in document:
            if position > budget:
                break
            position += len(paragraph)
            keep += 1
        if keep:
            train.append(document[:keep])
        if keep < len(document):
            held_out.append(document[keep:])
    return tuple(train), tuple(held_out)


def _paragraphs(section: str) -> Document:
    """Undo the hard line breaks of prose; keep those of verse."""
    paragraphs = []
    for block in section.split("\n\n"):
        lines = [line for line in _plain(block).splitlines() if line.strip()]
        if not lines:
            continue
        verse = len(lines) > 1 and (lines[0].startswith("    ") or max(len(line) for line in lines) < 52)
        joined = ("\n" if verse else " ").join(" ".join(line.split()) for line in lines)
        paragraphs.append(joined)
    return tuple(paragraphs)


def _plain(text: str) -> str:
    """One spelling for each quotation mark, and no underscores for emphasis."""
    return text.translate(_SPELLINGS)


def _is_front_matter(section: Document) -> bool:
    opening = section[0].lower()
    return opening.startswith(("content", "table of content", "preparer", "author of", "dashes;"))
