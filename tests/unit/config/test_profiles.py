"""Profiles: a layer below the file, and sound by themselves."""

import re
from pathlib import Path

import pytest

from maitred.config.loader import load
from maitred.config.profiles import PROFILES, ConfigProfile, Settings
from maitred.config.sources import Flag
from maitred.config.tree import Config
from maitred.config.units import parse_seconds
from maitred.core.errors import ConfigInvalid
from maitred.core.flow import PriorityClass

PAGE = Path(__file__).resolve().parents[3] / "docs" / "profiles.md"


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def keys_of(settings: Settings, parent: str = "") -> list[str]:
    """Dotted names of what a profile sets."""
    found = []
    for name, value in settings.items():
        key = f"{parent}.{name}" if parent else name
        found += keys_of(value, key) if isinstance(value, dict) and value else [key]
    return found


@pytest.mark.parametrize("name", PROFILES)
def test_each_is_sound_and_sets_what_it_says(name: str) -> None:
    loaded = load(None, {"MAITRED__PROFILE": name})
    assert loaded.config.profile == name
    set_by_it = {key for key, origin in loaded.origins.items() if origin == f"profile {name}"}
    assert {*keys_of(PROFILES[name].settings)} <= set_by_it  # type: ignore[index]
    assert {key for key in set_by_it if not any(other.startswith(f"{key}.") for other in set_by_it)} == {
        *keys_of(PROFILES[name].settings)  # type: ignore[index]
    }


def test_without_one_everything_is_default() -> None:
    assert load().config.profile is None
    assert load(None, {"MAITRED__PROFILE": "null"}).config == Config()


@pytest.mark.parametrize("layer", ["file", "environment", "flag"])
def test_every_other_layer_wins_over_it(layer: str) -> None:
    env, flags = {"MAITRED__PROFILE": "team"}, {}
    if layer == "file":
        Path("maitred.yaml").write_text("engine:\n  max_sequences: 5\n")
    elif layer == "environment":
        env["MAITRED__ENGINE__MAX_SEQUENCES"] = "5"
    else:
        flags["engine.max_sequences"] = Flag("--max-sequences", "5")
    assert load(None, env, flags).config.engine.max_sequences == 5


def test_the_last_layer_that_names_one_decides() -> None:
    Path("maitred.yaml").write_text("profile: team\n")
    assert load().config.engine.max_sequences == PROFILES["team"].settings["engine"]["max_sequences"]  # type: ignore[index,call-overload]
    loaded = load(None, {"MAITRED__PROFILE": "product"}, {"profile": Flag("--profile", "single-user")})
    assert loaded.origins["engine.max_sequences"] == "profile single-user"
    assert loaded.origins["profile"] == "--profile"


def test_it_reaches_whoever_reads_a_part_of_the_settings() -> None:
    loaded = load(None, {"MAITRED__PROFILE": "single-user"}, sections=["engine"])
    assert loaded.origins["engine.max_sequences"] == "profile single-user"


@pytest.mark.parametrize("text", ["profile: teem\n", "profile: [team]\n", "profile: {name: team}\n", "profile: 3\n"])
def test_one_that_does_not_exist_is_a_fault(text: str) -> None:
    Path("maitred.yaml").write_text(text)
    with pytest.raises(ConfigInvalid, match=r"maitred.yaml:1: profile: Must be one of"):
        load()


def test_a_typing_mistake_in_a_profile_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "team", ConfigProfile("", {"engine": {"max_sequence": 3}}))  # type: ignore[arg-type]
    with pytest.raises(ConfigInvalid, match=r"profile team: engine\.max_sequence: No such setting"):
        load(None, {"MAITRED__PROFILE": "team"})


def test_each_is_described_with_all_that_it_sets() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \|", page, re.M)
    for name, profile in PROFILES.items():
        assert f"`{name}`" in page
        for key in keys_of(profile.settings):
            described = any(f"{key}.".startswith(f"{row}.") for row in rows)
            assert described, f"{name} sets {key}, and docs/profiles.md does not say so"


def test_the_table_has_the_values_that_are_set() -> None:
    page = PAGE.read_text(encoding="utf-8")
    head, *rows = re.findall(r"^\| `?([\w. ]+)`? \| (.+) \|$", page.partition("What each sets")[2], re.M)
    columns = [name.strip(" `") for name in head[1].split(" | ")][1:]
    assert columns == list(PROFILES)
    table = {key: dict(zip(columns, text.split(" | ")[1:], strict=True)) for key, text in rows}
    for name in PROFILES:
        config = load(None, {"MAITRED__PROFILE": name}).config
        for key, cells in table.items():
            value: object = config
            for part in key.split("."):
                value = getattr(value, part)
            if cells[name] == "–":
                assert key not in keys_of(PROFILES[name].settings)
                continue
            assert any(f"{set_by}.".startswith(f"{key}.") for set_by in keys_of(PROFILES[name].settings)), (name, key)
            if isinstance(value, dict):
                if " / " in cells[name]:
                    values = [parse_cell(cell) for cell in cells[name].split(" / ")]
                    assert values == [value.get(kind) for kind in PriorityClass], (name, key)
            else:
                assert parse_cell(cells[name]) == value, (name, key)


def parse_cell(cell: str) -> object:
    """A value as the table says it."""
    text = cell.strip("`").replace(",", "")
    if text == "none":
        return None
    seconds = parse_seconds(text)
    return text if seconds is None else seconds


def test_a_class_that_the_file_names_replaces_that_class_alone() -> None:
    Path("maitred.yaml").write_text("profile: team\ndispatch:\n  max_waiting: {interactive: 5}\n")
    waiting = load().config.dispatch.max_waiting
    assert (waiting[PriorityClass.INTERACTIVE], waiting[PriorityClass.STANDARD]) == (5, 100)


def test_a_single_user_has_no_limits_on_the_queue() -> None:
    dispatch = load(None, {"MAITRED__PROFILE": "single-user"}).config.dispatch
    assert dispatch.max_waiting == {}
    assert set(dispatch.max_wait_s) == set(PriorityClass)
