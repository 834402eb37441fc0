"""Secrets, and settings of other shapes than the product has today."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from maitred.config.nodes import ConfigNode
from maitred.config.sources import parse_yaml
from maitred.config.walker import StructBuilder
from maitred.core.secret import Secret


class Store(Struct, frozen=True, kw_only=True):
    password: Annotated[Secret | None, Meta(description="…")] = None
    required: Annotated[int, Meta(gt=0, lt=10)]


class Tree(Struct, frozen=True, kw_only=True):
    store: Store


def walk(text: str, env: dict[str, str] | None = None) -> tuple[Tree | None, list[str]]:
    root, faults = parse_yaml(text, "f")
    walker = StructBuilder(env or {})
    return walker.build(Tree, root), [str(fault) for fault in [*faults, *walker.faults]]


def secret_of(text: str, env: dict[str, str] | None = None) -> Secret:
    tree, faults = walk(text, env)
    assert not faults
    assert tree is not None
    assert tree.store.password is not None
    return tree.store.password


def test_missing_setting_without_default_is_a_fault() -> None:
    assert walk("store: {}") == (None, ["f:1: store.required: Must be set; it has no default."])
    assert walk("") == (None, ["store.required: Must be set; it has no default."])


def test_open_bounds_are_in_the_sentence() -> None:
    assert walk("store: {required: 10}")[1] == [
        "f:1: store.required: Must be a whole number above 0 and below 10, not 10."
    ]


def test_secret_from_the_environment_is_never_shown() -> None:
    secret = secret_of("store: {required: 1, password: {env: DB_PASSWORD}}", {"DB_PASSWORD": "hunter2"})
    assert secret.reveal() == "hunter2"
    assert "hunter2" not in f"{secret!r} {secret} {secret!s}"
    assert secret.reference == "{env: DB_PASSWORD}"


def test_secret_from_a_file_loses_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2\n")
    assert secret_of(f"store: {{required: 1, password: {{file: {tmp_path}/key}}}}").reveal() == "hunter2"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("sk-topsecret", "Secrets are given by reference"),
        ("{env: A, file: b}", "Secrets are given by reference"),
        ("{value: sk-topsecret}", "Secrets are given by reference"),
        ("[sk-topsecret]", "Secrets are given by reference"),
        ("{env: NOT_SET}", "The environment variable NOT_SET is not set."),
        ("{env: ''}", "`env` must name a variable."),
        ("{env: BLANK}", "The secret in env BLANK is empty."),
        ("{file: /nowhere/key}", "cannot be read as text"),
        ("{file: [1]}", "`file` must name a file."),
    ],
)
def test_faults_of_secrets_do_not_repeat_them(written: str, expected: str) -> None:
    _, faults = walk(f"store: {{required: 1, password: {written}}}", {"BLANK": " \n"})
    assert len(faults) == 1
    assert expected in faults[0]
    assert "topsecret" not in faults[0]


def test_type_without_a_reader_is_a_bug_of_ours() -> None:
    class Odd(Struct):
        ratio: complex = 0j

    with pytest.raises(TypeError, match="no way to read"):
        StructBuilder({}).build(Odd, ConfigNode({"ratio": ConfigNode("1", "f")}, "f"))


@pytest.mark.parametrize("text", [".inf", "nan", "-inf", "half"])
def test_numbers_are_finite_also_without_bounds(text: str) -> None:
    class Free(Struct):
        ratio: float = 0.5

    walker = StructBuilder({})
    assert walker.build(Free, ConfigNode({"ratio": ConfigNode(text, "f", is_text=True)}, "f")) == Free()
    assert [fault.message for fault in walker.faults] == [f"Must be a number, not {text!r}."]


class Person(Struct, frozen=True, kw_only=True):
    chairs: Annotated[int, Meta(ge=1)]
    key: Secret | None = None


class Party(Struct, frozen=True, kw_only=True):
    people: dict[str, Person] = {}
    courses: list[Person] = []
    wines: tuple[str, ...] = ()
    host: Person | None = None
    wait_s: Annotated[float, Meta(gt=0, extra={"unit": "seconds"})] | None = None


def party(text: str) -> tuple[Party | None, list[str], dict[str, str]]:
    root, faults = parse_yaml(text, "f")
    walker = StructBuilder({"KEY": "secret"})
    return walker.build(Party, root), [str(fault) for fault in [*faults, *walker.faults]], walker.origins


def test_names_of_the_writers_choice_and_lists_hold_structs() -> None:
    built, faults, origins = party(
        "people:\n  ann: {chairs: 2, key: {env: KEY}}\n  bob:\n    chairs: 3\n"
        "courses:\n  - chairs: 4\n  - {chairs: 5}\nwines: [red, 12]\nhost: {chairs: 6}\nwait_s: 250ms\n"
    )
    assert faults == []
    assert built == Party(
        people={"ann": Person(chairs=2, key=Secret("secret", "")), "bob": Person(chairs=3)},
        courses=[Person(chairs=4), Person(chairs=5)],
        wines=("red", "12"),
        host=Person(chairs=6),
        wait_s=0.25,
    )
    assert (origins["people.bob.chairs"], origins["courses[1].chairs"]) == ("f:4", "f:7")


def test_every_fault_in_them_is_named_by_its_place() -> None:
    built, faults, _ = party(
        "people:\n  ann: {chair: 2}\n  bob: 3\ncourses:\n  - {chairs: 0}\n  - {chairs: 1}\nwines: red\n"
        "host:\n  chairs: x\nwait_s: 2 weeks\n"
    )
    assert faults == [
        "f:2: people.ann.chair: No such setting. Did you mean people.ann.chairs?",
        "f:2: people.ann.chairs: Must be set; it has no default.",
        "f:3: people.bob: Is a section: put its settings below it, such as `chairs:`.",
        "f:3: people.bob.chairs: Must be set; it has no default.",
        "f:5: courses[0].chairs: Must be a whole number at least 1, not 0.",
        "f:7: wines: Must be a list, each entry on a line that begins with `- `, not 'red'.",
        "f:9: host.chairs: Must be a whole number at least 1, not 'x'.",
        "f:10: wait_s: Must be a duration such as 500ms or 2m, above 0, not 2 weeks.",
    ]
    assert built == Party(courses=[Person(chairs=1)])


class Meal(StrEnum):
    LUNCH = "lunch"
    DINNER = "dinner"


class Kitchen(Struct, frozen=True, kw_only=True):
    notice_s: Annotated[dict[Meal, Annotated[float, Meta(ge=0)]], Meta(extra={"unit": "seconds"})] = {}


def test_names_of_an_enumeration_are_checked_and_their_values_take_the_unit() -> None:
    root, _ = parse_yaml("notice_s: {lunch: 500ms, diner: 1s, 3: 1s}", "f")
    walker = StructBuilder({})
    assert walker.build(Kitchen, root) == Kitchen(notice_s={Meal.LUNCH: 0.5})
    assert [str(fault) for fault in walker.faults] == [
        "f:1: notice_s.diner: No such name. Did you mean notice_s.dinner?",
        "f:1: notice_s.3: No such name. There are: lunch, dinner.",
    ]


def test_empty_sections_of_names_are_empty() -> None:
    assert party("people:\nhost:\n")[:2] == (Party(), [])
    assert party("people: [1]")[1] == ["f:1: people: Must be names with something below each."]
    assert party("courses:")[1] == [
        "f:1: courses: Must be a list, each entry on a line that begins with `- `, not empty."
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[red, white]", ("red", "white")),
        (" [ red ] ", ("red",)),
        ("[]", ()),
        ("[ ]", ()),
        ('["red", "white"]', ("red", "white")),
        ('["red, dry",white]', ("red, dry", "white")),
        ("['red', 'white']", ("red", "white")),
        ("[tcp:[::1]:9, it's]", ("tcp:[::1]:9", "it's")),
    ],
)
def test_a_variable_writes_a_list_in_brackets(written: str, expected: tuple[str, ...]) -> None:
    walker = StructBuilder({})
    built = walker.build(Party, ConfigNode({"wines": ConfigNode(written, "WINES", is_text=True)}, "environment"))
    assert walker.faults == []
    assert built == Party(wines=expected)


def test_only_brackets_make_a_list_of_text() -> None:
    for node in (
        ConfigNode("red, white", "f", is_text=True),
        ConfigNode("[red", "f", is_text=True),
        ConfigNode('["red]', "f", is_text=True),
        ConfigNode("[red]", "f"),
    ):
        walker = StructBuilder({})
        walker.build(Party, ConfigNode({"wines": node}, "f"))
        assert len(walker.faults) == 1
    walker = StructBuilder({})
    walker.build(Party, ConfigNode({"courses": ConfigNode("[3]", "COURSES", is_text=True)}, "environment"))
    assert str(walker.faults[0]).startswith("COURSES: courses[0]: Is a section")


def test_entries_have_an_origin_of_their_own() -> None:
    _, _, origins = party("people:\n  ann: {chairs: 2}\n")
    assert origins["people.ann"] == "f:2"


def test_settings_below_names_are_suggested() -> None:
    assert party("chairs: 3")[1] == ["f:1: chairs: No such setting. Did you mean people.NAME.chairs?"]
