"""Every key of a source has exactly one fate, whatever a converter says."""

from maitred.migration.report import KeyFate
from maitred.migration.source_keys import SourceKeys

DOCUMENT = {"list": [{"a": 1, "b": {}}, {"a": 2}], "gpt-3.5": {"x": None}, "empty": []}


def test_the_first_fate_of_a_key_stays():
    keys = SourceKeys(DOCUMENT)
    first = next(iter(keys.root.child("list").items()))
    first.child("a").map_to("ours")
    first.refuse("Do something else.")
    assert [(entry.keys, entry.fate) for entry in keys.entries()[:2]] == [
        (("list[0].a",), KeyFate.MAPPED),
        (("list[0].b",), KeyFate.UNSUPPORTED),
    ]


def test_keys_without_a_fate_are_reported_as_unknown():
    keys = SourceKeys(DOCUMENT)
    keys.root.child("list").ignore("Nothing reads it.")
    unknown = [entry for entry in keys.entries() if not entry.is_known]
    assert [entry.path for entry in unknown] == ['"gpt-3.5".x', "empty"]
    assert {entry.fate for entry in unknown} == {KeyFate.UNSUPPORTED}


def test_a_key_that_is_not_there_gets_no_fate():
    keys = SourceKeys(DOCUMENT)
    keys.root.child("missing").map_to("ours")
    keys.root.ignore("")
    assert [key for entry in keys.entries() for key in entry.keys] == [
        *("list[0].a", "list[0].b", "list[1].a", '"gpt-3.5".x', "empty")
    ]


def test_keys_of_an_included_file_stand_behind_its_name():
    keys = SourceKeys({"model_list": []}, "more.yaml:")
    keys.root.child("model_list").map_to("models")
    assert keys.entries()[0].keys == ("more.yaml:model_list",)
