"""Names: terms of the field, each standing for one thing."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.source import ROOT, SOURCE, classes, functions, names, words

VOCABULARY = ROOT / "docs" / "vocabulary.txt"
METAPHORS = {
    *("floor", "room", "seat", "spare", "station", "post", "errand", "guest", "lodger", "house", "lobby", "desk"),
    *("clerk", "hotline", "keeper", "staff", "story", "chapter", "hearsay", "slumber", "bed", "way", "road", "ground"),
    *("regime", "holder"),
}
"""Words of an earlier private language."""
PUBLISHED = {
    *("engine/config.py: floor", "engine/config.py: guests"),  # settings
    *("core/replica.py: guests", "core/replica.py: guest_places"),  # load reports on the engine's wire
    *("load/chaos/plan.py: spare_bytes",),  # settings of a rehearsal
    *("wire/admin/responses.py: chapters",),  # fields of answers
}
"""Fields that others read: they keep their names."""
NAMES_OF_OTHERS = {"do_POST", "post_processor"}
"""Of the standard library and of `tokenizers`."""


KINDS = ("class", "module", "function", "attribute", "variable")


def metaphors(*kinds: str, folder: Path = SOURCE) -> list[str]:
    return [
        f"{path}: {name}"
        for path, kind, name in names(folder)
        if kind in kinds
        and not name.startswith("__")
        and f"{path}: {name}" not in PUBLISHED
        and name not in NAMES_OF_OTHERS
        and any(word in METAPHORS or word.removesuffix("s") in METAPHORS for word in words(name))
    ]


def test_nothing_is_named_by_a_metaphor():
    assert metaphors(*KINDS) == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_tests_and_benchmarks_have_the_same_words(folder):
    assert metaphors(*KINDS, folder=ROOT / folder) == []


def test_a_metaphor_in_a_test_is_found(tmp_path):
    (tmp_path / "test_desk.py").write_text("class Guest: ...\ndef test_a_full_house(): seat = 1\ndef test_it(): ...\n")
    found = ["test_desk.py: test_desk", "test_desk.py: Guest", "test_desk.py: test_a_full_house", "test_desk.py: seat"]
    assert metaphors(*KINDS, folder=tmp_path) == found


def test_the_check_finds_metaphors_in_compound_names():
    assert words("DispatchSeat") == ["dispatch", "seat"]
    assert words("_SPARE_ENDS") == ["spare", "ends"]
    assert words("HTTPServer") == ["http", "server"]


PARTICIPLE = re.compile(
    r"(un)?[a-z]+ed|told|said|held|made|kept|known|shown|given|taken|begun|seen|found|left|sent|lost|met"
)
VERBS = {"feed", "need", "seed", "embed", "shed", "exceed"}
PARTICIPLES = {
    "engine/compiled.py: compiled",  # a decorator, which reads as an adjective of what it decorates
    "testing/postgres_server.py: paused",  # a context: `with server.paused()`
}


def test_no_function_is_named_by_a_participle_alone():
    """A function is a verb, or the noun that it returns; an adjective is a property."""
    assert [
        f"{path}: {node.name}"
        for path, node in functions()
        if PARTICIPLE.fullmatch(node.name.strip("_"))
        and node.name.strip("_") not in VERBS
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        and f"{path}: {node.name}" not in PARTICIPLES
    ] == []


def test_no_two_public_classes_have_one_name():
    found = Counter(node.name for _, node in classes() if not node.name.startswith("_"))
    assert [name for name, count in found.items() if count > 1] == []


def test_every_word_of_a_class_or_module_is_in_the_vocabulary():
    """A new word is a new concept for the reader: take one that is there, or add it with a reason in the commit."""
    known = set(VOCABULARY.read_text(encoding="utf-8").split())
    used = {word for _, kind, name in names() if kind in ("class", "module") for word in words(name)}
    assert sorted(used - known) == []
    assert sorted(known - used) == [], "words that no name has any more"
    assert sorted(known & METAPHORS) == []
