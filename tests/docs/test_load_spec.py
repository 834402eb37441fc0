"""The page of a load run's settings is what the structs say, and its example is sound."""

import re
from pathlib import Path

import pytest
from msgspec import inspect

from maitred.cli.load.docs import page
from maitred.cli.load.flags import SPEC_FLAGS, described
from maitred.config.sources import parse_yaml
from maitred.config.walker import Walker, leaf_keys
from maitred.load.spec import LoadSpec, Tenant

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_committed_page_is_what_the_structs_render() -> None:
    committed = (DOCS / "load-settings.md").read_text(encoding="utf-8")
    assert committed == page(), "docs/load-settings.md is out of date: run `make docs`."


def test_every_setting_has_a_description() -> None:
    info = inspect.type_info(LoadSpec)
    assert isinstance(info, inspect.StructType)
    keys = [key for key in leaf_keys(info) if key != "tenants"] + [
        f"tenants.NAME.{name}" for name in Tenant.__struct_fields__
    ]
    for key in keys:
        assert f"### `{key}`\n\n" in page()
        assert len(page().partition(f"### `{key}`\n\n")[2].partition("\n")[0]) > 10, f"{key} has no description"


@pytest.mark.parametrize("name", ["load-settings.md", "load.md"])
def test_yaml_in_the_pages_is_a_sound_spec(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.key").write_text("k")
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        if "installation:" in block:  # a chaos plan, which has tests of its own
            continue
        root, faults = parse_yaml(block, name)
        walker = Walker({"OPENAI_API_KEY": "k"})
        assert walker.build(LoadSpec, root) is not None
        assert [*faults, *walker.faults] == []


@pytest.mark.parametrize("flag", SPEC_FLAGS, ids=lambda flag: flag.name)
def test_every_option_has_a_text(flag: object) -> None:
    assert len(flag.text or described(flag.key)) > 10
