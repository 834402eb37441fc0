"""Secrets, and settings of other shapes than the product has today."""

from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from maitred.config.node import Node
from maitred.config.sources import parse_yaml
from maitred.config.walker import Walker
from maitred.core.secret import Secret


class Store(Struct, frozen=True, kw_only=True):
    password: Annotated[Secret | None, Meta(description="…")] = None
    required: Annotated[int, Meta(gt=0, lt=10)]


class Tree(Struct, frozen=True, kw_only=True):
    store: Store


def walk(text: str, env: dict[str, str] | None = None) -> tuple[Tree | None, list[str]]:
    root, faults = parse_yaml(text, "f")
    walker = Walker(env or {})
    return walker.build(Tree, root), [str(fault) for fault in [*faults, *walker.faults]]


def secret_of(text: str, env: dict[str, str] | None = None) -> Secret:
    tree, faults = walk(text, env)
    assert not faults
    assert tree is not None
    assert tree.store.password is not None
    return tree.store.password


def test_missing_setting_without_default_is_a_fault() -> None:
    assert walk("store: {}") == (None, ["store.required: Must be set; it has no default."])
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
        Walker({}).build(Odd, Node({"ratio": Node("1", "f")}, "f"))


@pytest.mark.parametrize("text", [".inf", "nan", "-inf", "half"])
def test_numbers_are_finite_also_without_bounds(text: str) -> None:
    class Free(Struct):
        ratio: float = 0.5

    walker = Walker({})
    assert walker.build(Free, Node({"ratio": Node(text, "f", is_text=True)}, "f")) == Free()
    assert [fault.message for fault in walker.faults] == [f"Must be a number, not {text!r}."]
