"""Writing settings back."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta, Struct, field, inspect

from maitred.config.loader import build_struct, load
from maitred.config.render import format_value, settings_reference, settings_yaml, to_yaml
from maitred.config.sources import parse_yaml
from maitred.config.walker import leaf_keys
from maitred.core.secret import Secret

SETTINGS = {
    "MAITRED__MODEL__PATH": "0777",
    "MAITRED__MODEL__SERVED_NAME": "a: b # c",
    "MAITRED__ENGINE__KV_MEMORY_BYTES": "1536KiB",
    "MAITRED__ENGINE__PREFIX_CACHE": "false",
    "MAITRED__SERVER__MAX_BODY_BYTES": "5000",
    "MAITRED__SERVER__DRAIN_GRACE_S": "0.25",
}


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("with_origins", [False, True])
def test_what_is_shown_reads_back(with_origins: bool) -> None:
    before = load(None, SETTINGS)
    Path("shown.yaml").write_text(to_yaml(before, with_origins=with_origins))
    assert load(Path("shown.yaml")).config == before.config


def test_origins_stand_beside_the_values() -> None:
    shown = to_yaml(load(None, SETTINGS), with_origins=True)
    lines = [tuple(part.strip() for part in line.split("  # ")) for line in shown.splitlines()]
    assert ("kv_memory_bytes: 1536KiB", "MAITRED__ENGINE__KV_MEMORY_BYTES") in lines
    assert ("port: 8000", "default") in lines


class Budget(Struct, frozen=True, kw_only=True):
    """Money."""

    usd: Annotated[float | None, Meta(description="How much.")] = None


class Person(Struct, frozen=True, kw_only=True):
    """Somebody at the table."""

    key: Annotated[Secret | None, Meta(description="What opens the door.")] = None
    wines: Annotated[tuple[str, ...], Meta(description="What they drink.")] = ("red",)
    chairs: Annotated[dict[str, int], Meta(description="Where they sit.")] = field(default_factory=lambda: {"a": 1})
    budget: Budget = Budget()


class Bar(Struct, frozen=True, kw_only=True):
    """Where people wait."""

    open: Annotated[bool, Meta(description="Whether it is open.")] = True
    budget: Budget = Budget()
    regulars: Annotated[dict[str, Person], Meta(description="Who is always there.")] = {}


class Venue(Struct, frozen=True, kw_only=True):
    people: Annotated[dict[str, Person], Meta(description="Who comes.")] = {}
    bar: Bar = Bar()


VENUE = """\
people:
  ann:
    key: {env: KEY}
    wines: [red, white]
    budget:
      usd: 5.0
  bob: {}
bar:
  open: true
  budget: {}
  regulars:
    cleo:
      chairs: {b: 2}
"""


def venue(text: str) -> tuple[Venue, Mapping[str, str]]:
    root, faults = parse_yaml(text, "f")
    assert faults == []
    return build_struct(Venue, root, {"KEY": "hunter2"}, lambda _: ())


def test_sections_inside_of_sections_show_what_was_set() -> None:
    assert settings_yaml(*venue(VENUE)) == VENUE
    assert settings_yaml(*venue("")) == "people: {}\nbar:\n  open: true\n  budget: {}\n  regulars: {}\n"
    built, origins = venue(VENUE)
    lines = settings_yaml(built, origins, with_origins=True).splitlines()
    assert lines[2] == f"{'    key: {env: KEY}':<40}  # f:3"
    assert venue("\n".join(lines))[0] == built


def test_the_reference_describes_a_struct_once() -> None:
    page = settings_reference(Venue)
    assert "## `people.NAME`\n\nSomebody at the table. Who comes.\n" in page
    assert "### `people.NAME.budget.usd`" in page
    assert "- Environment: `MAITRED__PEOPLE__NAME__WINES`" in page
    assert "- Takes: a list, `[…, …]`, of text\n- Default: `[red]`" in page
    assert "- Takes: names, each with whole number\n- Default: `{a: 1}`" in page
    assert "- Takes: a secret, by reference: `{env: NAME}` or `{file: path}` or null" in page
    assert "## `bar.budget`\n\nMoney. Takes what `people.NAME.budget` takes.\n" in page
    assert (
        "## `bar.regulars.NAME`\n\nSomebody at the table. Who is always there. Takes what `people.NAME` takes." in page
    )
    assert page.count("How much.") == 1
    info = inspect.type_info(Venue)
    assert isinstance(info, inspect.StructType)
    for key in leaf_keys(info):
        assert f"### `{key}`\n" in page


def test_a_secret_is_written_as_its_reference() -> None:
    assert format_value(Secret("hunter2", "{env: KEY}")) == "{env: KEY}"


def test_the_process_environment_is_a_sound_layer() -> None:
    assert load(None, os.environ).config == load().config
