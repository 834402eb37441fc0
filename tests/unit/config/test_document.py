"""Documents: a file of their own, flags above it, all faults at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from maitred.config.checks import ConfigConflict
from maitred.config.document import read_document
from maitred.config.nodes import ConfigFault
from maitred.config.sources import Flag, read_overrides
from maitred.core.errors import ConfigInvalid
from maitred.core.secret import Secret


class Dish(Struct, frozen=True, kw_only=True):
    name: str
    grams: int = 100
    recipe: Secret | None = None


class Menu(Struct, frozen=True, kw_only=True):
    dishes: list[Dish] = []
    starter: Dish | None = None
    chairs: int = 4


def rules(menu: Menu) -> Iterator[ConfigConflict]:
    if len(menu.dishes) > menu.chairs:
        yield ConfigConflict(("dishes", "chairs"), "More dishes than chairs.")


def read(tmp_path: Path, text: str, overrides: dict[str, object] | None = None, faults: list[ConfigFault] = []) -> Menu:  # noqa: B006
    path = tmp_path / "menu.yaml"
    path.write_text(text)
    flags, found = read_overrides(overrides or {})
    env = {"A": "alpha", "MAITRED__CHAIRS": "9"}
    return read_document(Menu, path, env, subject="The menu", flags=flags, rules=rules, faults=[*found, *faults])


def test_flags_lie_above_the_file_and_the_environment_is_no_layer(tmp_path: Path) -> None:
    menu = read(tmp_path, "dishes: [{name: soup}]\nchairs: 2\n", {"chairs": Flag("--chairs", "3")})
    assert menu == Menu(dishes=[Dish(name="soup")], chairs=3)
    assert read(tmp_path, "").chairs == 4


def test_a_flags_secret_replaces_the_files(tmp_path: Path) -> None:
    menu = read(
        tmp_path, "starter: {name: soup, recipe: {file: /nowhere}}\n", {"starter.recipe.env": Flag("--recipe", "A")}
    )
    assert menu.starter is not None
    assert menu.starter.recipe == Secret("alpha", "")


def test_all_faults_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        read(
            tmp_path,
            "dishes:\n  - {nam: soup}\n  - {name: stew, grams: x}\n",
            {"chairs": Flag("--chairs", "two")},
            [ConfigFault("--dish", "", "Twice.")],
        )
    assert caught.value.message.replace(str(tmp_path), "").split("\n") == [
        "The menu has 5 faults:",
        "  --dish: Twice.",
        "  /menu.yaml:2: dishes[0].nam: No such setting. Did you mean dishes[0].name?",
        "  /menu.yaml:2: dishes[0].name: Must be set; it has no default.",
        "  /menu.yaml:3: dishes[1].grams: Must be a whole number, not 'x'.",
        "  --chairs: chairs: Must be a whole number, not 'two'.",
    ]


def test_rules_between_settings_point_at_what_was_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"--chairs: dishes: More dishes than chairs\.") as caught:
        read_document(
            Menu,
            None,
            {},
            subject="The menu",
            flags=read_overrides({"chairs": Flag("--chairs", "-1")})[0],
            rules=rules,
        )
    assert caught.value.message.startswith("The menu has a fault:")


def test_a_file_that_is_not_there_is_the_only_fault(tmp_path: Path) -> None:
    def never_right(menu: Menu) -> Iterator[ConfigConflict]:
        yield ConfigConflict(("chairs",), "Wrong.")

    with pytest.raises(ConfigInvalid, match=r"The menu has a fault:\n.*: No such file\."):
        read_document(Menu, tmp_path / "no.yaml", {}, subject="The menu", rules=never_right)
