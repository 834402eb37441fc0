"""Prose: the first line of a docstring names its subject, and pages fit on a screen."""

import re

import pytest

from tests.support.source import ROOT, docstrings

WITHOUT_SUBJECT = re.compile(
    r"(It|They|He|She|Who|Whoever|Those|Of|All of|One of|The same|That|This|These|What|See|As|Their|Its|Them|So|Some"
    r"|Somebody|Nobody|None|Everybody)\b|\.\.\."
)
FEWEST_WORDS = 4
MOST_README_LINES = 150


def is_poor(docstring: str) -> bool:
    """Whether its first line leaves out what it is about, or says next to nothing."""
    first = docstring.partition("\n")[0]
    return WITHOUT_SUBJECT.match(first) is not None or len(first.split()) < FEWEST_WORDS


@pytest.mark.parametrize(
    ("docstring", "poor"),
    [
        ("Queue of one tenant pool, with its entries.", False),
        ("Returns the replica that is chosen now.", False),
        ("It gives them back.", True),
        ("Of one server.", True),
        ("See `Seat.granted`.", True),
        ("What one request holds at its replica.", True),
        ("...and the headers in it.", True),
        ("Italics are left as they are.", False),
    ],
)
def test_docstrings_without_a_subject_are_found(docstring, poor):
    assert is_poor(docstring) == poor


def test_every_docstring_names_its_subject():
    poor = [f"{path}: {name}: {text.partition(chr(10))[0]}" for path, name, text in docstrings() if is_poor(text)]
    assert poor == []


def prose_lines(page):
    """Its lines with their numbers, without tables and what stands between fences."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith("|"):
            yield number, line


def test_lines_of_the_documentation_fit_on_a_screen():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    long = [f"{page.name}:{number}" for page in pages for number, line in prose_lines(page) if len(line) > 120]
    assert long == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_README_LINES
