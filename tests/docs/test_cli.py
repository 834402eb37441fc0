"""Every command and option is documented, the documentation names no other, and its examples parse."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from maitred.cli.app import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
SECTIONS = dict(re.findall(r"^## (maitred [^\n]*)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S))


def commands() -> dict[str, object]:
    """The full name of every command that is not hidden -> its definition."""
    found: dict[str, object] = {}
    pending = [("maitred", typer.main.get_command(app))]
    while pending:
        name, command = pending.pop()
        if hasattr(command, "commands"):
            pending += [(f"{name} {verb}", below) for verb, below in command.commands.items() if not below.hidden]
        else:
            found[name] = command
    return found


COMMANDS = commands()


def test_every_command_has_its_section() -> None:
    assert SECTIONS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_documented_and_no_other(name: str) -> None:
    options: set[str] = set()
    for parameter in COMMANDS[name].params:  # type: ignore[attr-defined]
        if parameter.param_type_name == "option":
            options |= {flag for flag in parameter.opts if flag.startswith("--")} - {"--help"}
        else:
            assert f"`{parameter.metavar}`" in SECTIONS[name]
    assert documented(name) == options


def documented(name: str) -> set[str]:
    """The options in the section's table, and those of the command that it takes them over from."""
    own = set(re.findall(r"^\| `(--[a-z-]+)", SECTIONS[name], re.M))
    taken_over = re.search(r"^All options of `(maitred [a-z ]+)` .*, except `(--[a-z-]+)`", SECTIONS[name], re.M)
    return own | (documented(taken_over[1]) - {taken_over[2]}) if taken_over else own


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_are_commands_that_exist(name: str) -> None:
    examples = re.findall(r"^\$ (.*maitred .*)$", SECTIONS[name], re.M)
    assert examples
    for example in examples:
        command = (
            example.rpartition(" | ")[2].partition(" > ")[0] if "| maitred" in example else example.partition(" > ")[0]
        )
        words = shlex.split(command[command.index("maitred ") :])
        depth = len(name.split())
        assert " ".join(words[:depth]) == name
        COMMANDS[name].make_context(name, words[depth:])  # type: ignore[attr-defined]  # raises on what does not parse


def test_examples_in_the_guide_to_load_are_commands_that_exist() -> None:
    guide = (PAGE.parent / "load.md").read_text(encoding="utf-8")
    examples = re.findall(r"^[$>] +(maitred load [^#\n]*)", guide, re.M)
    assert len(examples) > 6
    for example in examples:
        words = shlex.split(example)
        COMMANDS[" ".join(words[:3])].make_context(words[2], words[3:])  # type: ignore[attr-defined]
